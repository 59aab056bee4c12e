# SPDX-License-Identifier: Apache-2.0
"""Pure: what all steps of a build know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millpond.images.boards import Board
    from millpond.images.build.secure_boot import SigningKey


@dataclass(frozen=True, slots=True)
class Context:
    """A build of ``board`` into ``output``. ``cache`` outlives it. ``source`` is the working tree that
    millpond itself is taken from; ``serial`` is its time in seconds since 1970, so that later images have
    greater ones.
    """

    name: str
    board: Board
    source: Path
    output: Path
    cache: Path
    version: str
    serial: int
    epoch: int
    """The time that all files of the image have: when its packages were locked."""

    level: int
    """How hard zstd tries; 19 for what is given away."""

    signer: SigningKey | None = None
    """The key that signs the EFI program for Secure Boot."""

    @property
    def work(self) -> Path:
        """Return the folder for intermediate files, which is empty at the start of a build."""
        return self.output / "work"

    @property
    def root(self) -> Path:
        """Return the tree that becomes the root file system."""
        return self.work / "root"

    @property
    def clock(self) -> dict[str, str]:
        """Return environment variables that keep tools from writing the present time."""
        return {"SOURCE_DATE_EPOCH": str(self.epoch), "TZ": "UTC"}

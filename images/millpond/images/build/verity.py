# SPDX-License-Identifier: Apache-2.0
"""Edge (veritysetup): the root's hash tree, by which dm-verity on the device checks each block that is read.

The format is version 1 without salt: https://docs.kernel.org/admin-guide/device-mapper/verity.html
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.build.run import run

BLOCK_BYTES = 4096
ARGUMENT = "millpond.verity"
"""The kernel's argument that the first program reads. systemd would act on "roothash"."""


@dataclass(frozen=True, slots=True)
class VerifiedRoot:
    """A root file system of so many ``blocks``, behind which its hash tree lies; ``root_hash`` in hex."""

    blocks: int
    root_hash: str

    @property
    def argument(self) -> str:
        """Return the word of the kernel's command line that vouches for the root."""
        return f"{ARGUMENT}={self.blocks},{self.root_hash}"


def append_tree(root: Path) -> VerifiedRoot:
    """Append its hash tree to the file ``root``, after zeros up to a whole block. Raises LocalError."""
    blocks = -(-root.stat().st_size // BLOCK_BYTES)
    end = blocks * BLOCK_BYTES
    os.truncate(root, end)
    sizes = [f"--data-block-size={BLOCK_BYTES}", f"--hash-block-size={BLOCK_BYTES}"]
    places = [f"--data-blocks={blocks}", f"--hash-offset={end}"]
    options = ["--no-superblock", "--format=1", "--hash=sha256", "--salt=-"]
    told = run("veritysetup", "format", *options, *sizes, *places, root, root).decode()
    found = re.search(r"^Root hash:\s*([0-9a-f]{64})$", told, re.MULTILINE)
    if found is None:
        raise LocalError(f"veritysetup tells no root hash: {told.strip()}")
    return VerifiedRoot(blocks, found[1])

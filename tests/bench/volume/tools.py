# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the tools that the experiments share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.tunnel.programs import compile_program


@dataclass(frozen=True, slots=True)
class Tools:
    """``scratch`` is an empty folder, whose file system is the backing one. ``c_example`` is libfuse's, if
    there is one: a program that shows the root directory at its first argument. ``files`` is how many make a
    million, None for as many as the experiment would have; ``repeats`` those of
    the host's experiments likewise.
    """

    scratch: Path
    c_example: Path | None
    files: int | None = None
    repeats: int | None = None

    def blocks(self) -> Path:
        """The program that reads and writes blocks. Raises CompilationFailed."""
        (self.scratch / "volume").mkdir(exist_ok=True)
        return compile_program("volume/blocks", self.scratch)

    def folder(self, name: str) -> Path:
        """A new one that everybody may write."""
        made = self.scratch / name
        made.mkdir()
        made.chmod(0o777)
        return made


def file_system(folder: Path) -> str:
    """The type of the one it lies on."""
    found = (0, "?")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        place = Path(before.split(" ")[4])
        if folder.is_relative_to(place):
            found = max(found, (len(place.parts), after.split(" ")[0]), key=lambda entry: entry[0])
    return found[1]

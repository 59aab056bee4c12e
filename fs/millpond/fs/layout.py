"""Edge: how a device's flash directory is divided."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PUBLIC = "public"
PRIVATE = "private"


def prepare(backing: Path) -> None:
    """Make the public and the private part where they are missing; one that is there keeps its mode.

    Device and host both create files in the public part, as different users: anyone may. The private part
    is its owner's alone, so that even a process that should not see it cannot enter it.
    """
    _make(backing / PUBLIC, 0o777)
    _make(backing / PRIVATE, 0o700)


def _make(directory: Path, mode: int) -> None:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return
    directory.chmod(mode)  # whatever the umask


def private_bytes(backing: Path) -> int:
    """The bytes in private files, each counted once however many names it has; files may come and go."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for _, _, names, descriptor in os.fwalk(backing / PRIVATE):
        for name in names:
            try:
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            key = (found.st_dev, found.st_ino)
            if stat.S_ISREG(found.st_mode) and key not in seen:
                seen.add(key)
                total += found.st_size
    return total

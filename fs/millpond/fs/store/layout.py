# SPDX-License-Identifier: Apache-2.0
"""Edge: the public and the private part of a device's flash directory: made, and the file system below."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PUBLIC = "public"
PRIVATE = "private"


def prepare(backing: Path) -> None:
    """Make the public and the private part where they are missing; one that exists keeps its mode.

    Device and host both create files in the public part, as different users: anyone may. The private part is
    its owner's alone, so that even a process that should not see it cannot enter it.
    """
    _make(backing / PUBLIC, 0o777)
    _make(backing / PRIVATE, 0o700)


def _make(directory: Path, mode: int) -> None:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return
    directory.chmod(mode)  # whatever the umask


def main_device(root: int, public: bytes | None) -> int:
    """Return the device (st_dev) of the volume's own file system, which is that of the public part."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(public or b".", dir_fd=root).st_dev
    return os.fstat(root).st_dev

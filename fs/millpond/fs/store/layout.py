# SPDX-License-Identifier: Apache-2.0
"""Edge: makes the public and the private part of a device's flash directory."""

from __future__ import annotations

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

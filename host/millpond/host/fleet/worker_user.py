# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the user of jobs' and launches' processes on the host, and what that user can read.

It owns no file, is in no group, and is nobody else's. Where the daemon is not root, such a process is of the
daemon's own user, under this uid in a user namespace.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from millpond.linux.confinement.userns import has_many_uids

UID = 64008
MOST_LOOKED_AT = 1 << 18


def is_separate() -> bool:
    """Return whether these processes are of another user than the daemon."""
    return os.geteuid() == 0 and has_many_uids()


def give(folder: Path) -> None:
    """Make ``folder`` with all that is in it the user's. Raises OSError."""
    if is_separate():
        for path in (folder, *folder.rglob("*")):
            os.chown(path, UID, UID, follow_symlinks=False)


def can_read(folder: Path) -> bool:
    """Return whether the user can read all files below ``folder``, if it is shown that folder alone; looks at
    MOST_LOOKED_AT of them. Raises OSError.
    """
    if not is_separate():
        return True
    for number, path in enumerate(_below(folder)):
        mode, needed = path.stat().st_mode, 0o5 if path.is_dir() else 0o4
        if mode & needed != needed:
            return False
        if number == MOST_LOOKED_AT:
            break
    return True


def _below(folder: Path) -> Iterator[Path]:
    yield folder
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # a link to nowhere is not read
                path.stat()
                yield path

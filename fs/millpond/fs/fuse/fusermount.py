# SPDX-License-Identifier: Apache-2.0
"""Edge: runs fusermount, the set-uid helper of FUSE that lets users unmount their own mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from millpond.base.errors import LocalError

_SECONDS = 5.0


def unmount_by_helper(mountpoint: Path) -> None:
    """Unmount as ``mounts.unmount`` does, through fusermount. Raises LocalError."""
    helper = shutil.which("fusermount") or shutil.which("fusermount3")
    if helper is None:
        raise LocalError(f"{mountpoint}: cannot unmount: this user may not, and there is no fusermount")
    try:
        done = subprocess.run(
            [helper, "-u", "-z", os.fspath(mountpoint)], capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LocalError(f"{mountpoint}: cannot unmount: fusermount hangs") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise LocalError(f"{mountpoint}: cannot unmount: {reason[-1]}")

# SPDX-License-Identifier: Apache-2.0
"""Edge: the root of a volume on its device: the private part, and a mount point for the public part.

The root is a small read-only file system in memory. ``private`` in it is a bind mount of the flash's
directory: no process stands before it, so it has native speed and outlives the mount of the public part.
"""

from __future__ import annotations

from pathlib import Path

from millpond.base.errors import LocalError
from millpond.fs.fuse import mounts
from millpond.fs.store.layout import PRIVATE, PUBLIC
from millpond.linux import syscalls

_KIND, _SOURCE = "tmpfs", "millpond-volume"
_RESTRICTED = syscalls.MS_NOSUID | syscalls.MS_NODEV


def is_laid_out(root: Path) -> bool:
    """Return whether the top mount on ``root`` is the root of a volume. Asks the kernel alone."""
    return mounts.top_mount(root) == (_KIND, _SOURCE)


def lay_out(backing: Path, root: Path) -> None:
    """Mount a volume's root at ``root``, with the private part of ``backing`` in it and ``public`` as a mount
    point. Raises LocalError.
    """
    mounts.require_mountable(root, _SOURCE)
    try:
        syscalls.mount(_SOURCE, root, _KIND, _RESTRICTED, "size=64k,nr_inodes=16,mode=755")
        try:
            for part in (PUBLIC, PRIVATE):
                (root / part).mkdir()
            syscalls.bind(backing / PRIVATE, root / PRIVATE)
            syscalls.restrict_tree(root / PRIVATE, _RESTRICTED)
            syscalls.restrict(root, syscalls.MS_RDONLY | _RESTRICTED)
        except OSError:
            syscalls.unmount(root)
            raise
    except OSError as error:
        raise LocalError(f"{root}: cannot mount the volume's root: {error.strerror}") from None


def take_away(root: Path) -> None:
    """Unmount the volumes at ``root``, with all in them, without waiting. Raises LocalError."""
    while (is_laid_out(root) or mounts.is_volume(root)) and mounts.unmount(root):
        pass

"""Edge (a file system): room on the flash for names that are told later, which nobody else can take.

A prepared file has its inode already; but to name it, its directory may have to grow. So blocks are put by
before files are prepared, in a file without a name, and when a name finds the flash full, some are let go of
for it, by pieces. In blocks of the file system:

- A name splits one leaf of its directory at most, whatever and wherever it is: 1 block. To find the leaves
  again takes 1 more for 62 of them or more (ext4 with blocks of 1 KiB, half full), and 1 for 340 that lie
  apart. So NAMES names take 2048 + 34 + 7 blocks at most: 33 of the 64 pieces.
- What one name may need at a time is less than a piece: 7 blocks on ext4 (a leaf, three levels of the index,
  three of its extents), some 50 on XFS, which gives back most.
- Between a piece is let go of and the name takes it, others may: who is in the middle of a write. The other
  31 pieces are for them; who has taken what there is hears ENOSPC as soon as he wants more. Only if more
  programs than that go on writing to a full flash, as fast as names are told, can a name be lost.

This holds where one pool of blocks is for all (ext4, XFS, F2FS); Btrfs keeps one for names by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import Final

from millpond.fs.store.create import nameless
from millpond.fs.vfs.path_api import os_error
from millpond.linux import syscalls

NAMES: Final = 2048
"""That may be promised at once."""
_PIECE = 64  # blocks
_BLOCKS = 64 * _PIECE
_FULL = (errno.ENOSPC, errno.EDQUOT)


class SpaceReservation:
    """Of one file system. Threads may call at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names = 0
        self._file, self._left = -1, 0
        self._block = self._device = 0

    def hold(self, directory: int, count: int) -> int:
        """Keep room for so many names in directories like this one, or for fewer; for how many. Raises
        OSError: why there is none for the first.
        """
        with self._lock:
            count = max(0, min(count, NAMES - self._names))
            try:
                if count:
                    self._fill(directory)
                self._names += count
            finally:
                self._close_if_idle()
            return count

    def _fill(self, directory: int) -> None:
        if self._file < 0:
            self._file = nameless(directory)
            self._block = os.fstatvfs(self._file).f_frsize
            self._device = os.fstat(self._file).st_dev
        if os.fstat(directory).st_dev != self._device:  # something else is mounted there; or it is overlayfs
            raise os_error(errno.EXDEV)
        if self._left < _BLOCKS:
            self._allocate()

    def _allocate(self) -> None:
        try:
            syscalls.allocate(self._file, 0, 0, _BLOCKS * self._block)
            self._left = _BLOCKS
        except OSError:
            with contextlib.suppress(OSError):
                self._cut()  # what it got of it
            raise

    def _cut(self) -> None:
        os.ftruncate(self._file, self._left * self._block)

    def let_go(self, count: int) -> None:
        """So many names were made, or will not be."""
        with self._lock:
            self._names -= count
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Nothing is taken from the flash when nobody makes names."""
        if not self._names and self._file >= 0:
            os.close(self._file)
            self._file, self._left = -1, 0

    def naming(self, name: Callable[[], None]) -> None:
        """Make a name that room is held for. Raises OSError."""
        try:
            name()
        except OSError as error:
            if error.errno not in _FULL:
                raise
        else:
            return
        with self._lock:
            while not self._is_made(name):
                self._left -= _PIECE
                self._cut()

    def _is_made(self, name: Callable[[], None]) -> bool:
        """False if there was no room, and more can be made."""
        try:
            name()
        except OSError as error:
            if error.errno not in _FULL or not self._left:
                raise
            return False
        return True

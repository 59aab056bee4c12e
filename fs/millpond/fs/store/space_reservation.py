# SPDX-License-Identifier: Apache-2.0
"""Edge (a file system): reserves room on the flash for names that are linked later, and small contents.

A preallocated file has its inode already; but to link its name, its directory may have to grow, and what is
told with the name is to be written. So blocks are allocated before files are preallocated, in a file without
a name, and when a link or a write finds the flash full, some are freed for it, by pieces. In blocks of the
file system:

- A name splits one leaf of its directory at most, whatever and wherever it is: 1 block. To find the leaves
  again takes 1 more for 62 of them or more (ext4 with blocks of 1 KiB, half full), and 1 for 340 that lie
  apart. So MAX_NAMES names take 2048 + 34 + 7 blocks at most: 33 of the 128 pieces.
- The contents of a file take CONTENT_BLOCKS at most, and those of MAX_NAMES files 64 pieces.
- One name needs less than a piece at a time: 7 blocks on ext4 (a leaf, three levels of the index,
  three of its extents), some 50 on XFS, which gives back most.
- Between the freeing of a piece and the link, other programs may take it: those in the middle of a write.
  The other 31 pieces are for them; a program that has taken what there is gets ENOSPC as soon as it wants
  more. Only if more programs than that go on writing to a full flash, as fast as names are linked, can a
  name be lost.

This holds where one pool of blocks is for all (ext4, XFS, F2FS); Btrfs keeps one for names by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import Final

from millpond.fs.store.create import open_unnamed
from millpond.fs.vfs.inode_api import Buffer
from millpond.fs.vfs.path_api import os_error
from millpond.linux import syscalls

MAX_NAMES: Final = 2048
"""Most names reserved at once."""
_PIECE = 64  # blocks
_BLOCKS = 128 * _PIECE
CONTENT_BLOCKS: Final = 2
"""Blocks for the contents of each file."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class SpaceReservation:
    """Reservation of one file system. Threads may call at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names = 0
        self._file, self._left = -1, 0
        self._block = self._device = 0

    @property
    def contents(self) -> int:
        """Bytes that there is room for in each file for whose name room is reserved."""
        return CONTENT_BLOCKS * self._block

    def hold(self, directory: int, count: int) -> int:
        """Reserve room for ``count`` names in directories like this one. Returns for how many there is room.
        Raises OSError: the reason why there is none for the first.
        """
        with self._lock:
            count = max(0, min(count, MAX_NAMES - self._names))
            try:
                if count:
                    self._fill(directory)
                self._names += count
            finally:
                self._close_if_idle()
            return count

    def _fill(self, directory: int) -> None:
        if self._file < 0:
            self._file = open_unnamed(directory)
            self._block = os.fstatvfs(self._file).f_frsize
            self._device = os.fstat(self._file).st_dev
        if os.fstat(directory).st_dev != self._device:  # another mount, or overlayfs
            raise os_error(errno.EXDEV)
        if self._left < _BLOCKS:
            self._allocate()

    def _allocate(self) -> None:
        try:
            syscalls.allocate(self._file, 0, 0, _BLOCKS * self._block)
            self._left = _BLOCKS
        except OSError:
            with contextlib.suppress(OSError):
                self._shrink()  # frees a partial allocation
            raise

    def _shrink(self) -> None:
        os.ftruncate(self._file, self._left * self._block)

    def release(self, count: int) -> None:
        """Release the room of names that were linked, or will not be."""
        with self._lock:
            self._names -= count
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Free all blocks while no names are reserved."""
        if not self._names and self._file >= 0:
            os.close(self._file)
            self._file, self._left = -1, 0

    def use(self, change: Callable[[], None]) -> None:
        """Make a name, or write contents, that room is reserved for. Raises OSError."""
        try:
            change()
        except OSError as error:
            if error.errno not in _FULL:
                raise
        else:
            return
        with self._lock:
            while not self._try(change):
                self._left -= _PIECE
                self._shrink()

    def _try(self, change: Callable[[], None]) -> bool:
        """Make the change; False if there was no room, and more can be freed."""
        try:
            change()
        except OSError as error:
            if error.errno not in _FULL or not self._left:
                raise
            return False
        return True


def write_whole(file: int, data: Buffer) -> None:
    """Write these bytes at the beginning of a file. Raises OSError, with perhaps some of them written."""
    done, left = 0, memoryview(data)
    while left[done:]:
        done += os.pwrite(file, left[done:], done)

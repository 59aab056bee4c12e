# SPDX-License-Identifier: Apache-2.0
"""Edge (memory that processes share): which directories may be delegated exclusively.

The delegation manager marks a directory before it grants an exclusive delegation. The device's mount looks at
the bitmap, which costs no message, and asks the manager only where it is marked. Several directories share a
slot, which counts them: a counting Bloom filter with one hash.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

_SLOTS: Final = 4096
_SIZE = _SLOTS * 4


class SharedBitmap:
    """The manager's end: a count of exclusive delegations in each slot. One thread may call at once."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(_SIZE)).cast("I")
        self._descriptor = -1

    def descriptor(self) -> int:
        """Return the memfd of the slots, to be passed on; it stays open here. Raises OSError."""
        if self._descriptor < 0:
            descriptor = os.memfd_create("millpond-bitmap", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, _SIZE)
                view = memoryview(mmap.mmap(descriptor, _SIZE)).cast("I")
            except OSError:
                os.close(descriptor)
                raise
            view[:] = self._view
            self._view, self._descriptor = view, descriptor
        return self._descriptor

    def add(self, inode: int) -> None:
        """Mark a directory that is about to be delegated exclusively."""
        self._view[inode % _SLOTS] += 1

    def remove(self, inode: int) -> None:
        """Unmark a directory that is delegated exclusively no more."""
        self._view[inode % _SLOTS] -= 1

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class SharedBitmapView:
    """The device's end: a read-only view of the slots. Closes ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        try:
            self._view = memoryview(mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ)).cast("I")
        finally:
            os.close(descriptor)

    def has(self, inode: int) -> bool:
        """Return whether this directory may be delegated exclusively."""
        return self._view[inode % _SLOTS] > 0

"""Edge (memory that processes share): which directories may be held exclusively, for who only looks.

The lock master marks a directory before it grants it exclusively. The device's mount looks at the mark, which
costs nothing, and asks the master only where there is one. Several directories share a mark.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

_SLOTS: Final = 4096
_SIZE = _SLOTS * 4


class SharedBitmap:
    """The master's: how many directories have each mark. One thread may call at once."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(_SIZE)).cast("I")
        self._descriptor = -1

    def shared(self) -> int:
        """A descriptor of them, to be given away and kept open here. Raises OSError."""
        if self._descriptor < 0:
            descriptor = os.memfd_create("millpond-marks", os.MFD_CLOEXEC)
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
        """This one is about to be held exclusively."""
        self._view[inode % _SLOTS] += 1

    def remove(self, inode: int) -> None:
        """It is no longer."""
        self._view[inode % _SLOTS] -= 1

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class SharedBitmapView:
    """The same, as seen by who was given its ``descriptor``, which is closed."""

    def __init__(self, descriptor: int) -> None:
        try:
            self._view = memoryview(mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ)).cast("I")
        finally:
            os.close(descriptor)

    def has(self, inode: int) -> bool:
        """Whether this directory may be held exclusively."""
        return self._view[inode % _SLOTS] > 0

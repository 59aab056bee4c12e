# SPDX-License-Identifier: Apache-2.0
"""Edge (memfd): share memory between two processes so that neither can take it away from the other."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass

_NO_RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>


class SharedBuffer:
    """A mapping of a shared memory file as ``data``; it and its ``descriptor`` last as long as
    this object.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)
        self.data = memoryview(mmap.mmap(self.descriptor, size))

    def part(self, start: int, size: int) -> SharedSlice:
        """Return ``size`` bytes of it from ``start``. Raises IndexError."""
        if not 0 <= start <= start + size <= len(self.data):
            raise IndexError(f"{size} bytes at {start} are not all in {len(self.data)}")
        return SharedSlice(self, start, size)


@dataclass(frozen=True, slots=True)
class SharedSlice:
    """A part of shared memory. A socket can send it without a copy: it must not change until the receiver has
    it.
    """

    shared: SharedBuffer
    start: int
    size: int

    @property
    def descriptor(self) -> int:
        """Descriptor of the whole memory."""
        return self.shared.descriptor

    @property
    def data(self) -> memoryview:
        """The bytes of the part."""
        return self.shared.data[self.start : self.start + self.size]


def make(name: str) -> int:
    """Make a memory file without a size yet, to be passed to another process; returns its descriptor."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def map_first(descriptor: int, size: int) -> SharedBuffer:
    """Set the size of a memory file in bytes, for good, and map it. Raises OSError, also if it has another
    size.
    """
    os.ftruncate(descriptor, size)
    _check_size(descriptor, size)
    return SharedBuffer(descriptor, size)


def map_second(descriptor: int, size: int) -> SharedBuffer:
    """Map a memory file that the other process has sized. Raises ValueError if it is not of ``size`` bytes
    for good.
    """
    _check_size(descriptor, size)
    return SharedBuffer(descriptor, size)


def map_read_only(descriptor: int, size: int) -> mmap.mmap:
    """Map, to be read, a memory file that the other process has sized and writes to. Raises ValueError as
    above.
    """
    _check_size(descriptor, size)
    return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)


def freeze(descriptor: int) -> None:
    """Seal the memory file against further writable mappings (F_SEAL_FUTURE_WRITE, Linux 5.1; no effect
    before). Raises ValueError if it was sealed in another way.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    except PermissionError:
        raise ValueError("the shared memory cannot be kept from other writers") from None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _check_size(descriptor: int, size: int) -> None:
    try:
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, _NO_RESIZE
        )  # else it could be truncated under this mapping
    except PermissionError:  # it was sealed before
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _NO_RESIZE != _NO_RESIZE:
            raise ValueError("the shared memory cannot be kept from shrinking") from None
    if os.fstat(descriptor).st_size != size:
        raise ValueError(f"the shared memory has {os.fstat(descriptor).st_size} bytes, not {size}")

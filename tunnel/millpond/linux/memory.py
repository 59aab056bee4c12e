# SPDX-License-Identifier: Apache-2.0
"""Edge (memfd): share memory between two processes so that neither can take it away from the other."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

_NO_RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>
# By the last byte of an entry in /proc/PID/pagemap, as proc_pid_pagemap(5) has it: whether the page is in
# memory (bit 63) or swapped out (62), and not a file's (61), but the process's own.
_OWN = bytes(byte & 0xC0 != 0 and byte & 0x20 == 0 for byte in range(256))
_MAP_NORESERVE = 0x4000  # <asm-generic/mman.h>


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


class CowView:
    """A private mapping (copy on write) of another process's memory as ``data``, to be read. It shows the
    other process's writes, except on pages that this process has written itself.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        # no memory is reserved for copies: nothing should be written
        self._map = mmap.mmap(self._descriptor, size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
        self.data = memoryview(self._map)
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) // mmap.PAGESIZE
        self._pages = -(-size // mmap.PAGESIZE)

    def forget(self) -> int | None:
        """Drop the pages that were written here. Returns the offset of the first byte that differed from the
        other process's; None if there is none or the kernel does not tell.
        """
        changed = None
        with contextlib.suppress(OSError):  # a kernel without CONFIG_PROC_PAGE_MONITOR
            pages = self._written()
            if not pages:
                return None
            changed = next((place for page in pages if (place := self._change(page)) is not None), None)
        self._map.madvise(mmap.MADV_DONTNEED)
        return changed

    def _written(self) -> list[int]:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            entries = os.pread(pagemap.fileno(), 8 * self._pages, 8 * self._first)
        own = entries[7 if sys.byteorder == "little" else 0 :: 8].translate(_OWN)
        return [page for page, written in enumerate(own) if written] if 1 in own else []

    def _change(self, page: int) -> int | None:
        """Return the offset of the first byte in a page that differs from the other process's."""
        start = page * mmap.PAGESIZE
        theirs = os.pread(self._descriptor, mmap.PAGESIZE, start)
        ours = self.data[start : start + mmap.PAGESIZE]
        return next(
            (start + n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None
        )


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
    return SharedBuffer(descriptor, size)


def map_second(descriptor: int, size: int) -> SharedBuffer:
    """Map a memory file that the other process has sized. Raises ValueError if it is not of ``size`` bytes
    for good.
    """
    _check_size(descriptor, size)
    return SharedBuffer(descriptor, size)


def map_private(descriptor: int, size: int) -> CowView:
    """Map, to be read, a memory file that the other process has sized and writes to. Raises ValueError as
    above.
    """
    _check_size(descriptor, size)
    return CowView(descriptor, size)


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

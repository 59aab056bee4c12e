"""Edge (memfd): memory that two processes share, and that neither can take away from the other."""

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

_LASTING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>
# By the last byte of an entry in /proc/PID/pagemap, as proc_pid_pagemap(5) has it: whether the page is in
# memory (bit 63) or swapped out (62), and not a file's (61), but the process's own.
_OWN = bytes(byte & 0xC0 != 0 and byte & 0x20 == 0 for byte in range(256))
_MAP_NORESERVE = 0x4000  # <asm-generic/mman.h>


class SharedBuffer:
    """Memory that is mapped here as ``data``; it and its ``descriptor`` last as long as this object."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)
        self.data = memoryview(mmap.mmap(self.descriptor, size))

    def part(self, start: int, size: int) -> SharedSlice:
        """``size`` bytes of it."""
        if not 0 <= start <= start + size <= len(self.data):
            raise IndexError(f"{size} bytes at {start} are not all in {len(self.data)}")
        return SharedSlice(self, start, size)


class CowView:
    """Memory of another process that is mapped here as ``data`` to be read: it shows what the other writes
    until something is written here, which is then seen here alone.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        # nothing is to be written: no memory is to be set aside for it
        self._map = mmap.mmap(self._descriptor, size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
        self.data = memoryview(self._map)
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) // mmap.PAGESIZE
        self._pages = -(-size // mmap.PAGESIZE)

    def forget(self) -> int | None:
        """Forget what was written here. Returns the offset of the first byte that the other has not written
        as well, None if there is none or the kernel does not tell.
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
        """The offset of the first byte in a page that differs from the other's."""
        start = page * mmap.PAGESIZE
        theirs = os.pread(self._descriptor, mmap.PAGESIZE, start)
        ours = self.data[start : start + mmap.PAGESIZE]
        return next(
            (start + n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None
        )


@dataclass(frozen=True, slots=True)
class SharedSlice:
    """Part of shared memory. A socket can send it without a copy: it must then stay as it is until the
    receiver has it.
    """

    shared: SharedBuffer
    start: int
    size: int

    @property
    def descriptor(self) -> int:
        """Of the whole memory."""
        return self.shared.descriptor

    @property
    def data(self) -> memoryview:
        """The bytes themselves."""
        return self.shared.data[self.start : self.start + self.size]


def make(name: str) -> int:
    """The descriptor of memory without a size yet, to be passed to another process."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def map_first(descriptor: int, size: int) -> SharedBuffer:
    """Give it a size in bytes, which stays, and map it. Raises OSError, also if it has another."""
    os.ftruncate(descriptor, size)
    return SharedBuffer(descriptor, size)


def map_second(descriptor: int, size: int) -> SharedBuffer:
    """Map what the other process has sized. Raises ValueError if it is not of ``size`` bytes for good."""
    _check_size(descriptor, size)
    return SharedBuffer(descriptor, size)


def map_private(descriptor: int, size: int) -> CowView:
    """Map what the other process has sized and goes on to write, to read it. Raises ValueError as above."""
    _check_size(descriptor, size)
    return CowView(descriptor, size)


def freeze(descriptor: int) -> None:
    """From now on only who has mapped it before can write there; before Linux 5.1 whoever wants can. Raises
    ValueError if it was sealed.
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
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _LASTING)  # else its end could be cut off under us
    except PermissionError:  # it was sealed before, in whatever way
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _LASTING != _LASTING:
            raise ValueError("the shared memory cannot be kept from shrinking") from None
    if os.fstat(descriptor).st_size != size:
        raise ValueError(f"the shared memory has {os.fstat(descriptor).st_size} bytes, not {size}")

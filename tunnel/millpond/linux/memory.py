"""Edge (memfd): memory that two processes share, and that neither can take away from the other."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass

_LASTING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Shared:
    """Memory that is mapped here as ``data``; it and its ``descriptor`` last as long as this object."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)
        self.data = memoryview(mmap.mmap(self.descriptor, size))

    def part(self, start: int, size: int) -> Stretch:
        """``size`` bytes of it."""
        if not 0 <= start <= start + size <= len(self.data):
            raise IndexError(f"{size} bytes at {start} are not all in {len(self.data)}")
        return Stretch(self, start, size)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of shared memory. A socket can send it without a copy: it must then stay as it is until the
    receiver has it.
    """

    shared: Shared
    start: int
    size: int

    @property
    def data(self) -> memoryview:
        """The bytes themselves."""
        return self.shared.data[self.start : self.start + self.size]


def make(name: str) -> int:
    """The descriptor of memory without a size yet, to be passed to another process."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def map_first(descriptor: int, size: int) -> Shared:
    """Give it a size in bytes, which stays, and map it. Raises OSError, also if it has another."""
    os.ftruncate(descriptor, size)
    return Shared(descriptor, size)


def map_second(descriptor: int, size: int) -> Shared:
    """Map what the other process has sized. Raises ValueError if it is not of ``size`` bytes for good."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _LASTING)  # else its end could be cut off under us
    except PermissionError:  # it was sealed before, in whatever way
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _LASTING != _LASTING:
            raise ValueError("the shared memory cannot be kept from shrinking") from None
    if os.fstat(descriptor).st_size != size:
        raise ValueError(f"the shared memory has {os.fstat(descriptor).st_size} bytes, not {size}")
    return Shared(descriptor, size)

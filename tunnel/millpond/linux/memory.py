"""Edge (memfd): memory that two processes share, and that neither can take away from the other."""

from __future__ import annotations

import fcntl
import mmap
import os

_LASTING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def make(name: str) -> int:
    """The descriptor of memory without a size yet, to be passed to another process."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def map_first(descriptor: int, size: int) -> memoryview:
    """Give it a size in bytes, which stays, and map it. Raises OSError, also if it has another."""
    os.ftruncate(descriptor, size)
    return _map(descriptor, size)


def map_second(descriptor: int, size: int) -> memoryview:
    """Map what the other process has sized. Raises ValueError if it is not of ``size`` bytes for good."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _LASTING)  # else its end could be cut off under us
    except PermissionError:  # it was sealed before, in whatever way
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _LASTING != _LASTING:
            raise ValueError("the shared memory cannot be kept from shrinking") from None
    if os.fstat(descriptor).st_size != size:
        raise ValueError(f"the shared memory has {os.fstat(descriptor).st_size} bytes, not {size}")
    return _map(descriptor, size)


def _map(descriptor: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size))

"""Edge (libc): what a process that lasts keeps of the memory that its start took."""

from __future__ import annotations

import ctypes
import gc


def trim_heap() -> None:
    """Give the kernel back what is free. To import takes up to a MiB that nobody would use again."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(ctypes.c_size_t(0))

# SPDX-License-Identifier: Apache-2.0
"""Edge (libc): return free heap memory to the kernel."""

from __future__ import annotations

import ctypes
import gc


def trim_heap() -> None:
    """Return free heap memory to the kernel after start-up (malloc_trim): imports leave up to a MiB of it."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(ctypes.c_size_t(0))

"""Pure: a memory barrier for the Python engine; CPython offers none by that name."""

from __future__ import annotations

import platform
import threading

WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64", "i686")
"""Whether this processor may reorder two loads, or two stores. x86 does not; there only a load that follows a
store needs a fence."""

_lock = threading.Lock()
_lock.acquire()
_release, _acquire = _lock.release, _lock.acquire


def fence() -> None:
    """Order every load and store before it with every one after it.

    The lock is held between calls, so each call is a store-release and then a load-acquire. On x86 either is
    a locked instruction, a full barrier. ARMv8 never lets a load-acquire pass an earlier store-release, so
    the pair is one there too.
    """
    _release()
    _acquire()

# SPDX-License-Identifier: Apache-2.0
"""Pure: provide a memory barrier to the datapath in Python; CPython has none by that name."""

from __future__ import annotations

import platform
import threading

WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64", "i686")
"""Whether this processor may reorder two loads, or two stores, of any memory. x86 does not, so there only a
load that follows a store needs a barrier; except for memory that is mapped write-combining
(``transports/ivshmem/sysfs.py``), which is weakly ordered on any processor.
"""

_lock = threading.Lock()
_lock.acquire()
_release, _acquire = _lock.release, _lock.acquire


def barrier() -> None:
    """Order every load and store before it with every one after it.

    The lock is held between calls, so each call is a store-release and then a load-acquire. On x86 either is
    a locked instruction, a full barrier; on Intel's not for loads of write-combining memory. ARMv8 never lets
    a load-acquire pass an earlier store-release, so the pair is one there too.
    """
    _release()
    _acquire()


def barrier_of_threads() -> None:
    """Be a ``barrier`` for a process whose threads may call it at once: the lock is of this call alone."""
    held = threading.Lock()
    held.acquire()
    held.release()
    held.acquire()

# SPDX-License-Identifier: Apache-2.0
"""Edge: leases in a file that outlives the server: the next server changes nothing until they have
expired.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from millpond.linux.files import boot_id

LEASE_SECONDS = 10.0
SIZE = mmap.PAGESIZE
_SLOT = struct.Struct("=16sd")  # a client's name, and when its lease ends; the first one names the boot
_OFFSETS = range(_SLOT.size, SIZE - _SLOT.size + 1, _SLOT.size)  # far more than there are clients


def since_boot() -> float:
    """Return the seconds since boot, time in suspend included (CLOCK_BOOTTIME): the same clock in every
    process.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def open_leases(path: Path) -> int:
    """Open the lease file, and allocate it in full. Returns the descriptor. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)  # a store to a hole on a full flash is a SIGBUS
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class PersistentLeases:
    """Leases of clients, by client name, each of ``seconds``, in a mapped file of ``SIZE`` bytes. A lease
    that an earlier server left there ends when its time is over, or when the client comes to this server;
    those of before this ``boot`` are over.
    """

    def __init__(
        self,
        descriptor: int,
        seconds: float,
        clock: Callable[[], float] = since_boot,
        boot: Callable[[], bytes] = boot_id,
    ) -> None:
        self._map, self._seconds, self._clock = mmap.mmap(descriptor, SIZE), seconds, clock
        self._offsets: dict[bytes, int] = {}
        self._former: dict[bytes, float] = {}
        self._lock = threading.Lock()
        now, this_boot = clock(), _SLOT.pack(boot(), 0.0)
        if self._map[: _SLOT.size] != this_boot:
            self._map[:] = this_boot.ljust(SIZE, b"\0")
        for place in _OFFSETS:
            name, end = _SLOT.unpack_from(self._map, place)
            if now < end <= now + seconds:
                self._offsets[name], self._former[name] = place, end

    def renew(self, name: bytes) -> None:
        """Start a client's lease anew."""
        with self._lock:
            self._former.pop(name, None)
            if name not in self._offsets:
                taken = set(self._offsets.values())
                free = next((place for place in _OFFSETS if place not in taken), None)
                if free is None:
                    return  # the file is full, after more servers in one lease than can be
                self._offsets[name] = free
            _SLOT.pack_into(self._map, self._offsets[name], name, self._clock() + self._seconds)

    def end(self, name: bytes) -> None:
        """End a client's lease."""
        with self._lock:
            self._end(name)

    def _end(self, name: bytes) -> None:
        self._former.pop(name, None)
        if (place := self._offsets.pop(name, None)) is not None:
            _SLOT.pack_into(self._map, place, name, 0.0)

    def has_former(self, but: bytes | None) -> bool:
        """Return whether a lease from an earlier server is still valid, of another client than ``but``."""
        if not self._former:
            return False
        with self._lock:
            now = self._clock()
            for name in [name for name, end in self._former.items() if end <= now]:
                self._end(name)
            return any(name != but for name in self._former)

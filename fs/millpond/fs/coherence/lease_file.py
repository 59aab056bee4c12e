"""Edge: leases that outlast a server: the next one has nothing changed until they are over."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

LEASE_SECONDS = 10.0
SIZE = mmap.PAGESIZE
_SLOT = struct.Struct("=16sd")  # a client's name, and when its lease ends
_PLACES = range(0, SIZE - _SLOT.size + 1, _SLOT.size)  # far more than there are clients


def since_boot() -> float:
    """Seconds, those too for which the machine was suspended, in every process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def open_leases(path: Path) -> int:
    """The file's descriptor. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)  # a hole would end the server when the flash is full
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class PersistentLeases:
    """The leases of clients, by name, each of so many ``seconds``, in a file that has ``SIZE`` bytes. Those
    that an earlier server left there are over when their time is, or when the client comes to this one.
    """

    def __init__(self, descriptor: int, seconds: float, clock: Callable[[], float] = since_boot) -> None:
        self._map, self._seconds, self._clock = mmap.mmap(descriptor, SIZE), seconds, clock
        self._places: dict[bytes, int] = {}
        self._former: dict[bytes, float] = {}
        self._lock = threading.Lock()
        now = clock()
        for place in _PLACES:
            name, end = _SLOT.unpack_from(self._map, place)
            if now < end <= now + seconds:  # or it is of before the machine was started
                self._places[name], self._former[name] = place, end

    def renew(self, name: bytes) -> None:
        """A client's lease begins anew, now."""
        with self._lock:
            self._former.pop(name, None)
            if name not in self._places:
                taken = set(self._places.values())
                free = next((place for place in _PLACES if place not in taken), None)
                if free is None:
                    return  # many more servers have come and gone in one lease than ever will
                self._places[name] = free
            _SLOT.pack_into(self._map, self._places[name], name, self._clock() + self._seconds)

    def end(self, name: bytes) -> None:
        """A client keeps nothing."""
        with self._lock:
            self._end(name)

    def _end(self, name: bytes) -> None:
        self._former.pop(name, None)
        if (place := self._places.pop(name, None)) is not None:
            _SLOT.pack_into(self._map, place, name, 0.0)

    def outlast(self, but: bytes | None) -> bool:
        """Whether any of an earlier server still lasts, of another client than ``but``."""
        if not self._former:
            return False
        with self._lock:
            now = self._clock()
            for name in [name for name, end in self._former.items() if end <= now]:
                self._end(name)
            return any(name != but for name in self._former)

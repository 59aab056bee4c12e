# SPDX-License-Identifier: Apache-2.0
"""Edge: wake a sleeping peer by eventfd or register, and sleep until the peer does.

A sleep word is 0 while its side is awake, and n + 1 while it waits for ring entry n (a shadow doorbell with
an event index, as NVMe and virtio have them).
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from millpond.tunnel.datapath.stats_shm import SharedStats
from millpond.tunnel.ring.barrier import barrier

SAFETY_TIMEOUT_MS = 100
"""The longest sleep: a lost wake-up costs this much latency, never a hang."""
SPURIOUS_WAKEUPS, REST_MS = 64, 1
"""After so many spurious wake-ups in a row, which an honest peer never causes, each costs a pause."""


@dataclass(frozen=True, slots=True)
class Notifier:
    """Notifies the peer's pump: by an eventfd, or a device register that takes ``value`` in one store."""

    descriptor: int = -1
    register: memoryview | None = None
    value: int = 1

    def notify(self) -> None:
        """Notify the peer. Only a pump may call this: a hostile peer can make the write to an eventfd block
        for ever.
        """
        if self.register is not None:
            barrier()  # ring and register are memory of different kinds: this store could pass earlier ones
            self.register[0] = self.value
            return
        with suppress(BlockingIOError):  # after 2^64 writes, or if the peer filled its own eventfd
            os.eventfd_write(self.descriptor, 1)


class Waker:
    """Wakes the peer whose sleep word is ``word``."""

    def __init__(self, word: memoryview, notifier: Notifier, stats: SharedStats) -> None:
        self.word, self._notify, self._stats = word, notifier.notify, stats

    def wake_if_waiting(self, entry: int) -> None:
        """Wake the peer if it sleeps on ring entry ``entry``; call it after that entry is published."""
        barrier()
        if self.word[0] == entry + 1:
            self.wake()

    def wake(self) -> None:
        """Wake the peer, whose sleep word was seen to be set."""
        self.word[0] = 0  # before the notification, so that a cleared word is always followed by one
        self._notify()
        self._stats.notified()


class Sleeper:
    """Sleeps on an eventfd until the ring holds a given entry; ``word`` is its own sleep word."""

    def __init__(self, word: memoryview, eventfd: int, stats: SharedStats) -> None:
        self._word, self._stats = word, stats
        self._poll = select.epoll()
        # Edge-triggered: each write is one event, and the eventfd need never be read.
        self._poll.register(eventfd, select.EPOLLIN | select.EPOLLET)
        self._rest, self._spurious = select.poll(), 0

    def wait(self, entry: int, ready: Callable[[], bool]) -> None:
        """Sleep until the peer publishes ``entry``, at most 100 ms; not at all if it is ``ready`` already."""
        self._word[0] = entry + 1
        barrier()
        if not ready():
            self._stats.slept()
            if self._poll.poll(SAFETY_TIMEOUT_MS / 1000):
                self._count_wakeup(ready())
        self._word[0] = 0

    def _count_wakeup(self, ready: bool) -> None:
        self._spurious = 0 if ready else self._spurious + 1
        if self._spurious > SPURIOUS_WAKEUPS:
            self._rest.poll(REST_MS)

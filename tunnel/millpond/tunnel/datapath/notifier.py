"""Edge: doorbell interrupts between the ends, rung only for a peer that sleeps on what just happened.

A sleep word is 0 while its side is awake, and n + 1 while it waits for ring entry n.
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
"""The longest sleep: whatever goes wrong with a wake-up costs this much, never a hang."""
FALSE_ALARMS, REST_MS = 64, 1
"""After so many bells in a row that brought nothing, which an honest peer never rings, each costs a rest."""


@dataclass(frozen=True, slots=True)
class Notifier:
    """What wakes the peer: an eventfd, or a device register that takes ``value`` in one aligned store."""

    descriptor: int = -1
    register: memoryview | None = None
    value: int = 1

    def ring(self) -> None:
        """Wake it. On an eventfd this may wait for ever, if a hostile peer wants: only a pump may ring."""
        if self.register is not None:
            barrier()  # this store may pass others: the register and the ring are memory of different kinds
            self.register[0] = self.value
            return
        with suppress(BlockingIOError):  # after 2^64 rings, or if the peer filled its own bell
            os.eventfd_write(self.descriptor, 1)


class Waker:
    """Wakes the peer whose sleep word is ``word``."""

    def __init__(self, word: memoryview, bell: Notifier, counters: SharedStats) -> None:
        self.word, self._ring, self._counters = word, bell.ring, counters

    def ring(self, slot: int) -> None:
        """Call it after ring entry ``slot`` is published: wakes the peer if it waits for that one."""
        barrier()
        if self.word[0] == slot + 1:
            self.wake()

    def wake(self) -> None:
        """Wake the peer, which was seen to wait."""
        self.word[0] = 0  # before the bell: whoever clears the word always rings after it
        self._ring()
        self._counters.rang()


class Sleeper:
    """Waits on an eventfd until the ring holds what it waits for; ``word`` is its own sleep word."""

    def __init__(self, word: memoryview, bell: int, counters: SharedStats) -> None:
        self._word, self._counters = word, counters
        self._poll = select.epoll()
        # Edge-triggered: each ring is one event, and the eventfd need never be read.
        self._poll.register(bell, select.EPOLLIN | select.EPOLLET)
        self._rest, self._false_alarms = select.poll(), 0

    def wait(self, slot: int, ready: Callable[[], bool]) -> None:
        """Sleep until the peer publishes ``slot``, at most 100 ms; not at all if it is ``ready`` already."""
        self._word[0] = slot + 1
        barrier()
        if not ready():
            self._counters.slept()
            if self._poll.poll(SAFETY_TIMEOUT_MS / 1000):
                self._count_alarm(ready())
        self._word[0] = 0

    def _count_alarm(self, true: bool) -> None:
        self._false_alarms = 0 if true else self._false_alarms + 1
        if self._false_alarms > FALSE_ALARMS:
            self._rest.poll(REST_MS)

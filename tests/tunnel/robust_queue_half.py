# SPDX-License-Identifier: Apache-2.0
"""The actions of either peer on its half of one queue, honest or not, by name and at random.

Two of them that are told the same do the same, as long as their loops do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

from .robust_engine import MOST_TAKEN, RunningLoop
from .robust_packets import Packets

EDGES = (0, 1, 2, 0x80, 0xFFFF, 0x10000, 2**31, 2**32 - 1)
MOST_WAITING = 12
Act = Callable[[], None]


class Half:
    """What hosts and controllers have in common."""

    HONEST: ClassVar[tuple[str, ...]] = ("work", "work", "work", "doze", "storm")
    WRONG: ClassVar[tuple[str, ...]] = ("strange_doze",)

    def __init__(self, loop: RunningLoop) -> None:
        self.loop, self.memory = loop, loop.memory
        self.entries, self.room = loop.memory.entries, loop.memory.span.size
        self.random = random.Random()
        self._packets = Packets(loop.setting, self.random, self.room)
        self.honest = True
        self.expected: list[bytes] = []
        """What the interface must be given, as long as all is honest."""
        self.sent: list[bytes] = []
        """Packets from the interface, as far as they fit a buffer."""
        self.received: list[bytes] = []

    def act(self, name: str, seed: int) -> None:
        """One of HONEST or WRONG."""
        self.random.seed(seed)
        self.expected.clear()
        self.honest = self.honest and name in self.HONEST
        act: Act = getattr(self, name)
        act()

    def work(self) -> None:
        """Packets either way, as the protocol has it."""
        raise NotImplementedError

    def doze(self) -> None:
        """Wait for some entry to be published."""
        self.loop.peer_word[0] = self.random.randrange(self.entries + 1)

    def strange_doze(self) -> None:
        self.loop.peer_word[0] = self.number()

    def storm(self) -> None:
        """Notifications for nothing."""
        for _ in range(self.random.randrange(1, 100)):
            self.loop.ring(self.random.choice((1, 1000, 1 << 32)))

    def number(self, bits: int = 32) -> int:
        """Often one at which something ends."""
        ends = (*EDGES, *range(self.entries - 1, self.entries + 2))
        number = self.random.choice(ends) if self.random.random() < 0.7 else self.random.getrandbits(bits)
        return number & ((1 << bits) - 1)

    def length(self) -> int:
        """Strange for a packet."""
        vnet, room = self.loop.setting.vnet_header, self.room
        return self.random.choice(
            (0, 1, vnet, vnet + 1, vnet + 20, room - 1, room, room + 1, 2**31, 2**32 - 1)
        )

    def packet(self) -> bytes:
        """For the interface: a good one more often than not; ``expected`` knows it."""
        if self.random.random() < 0.4:
            return self._packets.bad()
        packet = self._packets.good()
        if len(packet) < MOST_TAKEN:
            self.expected.append(packet)
        return packet

    def traffic(self) -> None:
        """Some from the interface; long ones only when none waits, so that the wire holds them all."""
        waiting = len(self.sent) - self.loop.counts.packets
        for _ in range(self.random.randrange(min(5, max(MOST_WAITING - waiting, 1)))):
            most = self.room + 10_000 if not waiting and self.random.random() < 0.1 else 2000
            packet = self.random.randbytes(self.random.randint(1, most))
            self.loop.wire.send(packet)
            self.sent.append(packet[: self.room])
            waiting += 1

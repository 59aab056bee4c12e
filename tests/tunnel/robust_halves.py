"""The peer's half of one queue: what an honest peer does, and what it must not do, by name and at random.

Two of them that are told the same do the same, as long as their loops do.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import ClassVar

from millpond.tunnel import nvme
from millpond.tunnel.nvme import Opcode

from .robust_engine import MOST_TAKEN, RunningLoop
from .robust_packets import Packets

SQE = struct.Struct("<BBHIQQQQIIIIII")
EDGES = (0, 1, 2, 7, 8, 9, 0x80, 0xFFFF, 0x10000, 2**31, 2**32 - 1)
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
        """Bells for nothing."""
        for _ in range(self.random.randrange(1, 100)):
            self.loop.ring(self.random.choice((1, 1000, 1 << 32)))

    def number(self, bits: int = 32) -> int:
        edge = self.random.choice(EDGES) if self.random.random() < 0.7 else self.random.getrandbits(bits)
        return edge & ((1 << bits) - 1)

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


class ControllerHalf(Half):
    """Takes the loop's commands and completes them."""

    WRONG = (
        *Half.WRONG,
        "own_words",
        "stranger",
        "elsewhere",
        "beyond",
        "failed",
        "sizes",
        "old_phase",
        "early",
        "twice",
        "noise",
        "all_at_once",
    )

    def __init__(self, loop: RunningLoop) -> None:
        super().__init__(loop)
        self._quads = self.memory.completions.cast("Q")
        self._sq_head = self._cq_tail = 0
        self._phase = 1
        self._waiting: list[int] = []

    def work(self) -> None:
        self._fetch()
        if self.loop.outward:
            self.traffic()
        for _ in range(self.random.randrange(4)):
            if self._waiting:
                cid = self._waiting.pop(self.random.randrange(len(self._waiting)))
                self._complete(cid, self._fill(cid))

    def _fetch(self) -> None:
        tail = self.memory.tail_doorbell[0] % self.entries
        while self._sq_head != tail:
            fields = SQE.unpack_from(self.memory.submissions, nvme.SQE_SIZE * self._sq_head)
            self._waiting.append(fields[2])
            if self.loop.outward:
                self.received.append(bytes(self.memory.buffers[fields[2] % self.entries][: fields[8]]))
            self._sq_head = (self._sq_head + 1) % self.entries

    def _fill(self, cid: int) -> int:
        """What to report: the size of a packet, sometimes none; or anything where it has no meaning."""
        if self.loop.outward:
            return self.number()
        if self.random.random() < 0.1:
            return 0
        packet = self.packet()
        self.memory.buffers[cid % self.entries][: len(packet)] = packet
        return len(packet)

    def _complete(self, cid: int, result: int, **wrong: int) -> None:
        self._put(self._cq_tail, cid, result, **wrong)
        self._cq_tail = (self._cq_tail + 1) % self.entries
        if self._cq_tail == 0:
            self._phase ^= 1

    def _put(self, slot: int, cid: int, result: int, **wrong: int) -> None:
        normal = {"head": self._sq_head, "queue": self.memory.number, "status": 0, "phase": self._phase}
        fields = normal | wrong
        self._quads[2 * slot] = result | self.random.choice((0, self.number() << 32))
        flags = fields["status"] << 1 | fields["phase"]
        self._quads[2 * slot + 1] = fields["head"] | fields["queue"] << 16 | cid << 32 | flags << 48

    def _next(self) -> int:
        self._fetch()
        return self._waiting.pop(0) if self._waiting else 0

    def own_words(self) -> None:
        """Garbage in the doorbells, which are not the peer's to write."""
        self.random.choice((self.memory.tail_doorbell, self.memory.head_doorbell))[0] = self.number()

    def stranger(self) -> None:
        """A CID that is out of range or not in flight."""
        self._fetch()
        self._complete(self.number(16), self.length())

    def elsewhere(self) -> None:
        cid = self._next()
        self._complete(cid, self._fill(cid), queue=self.number(16))

    def beyond(self) -> None:
        cid = self._next()
        self._complete(cid, self._fill(cid), head=self.random.choice((self.number(16), self._sq_head + 1)))

    def failed(self) -> None:
        cid = self._next()
        self._complete(cid, self._fill(cid), status=self.number(15))

    def sizes(self) -> None:
        cid = self._next()
        self._fill(cid)
        self._complete(cid, self.length())

    def old_phase(self) -> None:
        cid = self._next()
        self._put(self._cq_tail, cid, self._fill(cid), phase=self._phase ^ 1)

    def early(self) -> None:
        """An entry later than it should."""
        cid = self._next()
        ahead = self._cq_tail + self.random.randrange(self.entries)
        phase = self._phase ^ (ahead >= self.entries)
        self._put(ahead % self.entries, cid, self._fill(cid), phase=phase)

    def twice(self) -> None:
        """The last completion again, as the next one."""
        last = (self._cq_tail - 1) % self.entries
        self._quads[2 * self._cq_tail] = self._quads[2 * last]
        flags = self._quads[2 * last + 1] & ~(1 << 48)
        self._quads[2 * self._cq_tail + 1] = flags | self._phase << 48
        self._cq_tail = (self._cq_tail + 1) % self.entries
        self._phase ^= self._cq_tail == 0

    def noise(self) -> None:
        for index in range(len(self._quads)):
            self._quads[index] = self.random.getrandbits(64)

    def all_at_once(self) -> None:
        """Every entry becomes a new one."""
        for slot in range(self.entries):
            self._quads[2 * slot + 1] ^= 1 << 48


class HostHalf(Half):
    """Submits commands to the loop and takes its completions."""

    WRONG = (
        *Half.WRONG,
        "opcodes",
        "identifiers",
        "addresses",
        "lengths",
        "tail",
        "torn_tail",
        "jump",
        "head",
        "greedy",
        "same",
        "noise",
        "own_ring",
    )

    def __init__(self, loop: RunningLoop) -> None:
        super().__init__(loop)
        self._quads = self.memory.completions.cast("Q")
        self._sq_tail = self._cq_head = 0
        self._phase = 1
        self._free = list(range(self.entries - 1))
        self._opcode = int(Opcode.RECV if loop.outward else Opcode.SEND)

    def work(self) -> None:
        self._take()
        if self.loop.outward:
            self.traffic()
        for _ in range(self.random.randrange(4)):
            if self._free:
                self._submit(self._free.pop(self.random.randrange(len(self._free))))
        self._publish()

    def _take(self) -> None:
        for _ in range(self.entries):
            last = self._quads[2 * self._cq_head + 1]
            if last >> 48 & 1 != self._phase:
                break
            cid = last >> 32 & 0xFFFF
            self._free.append(cid)
            if self.loop.outward:
                size = self._quads[2 * self._cq_head] & 0xFFFF_FFFF
                self.received.append(bytes(self.memory.buffers[cid % self.entries][:size]))
            self._cq_head = (self._cq_head + 1) % self.entries
            self._phase ^= self._cq_head == 0
        self.memory.head_doorbell[0] = self._cq_head

    def _submit(self, cid: int, **wrong: int) -> None:
        """Into the ring; the loop does not know yet."""
        buffer, length = cid % self.entries, self.room
        if not self.loop.outward:
            packet = self.packet()
            self.memory.buffers[buffer][: len(packet)] = packet
            length = len(packet)
        address = self.memory.span.start + buffer * self.room
        normal = {"opcode": self._opcode, "cid": cid, "address": address, "length": length}
        self._write(**(normal | wrong))
        self._sq_tail = (self._sq_tail + 1) % self.entries

    def _write(self, opcode: int, cid: int, address: int, length: int) -> None:
        ignored = [self.random.choice((0, self.number())) for _ in range(9)]
        fields = (opcode, 0, cid, *ignored[:3], address, ignored[3], length, *ignored[4:])
        SQE.pack_into(self.memory.submissions, nvme.SQE_SIZE * self._sq_tail, *fields)

    def _publish(self) -> None:
        self.memory.tail_doorbell[0] = self._sq_tail

    def _wrong(self, **wrong: int) -> None:
        """A command with a wrong field behind good ones."""
        self.work()
        self._submit(self._free.pop() if self._free else 0, **wrong)
        self._publish()

    def opcodes(self) -> None:
        self._wrong(opcode=self.random.choice((0, 1, 2, 0x80, 0x81, 0x82, 0xC1, self.number(8))))

    def identifiers(self) -> None:
        self._free.append(self.number(16))
        self._wrong()

    def addresses(self) -> None:
        span = self.memory.span
        near = [span.start - span.size, span.end, span.start + 1, span.end - 1, span.start + span.size // 2]
        far = [0, 1, len(self.loop.region.memory), 2**63, 2**64 - 1, 2**64 - span.size]
        other = span.start + self.random.randrange(span.count) * span.size
        shifted = other + (self.random.randrange(1, 1 << 20) << 44)
        self._wrong(address=self.random.choice([*near, *far, other, shifted, self.random.getrandbits(64)]))

    def lengths(self) -> None:
        self._wrong(length=self.length())

    def tail(self) -> None:
        self.memory.tail_doorbell[0] = self.number()

    def torn_tail(self) -> None:
        """One half of the doorbell, or a quarter."""
        octets = self.memory.tail_doorbell.cast("B")
        words = octets.cast("H") if self.random.random() < 0.5 else octets
        words[self.random.randrange(len(words))] = self.number(8)

    def jump(self) -> None:
        """Old entries again, or such as never were."""
        self._sq_tail = self.random.randrange(self.entries)
        self._publish()

    def head(self) -> None:
        self._submit(self._free.pop() if self._free else 0)
        self.memory.head_doorbell[0] = self.number()
        self._publish()
        if self.loop.outward:
            self.traffic()

    def greedy(self) -> None:
        """Commands again and again, and no completion taken."""
        for _ in range(self.entries - 1):
            self._submit(self.random.randrange(self.entries))
        self._publish()
        if self.loop.outward:
            self.traffic()

    def same(self) -> None:
        """One CID twice."""
        cid = self.random.randrange(self.entries)
        self._submit(cid)
        self._submit(cid)
        self._publish()

    def noise(self) -> None:
        ring = self.memory.submissions
        ring[:] = self.random.randbytes(len(ring))
        self.jump()

    def own_ring(self) -> None:
        """Garbage over the completions, which are not the peer's to write."""
        for index in range(len(self._quads)):
            self._quads[index] = self.random.getrandbits(64)

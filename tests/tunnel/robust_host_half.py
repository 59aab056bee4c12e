# SPDX-License-Identifier: Apache-2.0
"""A host's half of one queue: its legal actions and its violations."""

from __future__ import annotations

import struct

from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.nvme_defs import Opcode

from .robust_engine import RunningLoop
from .robust_queue_half import Half

SQE = struct.Struct("<BBHIQQQQIIIIII")


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
        SQE.pack_into(self.memory.submissions, nvme_defs.SQE_SIZE * self._sq_tail, *fields)

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

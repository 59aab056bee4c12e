# SPDX-License-Identifier: Apache-2.0
"""A controller's half of one queue: its legal actions and its violations."""

from __future__ import annotations

import struct

from millpond.tunnel.ring import nvme_defs

from .robust_engine import RunningLoop
from .robust_queue_half import Half

SQE = struct.Struct("<BBHIQQQQIIIIII")


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
            fields = SQE.unpack_from(self.memory.submissions, nvme_defs.SQE_SIZE * self._sq_head)
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

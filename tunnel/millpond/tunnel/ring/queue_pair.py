# SPDX-License-Identifier: Apache-2.0
"""Pure: use a queue pair as host or controller, over memory that a hostile peer can write to.

A ring of N entries holds N-1. The peer's entries are read once, in aligned loads, and checked before they
are used. Entries are complete before the doorbell or phase bit that announces them. The code is flat for
speed: it runs for every packet.
"""

from __future__ import annotations

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.barrier import barrier
from millpond.tunnel.ring.nvme_defs import Opcode, Status
from millpond.tunnel.ring.region import QueueMemory

Completion = tuple[int, int, int]
"""CID, DW0, status without the phase bit."""
Command = tuple[int, int, int, int]
"""Opcode, CID, index of its buffer, bytes."""

# A submission entry has 8 words of 64 bits or 16 of 32, a completion 2 or 4: offsets of the fields in these.
_SQE_QUADS, _SQE_WORDS, _PRP1_QUAD, _CDW10_WORD = 8, 16, 3, 10
_CQE_QUADS, _CQE_WORDS, _LAST_QUAD = 2, 4, 1


class HostQueue:
    """The host's side of a queue pair. The command with CID n uses buffer n; at most N-1 of the N CIDs are in
    flight.
    """

    def __init__(self, memory: QueueMemory) -> None:
        self.buffers = memory.buffers
        self._number, self._entries = memory.number, memory.entries
        self._weakly_ordered = memory.weakly_ordered
        memory.submissions[:] = bytes(len(memory.submissions))  # the fields that are never used stay zero
        self._submissions = memory.submissions.cast("Q")
        self._submission_words = memory.submissions.cast("I")
        self._completions, self._completion_words = memory.completions.cast("Q"), memory.completions.cast("I")
        self._tail_doorbell, self._head_doorbell = memory.tail_doorbell, memory.head_doorbell
        self._addresses = [memory.span.start + cid * memory.span.size for cid in range(memory.entries)]
        self._sq_head = self._sq_tail = self._cq_head = 0
        self._phase = 1
        self.free = list(range(memory.entries - 1))
        """CIDs whose buffers are free to fill."""
        self._in_flight = [False] * memory.entries

    def acquire(self) -> int | None:
        """Return a CID whose buffer is free to fill, None when all are in flight. The caller
        submits it next.
        """
        return self.free.pop() if self.free else None

    def submit(self, opcode: int, cid: int, length: int) -> int:
        """Submit a command over ``length`` bytes of the CID's buffer; returns the number of
        its ring entry.
        """
        entry = self._sq_tail
        self._in_flight[cid] = True
        self._submissions[_SQE_QUADS * entry] = opcode | cid << 16
        self._submissions[_SQE_QUADS * entry + _PRP1_QUAD] = self._addresses[cid]
        self._submission_words[_SQE_WORDS * entry + _CDW10_WORD] = length
        self._sq_tail = tail = (entry + 1) % self._entries
        if self._weakly_ordered:
            barrier()
        self._tail_doorbell[0] = tail
        return entry

    def entry(self, ahead: int) -> int:
        """Return the number of the completion ring's entry that is ``ahead`` entries behind the next one."""
        return (self._cq_head + ahead) % self._entries

    def ready(self, ahead: int = 0) -> bool:
        """Whether the completion at ``entry(ahead)`` is there; ``ahead`` is less than the entries of the
        ring.
        """
        position = self._cq_head + ahead
        phase = self._phase ^ (position >= self._entries)
        last = self._completions[_CQE_QUADS * (position % self._entries) + _LAST_QUAD]
        return last >> 48 & 1 == phase

    def reap(self) -> Completion | None:
        """Take the next completion and free its CID; None if there is none. Raises LinkViolation if it
        completes no command in flight.
        """
        head = self._cq_head
        last = self._completions[_CQE_QUADS * head + _LAST_QUAD]  # SQHD, SQID, CID, phase and status at once
        if last >> 48 & 1 != self._phase:
            return None
        if self._weakly_ordered:
            barrier()
        cid, sq_head, entries = last >> 32 & 0xFFFF, last & 0xFFFF, self._entries
        if cid >= entries or not self._in_flight[cid] or last >> 16 & 0xFFFF != self._number:
            raise LinkViolation(
                f"a completion for command {cid} of queue {last >> 16 & 0xFFFF}, which is not in flight"
            )
        known = self._sq_head
        if sq_head >= entries or (sq_head - known) % entries > (self._sq_tail - known) % entries:
            raise LinkViolation(f"a completion reports submission queue head {sq_head}, beyond the tail")
        self._sq_head = sq_head
        result = self._completion_words[_CQE_WORDS * head]
        self._cq_head = head = (head + 1) % entries
        if head == 0:
            self._phase ^= 1
        if self._weakly_ordered:
            barrier()
        self._head_doorbell[0] = head
        self._in_flight[cid] = False
        self.free.append(cid)
        return cid, result, last >> 49


class ControllerQueue:
    """The controller's side of a queue pair: takes commands with one of ``opcodes`` and completes them."""

    def __init__(self, memory: QueueMemory, opcodes: tuple[Opcode, ...]) -> None:
        self.buffers = memory.buffers
        self._number, self._entries, self._opcodes = memory.number, memory.entries, opcodes
        self._start, self._size = memory.span.start, memory.span.size
        self._weakly_ordered = memory.weakly_ordered
        self._submissions = memory.submissions.cast("Q")
        self._submission_words = memory.submissions.cast("I")
        self._completions = memory.completions.cast("Q")
        self._tail_doorbell, self._head_doorbell = memory.tail_doorbell, memory.head_doorbell
        self._sq_head = self._cq_tail = 0
        self._phase = 1

    def entry(self, ahead: int) -> int:
        """Return the number of the submission ring's entry that is ``ahead`` entries behind the next one."""
        return (self._sq_head + ahead) % self._entries

    def ready(self, ahead: int = 0) -> bool:
        """Whether the command at ``entry(ahead)`` is there, or the doorbell is out of range."""
        tail = self._tail_doorbell[0]
        return tail >= self._entries or (tail - self._sq_head) % self._entries > ahead

    def fetch(self) -> Command | None:
        """Take the next command, None if there is none. Raises LinkViolation for any field out of range."""
        tail, entry = self._tail_doorbell[0], self._sq_head
        if tail == entry:
            return None
        if tail >= self._entries:
            raise LinkViolation(f"submission tail doorbell {tail} in a queue of {self._entries}")
        if self._weakly_ordered:
            barrier()
        first = self._submissions[_SQE_QUADS * entry]
        address = self._submissions[_SQE_QUADS * entry + _PRP1_QUAD]
        length = self._submission_words[_SQE_WORDS * entry + _CDW10_WORD]
        self._sq_head = (entry + 1) % self._entries
        index, offset = divmod(address - self._start, self._size)
        opcode, cid = first & 0xFF, first >> 16 & 0xFFFF
        if opcode not in self._opcodes:
            raise LinkViolation(f"opcode {opcode:#x} on queue {self._number}")
        if cid >= self._entries:
            raise LinkViolation(f"command identifier {cid} in a queue of {self._entries}")
        if offset or not 0 <= index < self._entries:
            raise LinkViolation(f"address {address:#x} is no buffer of queue {self._number}")
        if not 0 < length <= self._size:
            raise LinkViolation(f"a transfer of {length} bytes; buffers have {self._size}")
        return opcode, cid, index, length

    def backlog(self) -> int:
        """Return the number of completions that the host has not taken yet. Raises LinkViolation for a head
        out of range.
        """
        head = self._head_doorbell[0]
        if head >= self._entries:
            raise LinkViolation(f"completion head doorbell {head} in a queue of {self._entries}")
        return (self._cq_tail - head) % self._entries

    def complete(self, cid: int, result: int = 0, status: Status = Status.SUCCESS) -> int:
        """Complete a fetched command; returns the number of the completion's ring entry. Raises LinkViolation
        if the ring is full.
        """
        entry = self._cq_tail
        if self.backlog() == self._entries - 1:
            raise LinkViolation("the host submitted more commands than it takes completions")
        self._completions[_CQE_QUADS * entry] = result
        if self._weakly_ordered:
            barrier()
        last = self._sq_head | self._number << 16 | cid << 32 | (status << 1 | self._phase) << 48
        self._completions[_CQE_QUADS * entry + _LAST_QUAD] = last
        self._cq_tail = (entry + 1) % self._entries
        if self._cq_tail == 0:
            self._phase ^= 1
        return entry

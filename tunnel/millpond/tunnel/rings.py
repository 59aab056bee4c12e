"""Pure: the four ends of a queue pair's two rings, over shared memory that the peer may fill with anything.

A ring of N entries holds N-1. Indices written by the peer are checked before they are used, entries are
copied before they are looked at. Doorbells and phase bits are single aligned stores, fenced: an entry is
whole before it is announced, and announced before it is read.
"""

from __future__ import annotations

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.fence import fence
from millpond.tunnel.nvme import CQE_BODY, CQE_SIZE, SQE, SQE_SIZE, Command, Completion


class SubmissionProducer:
    """The host's end of a submission ring."""

    def __init__(self, ring: memoryview, doorbell: memoryview) -> None:
        self._ring, self._doorbell = ring, doorbell
        self._entries = len(ring) // SQE_SIZE
        self._head = self._tail = 0

    @property
    def full(self) -> bool:
        """Whether no entry is free."""
        return (self._tail + 1) % self._entries == self._head

    def push(self, command: Command) -> int:
        """Write an entry and move the tail doorbell; the entry's index. The ring must not be full."""
        opcode, cid, address, length = command
        slot = self._tail
        SQE.pack_into(self._ring, slot * SQE_SIZE, opcode, 0, cid, 0, 0, 0, address, 0, length, 0, 0, 0, 0, 0)
        self._tail = tail = (slot + 1) % self._entries
        fence()
        self._doorbell[0] = tail
        return slot

    def retire(self, head: int) -> None:
        """Take note of the head that a completion reported. Raises LinkViolation if it was never reached."""
        entries = self._entries
        if head >= entries or (head - self._head) % entries > (self._tail - self._head) % entries:
            raise LinkViolation(f"a completion reports submission queue head {head}, beyond the tail")
        self._head = head


class SubmissionConsumer:
    """The controller's end of a submission ring."""

    def __init__(self, ring: memoryview, doorbell: memoryview) -> None:
        self._ring, self._doorbell = ring, doorbell
        self._entries = len(ring) // SQE_SIZE
        self.head = 0

    def slot(self, ahead: int) -> int:
        """The index of the entry that is ``ahead`` entries behind the next one."""
        return (self.head + ahead) % self._entries

    def ready(self, ahead: int = 0) -> bool:
        """Whether the entry at ``slot(ahead)`` waits, or the doorbell is out of range."""
        tail = self._doorbell[0]
        return tail >= self._entries or (tail - self.head) % self._entries > ahead

    def pop(self) -> Command | None:
        """Take the next entry, None if there is none. Raises LinkViolation for a tail out of range."""
        tail, head = self._doorbell[0], self.head
        if tail == head:
            return None
        if tail >= self._entries:
            raise LinkViolation(f"submission tail doorbell {tail} in a queue of {self._entries}")
        fence()
        opcode, _, cid, _, _, _, address, _, length, *_ = SQE.unpack_from(self._ring, head * SQE_SIZE)
        self.head = (head + 1) % self._entries
        return Command(opcode, cid, address, length)


class CompletionProducer:
    """The controller's end of a completion ring."""

    def __init__(self, ring: memoryview, doorbell: memoryview) -> None:
        self._ring, self._doorbell = ring, doorbell
        self._statuses = ring.cast("H")
        self._entries = len(ring) // CQE_SIZE
        self._tail, self._phase = 0, 1

    def backlog(self) -> int:
        """Entries that the host has not taken yet. Raises LinkViolation for a head out of range."""
        head = self._doorbell[0]
        if head >= self._entries:
            raise LinkViolation(f"completion head doorbell {head} in a queue of {self._entries}")
        return (self._tail - head) % self._entries

    def push(self, completion: Completion) -> int:
        """Write an entry, its phase bit last; its index. Raises LinkViolation if the host left no room."""
        tail = self._tail
        if self.backlog() == self._entries - 1:
            raise LinkViolation("the host submitted more commands than it takes completions")
        following = (tail + 1) % self._entries
        cid, result, status, sq_head, sq_id = completion
        CQE_BODY.pack_into(self._ring, tail * CQE_SIZE, result, 0, sq_head, sq_id, cid)
        fence()
        self._statuses[tail * 8 + 7] = status << 1 | self._phase
        self._tail = following
        if following == 0:
            self._phase ^= 1
        return tail


class CompletionConsumer:
    """The host's end of a completion ring."""

    def __init__(self, ring: memoryview, doorbell: memoryview) -> None:
        self._ring, self._doorbell = ring, doorbell
        self._statuses = ring.cast("H")
        self._entries = len(ring) // CQE_SIZE
        self._head, self._phase = 0, 1

    def slot(self, ahead: int) -> int:
        """The index of the entry that is ``ahead`` entries behind the next one."""
        return (self._head + ahead) % self._entries

    def ready(self, ahead: int = 0) -> bool:
        """Whether the completion at ``slot(ahead)`` waits; ``ahead`` is less than the ring has entries."""
        position = self._head + ahead
        phase = self._phase ^ (position >= self._entries)
        return bool(self._statuses[position % self._entries * 8 + 7] & 1 == phase)

    def pop(self) -> Completion | None:
        """Take the next completion and move the head doorbell; None if there is none."""
        head = self._head
        status = self._statuses[head * 8 + 7]
        if status & 1 != self._phase:
            return None
        fence()
        result, _, sq_head, sq_id, cid = CQE_BODY.unpack_from(self._ring, head * CQE_SIZE)
        self._head = head = (head + 1) % self._entries
        if head == 0:
            self._phase ^= 1
        self._doorbell[0] = head
        return Completion(cid, result, status >> 1, sq_head, sq_id)

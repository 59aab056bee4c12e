"""Pure: the four ends of a queue pair's two rings, over shared memory that the peer may fill with anything.

A ring of N entries holds N-1. Indices written by the peer are checked before they are used, entries are
copied before they are looked at. Doorbells and phase bits are single aligned stores.
"""

from __future__ import annotations

from millpond.tunnel.errors import LinkViolation
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

    def push(self, command: Command) -> None:
        """Write an entry and move the tail doorbell; the ring must not be full."""
        opcode, cid, address, length = command
        tail = self._tail
        SQE.pack_into(self._ring, tail * SQE_SIZE, opcode, 0, cid, 0, 0, 0, address, 0, length, 0, 0, 0, 0, 0)
        self._tail = tail = (tail + 1) % self._entries
        self._doorbell[0] = tail

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

    def ready(self) -> bool:
        """Whether an entry waits."""
        return bool(self._doorbell[0] != self.head)

    def pop(self) -> Command | None:
        """Take the next entry, None if there is none. Raises LinkViolation for a tail out of range."""
        tail, head = self._doorbell[0], self.head
        if tail == head:
            return None
        if tail >= self._entries:
            raise LinkViolation(f"submission tail doorbell {tail} in a queue of {self._entries}")
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

    def push(self, completion: Completion) -> None:
        """Write an entry, its phase bit last. Raises LinkViolation if the host left no room for it."""
        tail, head = self._tail, self._doorbell[0]
        if head >= self._entries:
            raise LinkViolation(f"completion head doorbell {head} in a queue of {self._entries}")
        following = (tail + 1) % self._entries
        if following == head:
            raise LinkViolation("the host submitted more commands than it takes completions")
        cid, result, status, sq_head, sq_id = completion
        CQE_BODY.pack_into(self._ring, tail * CQE_SIZE, result, 0, sq_head, sq_id, cid)
        self._statuses[tail * 8 + 7] = status << 1 | self._phase
        self._tail = following
        if following == 0:
            self._phase ^= 1


class CompletionConsumer:
    """The host's end of a completion ring."""

    def __init__(self, ring: memoryview, doorbell: memoryview) -> None:
        self._ring, self._doorbell = ring, doorbell
        self._statuses = ring.cast("H")
        self._entries = len(ring) // CQE_SIZE
        self._head, self._phase = 0, 1

    def ready(self) -> bool:
        """Whether a completion waits."""
        return bool(self._statuses[self._head * 8 + 7] & 1 == self._phase)

    def pop(self) -> Completion | None:
        """Take the next completion and move the head doorbell; None if there is none."""
        head = self._head
        status = self._statuses[head * 8 + 7]
        if status & 1 != self._phase:
            return None
        result, _, sq_head, sq_id, cid = CQE_BODY.unpack_from(self._ring, head * CQE_SIZE)
        self._head = head = (head + 1) % self._entries
        if head == 0:
            self._phase ^= 1
        self._doorbell[0] = head
        return Completion(cid, result, status >> 1, sq_head, sq_id)

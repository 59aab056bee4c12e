"""Pure: a queue pair as the host and as the controller use it; neither trusts what the other wrote."""

from __future__ import annotations

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.nvme import Command, Completion, Opcode, Status
from millpond.tunnel.region import QueueMemory
from millpond.tunnel.rings import (
    CompletionConsumer,
    CompletionProducer,
    SubmissionConsumer,
    SubmissionProducer,
)


class HostQueue:
    """The host's side. The command with CID n uses buffer n; N-1 of the N CIDs are ever in flight."""

    def __init__(self, memory: QueueMemory) -> None:
        self.buffers = memory.buffers
        self._number, self._span = memory.number, memory.span
        self._submissions = SubmissionProducer(memory.submissions, memory.tail_doorbell)
        self._completions = CompletionConsumer(memory.completions, memory.head_doorbell)
        self._free = list(range(memory.entries - 1))
        self._in_flight = [False] * memory.entries
        self.slot, self.ready = self._completions.slot, self._completions.ready

    def acquire(self) -> int | None:
        """A CID whose buffer is free to fill; None when all are in flight. Submit it next."""
        return self._free.pop() if self._free else None

    def submit(self, opcode: Opcode, cid: int, length: int) -> int:
        """Hand the controller a command about ``length`` bytes of the CID's buffer; its ring entry."""
        self._in_flight[cid] = True
        return self._submissions.push(Command(opcode, cid, self._span.start + cid * self._span.size, length))

    @property
    def backlog(self) -> int:
        """Commands in flight."""
        return len(self._in_flight) - 1 - len(self._free)

    def reap(self) -> Completion | None:
        """The next completion, its CID free again. Raises LinkViolation if it completes nothing of ours."""
        done = self._completions.pop()
        if done is None:
            return None
        cid = done.cid
        if cid >= len(self._in_flight) or not self._in_flight[cid] or done.sq_id != self._number:
            raise LinkViolation(
                f"a completion for command {cid} of queue {done.sq_id}, which is not in flight"
            )
        self._submissions.retire(done.sq_head)
        self._in_flight[cid] = False
        self._free.append(cid)
        return done


class ControllerQueue:
    """The controller's side: takes commands with one of ``opcodes`` and completes them."""

    def __init__(self, memory: QueueMemory, opcodes: tuple[Opcode, ...]) -> None:
        self._memory, self._span, self._opcodes = memory, memory.span, opcodes
        self._submissions = SubmissionConsumer(memory.submissions, memory.tail_doorbell)
        self._completions = CompletionProducer(memory.completions, memory.head_doorbell)
        self.slot, self.ready = self._submissions.slot, self._submissions.ready
        self.backlog = self._completions.backlog

    def fetch(self) -> Command | None:
        """The next command, None if there is none. Raises LinkViolation for any field out of range."""
        command = self._submissions.pop()
        if command is None:
            return None
        opcode, cid, address, length = command
        if opcode not in self._opcodes:
            raise LinkViolation(f"opcode {opcode:#x} on queue {self._memory.number}")
        if cid >= self._span.count:
            raise LinkViolation(f"command identifier {cid} in a queue of {self._span.count}")
        index, offset = divmod(address - self._span.start, self._span.size)
        if offset or not 0 <= index < self._span.count:
            raise LinkViolation(f"address {address:#x} is no buffer of queue {self._memory.number}")
        if not 0 < length <= self._span.size:
            raise LinkViolation(f"a transfer of {length} bytes; buffers have {self._span.size}")
        return command

    def buffer(self, command: Command) -> memoryview:
        """The memory that a fetched command is about."""
        index = (command.address - self._span.start) // self._span.size
        return self._memory.buffers[index][: command.length]

    def complete(self, command: Command, result: int = 0, status: Status = Status.SUCCESS) -> int:
        """Answer a fetched command; the answer's ring entry. Raises LinkViolation if there is no room."""
        head = self._submissions.head
        return self._completions.push(Completion(command.cid, result, status, head, self._memory.number))

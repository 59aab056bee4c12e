# SPDX-License-Identifier: Apache-2.0
"""Pure: run one connection, which is one NVMe queue: PDUs in, commands executed, PDUs out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from nvmet import pdu
from nvmet.commands import (
    SGL_IN_CAPSULE,
    TO_CONTROLLER,
    TO_HOST,
    Command,
    CommandAnswer,
    TargetStatus,
    parse,
)
from nvmet.errors import FabricsViolation, FatalError
from nvmet.pdu import MAX_TRANSFER, Pdu, PduReader, PduType

ADMIN_QUEUE = 0
MAX_BACKLOG = 1 << 20
"""Unsent bytes beyond which no more commands are taken."""
_MAX_TRANSFERS = 8
_NOTHING = memoryview(b"")

Buffer = bytes | memoryview


class Executor(Protocol):
    """Executes a queue's commands."""

    def execute(self, queue: Queue, command: Command, data: memoryview) -> CommandAnswer | None:
        """Return the answer, or None if ``queue.complete`` is to follow. ``data`` is valid during the call
        only.
        """


@dataclass(slots=True)
class _Transfer:
    """The incoming data of a command, after an R2T."""

    command: Command
    data: bytearray
    filled: int = 0


class Queue:
    """A connection from its first byte. The caller fills ``reader``, calls ``process``, sends
    ``outgoing``.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.reader = PduReader()
        self.outgoing: deque[Buffer] = deque()
        self.backlog = 0
        self.qid: int | None = None
        self._entries, self._head = 1, 0
        self._initialized = False
        self._flying: dict[int, Command] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._waiting: deque[Command] = deque()

    def connected(self, qid: int, entries: int, executor: Executor) -> None:
        """Make this connection the queue ``qid``, with up to ``entries`` commands in flight."""
        self.qid, self._entries, self._head, self.executor = qid, entries, 0, executor
        if qid != ADMIN_QUEUE:
            self.reader.capsule_data = pdu.IO_CAPSULE_DATA

    def process(self) -> None:
        """Process received PDUs until more is needed or too much is unsent. Raises FabricsViolation."""
        while self.backlog < MAX_BACKLOG and (found := self.reader.next()) is not None:
            if self._initialized:
                self._take(found)
            else:
                self._initialize(found)

    def _initialize(self, found: Pdu) -> None:
        if found.type != PduType.INITIALIZE_REQUEST:
            raise FabricsViolation(FatalError.SEQUENCE, "the connection does not begin with ICReq")
        pdu.initialize_request(found)
        self._initialized = True
        self._put(pdu.initialize_response())

    def _take(self, found: Pdu) -> None:
        if found.type == PduType.COMMAND:
            self._command(parse(found.header[8:]), found.data)
        elif found.type == PduType.HOST_DATA:
            self._host_data(pdu.host_data(found), found.data)
        elif found.type == PduType.HOST_TERMINATE:
            raise FabricsViolation(FatalError.SEQUENCE, "the host terminated the connection")
        else:
            raise FabricsViolation(FatalError.SEQUENCE, "a second ICReq")

    def _command(self, command: Command, data: memoryview) -> None:
        if command.cid in self._flying:
            raise FabricsViolation(FatalError.SEQUENCE, f"command {command.cid} is in flight already")
        if len(self._flying) >= self._entries:
            raise FabricsViolation(FatalError.LIMIT_EXCEEDED, f"more than {self._entries} commands in flight")
        self._flying[command.cid] = command
        self._head = (self._head + 1) % self._entries
        status = command.check()
        if status == TargetStatus.SUCCESS and command.length > MAX_TRANSFER:
            status = TargetStatus.INVALID_FIELD
        if status != TargetStatus.SUCCESS:
            self.complete(command.cid, CommandAnswer(status))
        elif command.direction == TO_CONTROLLER and command.length:
            self._command_with_data(command, data)
        else:
            self._execute(command, _NOTHING)

    def _command_with_data(self, command: Command, data: memoryview) -> None:
        if command.sgl != SGL_IN_CAPSULE:
            self._waiting.append(command)
            self._request_data()
        elif command.length > len(data):
            self.complete(command.cid, CommandAnswer(TargetStatus.INVALID_SGL))
        else:
            self._execute(command, data[: command.length])

    def _request_data(self) -> None:
        """Request the data of waiting commands; of few at a time, which limits the memory that they take."""
        while self._waiting and len(self._transfers) < _MAX_TRANSFERS:
            command = self._waiting.popleft()
            self._transfers[command.cid] = _Transfer(command, bytearray(command.length))
            self._put(pdu.ready_to_transfer(command.cid, command.cid, command.length))

    def _host_data(self, head: pdu.HostData, data: memoryview) -> None:
        transfer = self._transfers.get(head.cid)
        if transfer is None or head.tag != head.cid:
            raise FabricsViolation(FatalError.SEQUENCE, f"H2CData for command {head.cid} without R2T")
        end = transfer.filled + head.length
        if head.offset != transfer.filled or end > len(transfer.data):
            raise FabricsViolation(
                FatalError.OUT_OF_RANGE, f"H2CData at {head.offset} of {head.length} bytes"
            )
        transfer.data[head.offset : end] = data
        transfer.filled = end
        if end == len(transfer.data):
            del self._transfers[head.cid]
            self._execute(transfer.command, memoryview(transfer.data))
            self._request_data()

    def _execute(self, command: Command, data: memoryview) -> None:
        answer = self.executor.execute(self, command, data)
        if answer is not None:
            self.complete(command.cid, answer)

    def complete(self, cid: int, answer: CommandAnswer) -> None:
        """Complete a command in flight. The answer's data is cut to the length that the host has room for."""
        command = self._flying.pop(cid)
        if command.direction == TO_HOST and (data := answer.data[: command.length]):
            self._put(pdu.data_header(cid, len(data)))
            self._put(data)
        self._put(pdu.response(cid, answer.status, answer.result, self._head, self.qid or 0))

    def _put(self, data: Buffer) -> None:
        self.outgoing.append(data)
        self.backlog += len(data)

    def sent(self, count: int) -> None:
        """Remove the first ``count`` bytes of ``outgoing``, which were sent."""
        self.backlog -= count
        while count:
            first = self.outgoing.popleft()
            if count < len(first):
                self.outgoing.appendleft(memoryview(first)[count:])
                return
            count -= len(first)

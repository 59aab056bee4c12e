# SPDX-License-Identifier: Apache-2.0
"""Pure: run the NVM subsystem: take Connect on new queues, and keep the one association there may be."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from nvmet.commands import Admin, Command, CommandAnswer, Fabrics, TargetStatus
from nvmet.controller import NvmeController, Target
from nvmet.queue import ADMIN_QUEUE, Queue

CONNECT_DATA = struct.Struct("<16sH238x256s256s256x")
"""Host ID, controller ID, subsystem NQN, host NQN."""
ANY_CONTROLLER = 0xFFFF
_CONTROLLER_IDS = 0xFFEF
_MAX_NQN = 223
_KEEP_ALIVES_MISSED = 3


class _Host(NamedTuple):
    """A host as it identifies itself in Connect."""

    identifier: bytes
    nqn: bytes


class Subsystem:
    """Executes the commands of queues that are not connected yet. One host at a time; its new association
    replaces the former one.
    """

    def __init__(self, target: Target, clock: Callable[[], float]) -> None:
        self._target, self._clock = target, clock
        self._controller: NvmeController | None = None
        self._host = _Host(b"", b"")
        self._last_cntlid = 0
        self._last_traffic = 0.0
        self.doomed: list[Queue] = []
        """Queues whose connections are to be closed."""

    def new_queue(self) -> Queue:
        """Make the queue of a new connection."""
        return Queue(self)

    def execute(self, queue: Queue, command: Command, data: memoryview) -> CommandAnswer | None:
        """Execute a Connect; any other command is out of sequence."""
        if command.opcode != Admin.FABRICS or command.fabrics_type != Fabrics.CONNECT:
            return CommandAnswer(TargetStatus.SEQUENCE_ERROR)
        if len(data) != CONNECT_DATA.size:
            return CommandAnswer(TargetStatus.INVALID_SGL)
        identifier, cntlid, subsystem_nqn, host_nqn = CONNECT_DATA.unpack(data)
        if _nqn(subsystem_nqn) != self._target.identity.nqn.encode() or not _nqn(host_nqn):
            return CommandAnswer(TargetStatus.CONNECT_PARAMETERS)
        return self._connect(queue, command, cntlid, _Host(identifier, _nqn(host_nqn)))

    def _connect(self, queue: Queue, command: Command, cntlid: int, host: _Host) -> CommandAnswer:
        record_format, qid = command.cdw10 & 0xFFFF, command.cdw10 >> 16
        entries = (command.cdw11 & 0xFFFF) + 1
        if record_format:
            return CommandAnswer(TargetStatus.CONNECT_FORMAT)
        if not 2 <= entries <= self._target.identity.max_entries:
            return CommandAnswer(TargetStatus.CONNECT_PARAMETERS)
        connect = self._connect_io if qid else self._connect_admin
        controller, status = connect(qid, cntlid, host, command.cdw12)
        if controller is None:
            return CommandAnswer(status)
        self._last_traffic = self._clock()
        controller.queues[qid] = queue
        queue.connected(qid, entries, controller)
        return CommandAnswer(result=controller.cntlid)

    def _connect_admin(
        self, _qid: int, cntlid: int, host: _Host, keep_alive_ms: int
    ) -> tuple[NvmeController | None, TargetStatus]:
        if cntlid != ANY_CONTROLLER:
            return None, TargetStatus.CONNECT_PARAMETERS
        if self._controller is not None and host != self._host:
            return None, TargetStatus.CONNECT_BUSY
        self._end("the host connected anew")
        self._last_cntlid = self._last_cntlid % _CONTROLLER_IDS + 1
        self._host = host
        self._controller = NvmeController(self._target, self._last_cntlid, keep_alive_ms)
        return self._controller, TargetStatus.SUCCESS

    def _connect_io(
        self, qid: int, cntlid: int, host: _Host, _keep_alive_ms: int
    ) -> tuple[NvmeController | None, TargetStatus]:
        controller = self._controller
        if controller is None or cntlid != controller.cntlid or host != self._host:
            return None, TargetStatus.CONNECT_PARAMETERS
        if qid > self._target.max_queues or qid in controller.queues:
            return None, TargetStatus.CONNECT_PARAMETERS
        return (
            (controller, TargetStatus.SUCCESS) if controller.enabled else (None, TargetStatus.SEQUENCE_ERROR)
        )

    def note_traffic(self, queue: Queue) -> None:
        """Note that the host has sent data on ``queue``, for the keep-alive timer."""
        if queue.qid is not None:
            self._last_traffic = self._clock()

    def lost(self, queue: Queue) -> None:
        """Process the end of a connection: of the admin queue it ends the association, of any
        other the link.
        """
        controller = self._controller
        self._target.vendor.forget(queue)
        if controller is None or queue.qid is None or controller.queues.get(queue.qid) is not queue:
            return
        del controller.queues[queue.qid]
        self._target.vendor.close("the host disconnected")
        if queue.qid == ADMIN_QUEUE:
            self._end("the host disconnected")

    def next_expiry(self) -> float | None:
        """Return the time at which ``expire`` is to be called next, None for never."""
        times = [self._target.vendor.next_expiry(), self._silence_ends()]
        return min((time for time in times if time is not None), default=None)

    def _silence_ends(self) -> float | None:
        if self._controller is None or not self._controller.keep_alive_ms:
            return None
        return self._last_traffic + _KEEP_ALIVES_MISSED * self._controller.keep_alive_ms / 1000

    def expire(self) -> None:
        """Complete RECVs that have waited long enough, and end an association without keep-alives."""
        self._target.vendor.expire()
        silence = self._silence_ends()
        if silence is not None and silence <= self._clock():
            self._end("the host is silent")

    def _end(self, reason: str) -> None:
        if self._controller is not None:
            self.doomed.extend(self._controller.queues.values())
            self._controller = None
            self._target.vendor.close(reason)


def _nqn(field: bytes) -> bytes:
    """Return the name in a field of 256 bytes; empty if it is too long or not text."""
    name = field.split(b"\0", 1)[0]
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return b""
    return name if len(name) <= _MAX_NQN and text.isprintable() else b""

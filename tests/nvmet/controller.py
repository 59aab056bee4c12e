# SPDX-License-Identifier: Apache-2.0
"""Pure: run one association with a host: properties, admin commands, and dispatch of its I/O queues."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.tunnel.ring.nvme_defs import CAP, CC, CC_ENABLE, CSTS, CSTS_READY, VERSION_1_4, VS, Opcode
from nvmet import identify
from nvmet.commands import Admin, Command, CommandAnswer, Fabrics, Io, TargetStatus
from nvmet.identify import ASYNC_EVENTS, NAMESPACE, TargetIdentity
from nvmet.namespace import Namespace
from nvmet.queue import Queue
from nvmet.vendor_commands import VendorCommands

_SHUTDOWN = 3 << 14
_SHUTDOWN_COMPLETE = 2 << 2
_READY_WITHIN = 20  # of 500 ms
_EIGHT_BYTES = 1
_VOLATILE_CACHE, _QUEUES, _ASYNC_EVENTS, _KEEP_ALIVE = 0x06, 0x07, 0x0B, 0x0F
_NOT_ABORTED = 1
_TUNNEL_ADMIN = (Opcode.IDENTIFY, Opcode.OPEN)
_TUNNEL_IO = (Opcode.SEND, Opcode.RECV)


@dataclass(frozen=True, slots=True)
class Target:
    """The parts behind a controller: identity, namespace, tunnel, the most I/O queues of a host."""

    identity: TargetIdentity
    namespace: Namespace
    vendor: VendorCommands
    max_queues: int


class NvmeController:
    """Executes the commands of a host's admin queue and I/O queues."""

    def __init__(self, target: Target, cntlid: int, keep_alive_ms: int) -> None:
        self._target, self.cntlid, self.keep_alive_ms = target, cntlid, keep_alive_ms
        self.queues: dict[int, Queue] = {}
        self._configuration = self._state = 0
        self._async_events = 0

    @property
    def enabled(self) -> bool:
        """Whether the host has enabled the controller and not shut it down."""
        return bool(self._state & CSTS_READY)

    def execute(self, queue: Queue, command: Command, data: memoryview) -> CommandAnswer | None:
        """Execute a command of any queue; None if its answer comes later."""
        if command.opcode == Admin.FABRICS:
            return self._fabrics(queue, command)
        if not self.enabled:
            return CommandAnswer(TargetStatus.SEQUENCE_ERROR)
        if queue.qid:
            return self._io(queue, command, data)
        if command.opcode in _TUNNEL_ADMIN:
            return self._target.vendor.admin(command, data)
        if command.opcode == Admin.ASYNC_EVENT:
            return self._hold_event()
        return self._admin(command)

    def _io(self, queue: Queue, command: Command, data: memoryview) -> CommandAnswer | None:
        if command.opcode in _TUNNEL_IO:
            return self._target.vendor.io(queue, command, data)
        if command.opcode in tuple(Io):
            return self._target.namespace.execute(command, data)
        return CommandAnswer(TargetStatus.INVALID_OPCODE)

    def _fabrics(self, queue: Queue, command: Command) -> CommandAnswer:
        if queue.qid == 0 and command.fabrics_type == Fabrics.PROPERTY_GET:
            return self._get_property(command)
        if queue.qid == 0 and command.fabrics_type == Fabrics.PROPERTY_SET:
            return self._set_property(command)
        return CommandAnswer(
            TargetStatus.SEQUENCE_ERROR
            if command.fabrics_type == Fabrics.CONNECT
            else TargetStatus.INVALID_FIELD
        )

    def _get_property(self, command: Command) -> CommandAnswer:
        entries = self._target.identity.max_entries
        values = {
            (CAP, _EIGHT_BYTES): (entries - 1) | 1 << 16 | _READY_WITHIN << 24 | 1 << 37,
            (VS, 0): VERSION_1_4,
            (CC, 0): self._configuration,
            (CSTS, 0): self._state,
        }
        value = values.get((command.cdw11, command.cdw10 & 7))
        return CommandAnswer(TargetStatus.INVALID_FIELD) if value is None else CommandAnswer(result=value)

    def _set_property(self, command: Command) -> CommandAnswer:
        if (command.cdw11, command.cdw10 & 7) != (CC, 0):
            return CommandAnswer(TargetStatus.INVALID_FIELD)
        self._configuration = command.cdw12
        if not command.cdw12 & CC_ENABLE:
            self._state = 0
            self._target.vendor.close("the host reset the controller")
        elif command.cdw12 & _SHUTDOWN:
            self._state = _SHUTDOWN_COMPLETE
            self._target.vendor.close("the host shut the controller down")
        else:
            self._state = CSTS_READY
        return CommandAnswer()

    def _hold_event(self) -> CommandAnswer | None:
        if self._async_events == ASYNC_EVENTS:
            return CommandAnswer(TargetStatus.ASYNC_EVENT_LIMIT)
        self._async_events += 1
        return None

    def _admin(self, command: Command) -> CommandAnswer:
        if command.opcode == Admin.IDENTIFY:
            return self._identify(command)
        if command.opcode == Admin.GET_LOG_PAGE:
            return _log_page(command)
        if command.opcode in (Admin.SET_FEATURES, Admin.GET_FEATURES):
            return self._feature(command)
        if command.opcode == Admin.ABORT:
            aborted = self._target.vendor.abort(command.cdw10 & 0xFFFF, command.cdw10 >> 16)
            return CommandAnswer(result=0 if aborted else _NOT_ABORTED)
        return CommandAnswer(
            TargetStatus.SUCCESS if command.opcode == Admin.KEEP_ALIVE else TargetStatus.INVALID_OPCODE
        )

    def _identify(self, command: Command) -> CommandAnswer:
        structure, nsid = command.cdw10 & 0xFF, command.nsid
        if structure == 1:
            return CommandAnswer(data=identify.controller(self._target.identity, self.cntlid))
        if structure == 2:
            return CommandAnswer(data=identify.active_list(nsid))
        if structure == 6 and command.cdw11 >> 24 == 0:  # the NVM command set's limits: none
            return CommandAnswer(data=bytes(identify.SIZE))
        if structure not in (0, 3):
            return CommandAnswer(TargetStatus.INVALID_FIELD)
        if nsid != NAMESPACE:
            return CommandAnswer(TargetStatus.INVALID_NAMESPACE)
        found = identify.descriptors if structure else identify.namespace
        return CommandAnswer(data=found(self._target.identity))

    def _feature(self, command: Command) -> CommandAnswer:
        feature, setting = command.cdw10 & 0xFF, command.opcode == Admin.SET_FEATURES
        if feature == _QUEUES:
            granted = self._target.max_queues - 1
            return CommandAnswer(result=granted << 16 | granted)
        if feature == _KEEP_ALIVE:
            self.keep_alive_ms = command.cdw11 if setting else self.keep_alive_ms
            return CommandAnswer(result=0 if setting else self.keep_alive_ms)
        if feature == _VOLATILE_CACHE and not setting:
            return CommandAnswer(result=1)
        if feature == _ASYNC_EVENTS:
            return CommandAnswer()
        return CommandAnswer(TargetStatus.INVALID_FIELD)


def _log_page(command: Command) -> CommandAnswer:
    """Return a part of a log page, padded with zeros to the requested size."""
    page = identify.log_page(command.cdw10 & 0xFF)
    offset = command.cdw12 | command.cdw13 << 32
    if page is None or offset % 4 or offset > len(page):
        return CommandAnswer(TargetStatus.INVALID_LOG_PAGE)
    size = min(4 * ((command.cdw10 >> 16 | (command.cdw11 & 0xFFFF) << 16) + 1), command.length)
    return CommandAnswer(data=page[offset : offset + size].ljust(size, b"\0"))

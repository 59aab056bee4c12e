# SPDX-License-Identifier: Apache-2.0
"""Pure: execute the tunnel's vendor commands: IDENTIFY and OPEN (admin queue), SEND and RECV (I/O queues).

SEND: CDW10 bytes of the packet, CDW11 its sequence number, CDW12 the link's generation modulo 2^32.
RECV: CDW12 the same, CDW13 the longest wait in milliseconds (0: as long as the device likes). It ends with
DW0 bytes of the packet (0: none came in time), DW1 its sequence number. A packet begins with its vnet header;
its length is not bounded by the MTU but by 64 KiB, for which a RECV has room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from millpond.base.errors import VersionMismatch
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.layout import ADMIN_BUFFER
from millpond.tunnel.ring.link_params import MAX_MTU, LinkParameters, generation_after, negotiate, parse
from millpond.tunnel.ring.nvme_defs import Opcode
from millpond.tunnel.transports.nvme.ioctl import MODULUS
from nvmet.commands import Command, CommandAnswer, TargetStatus
from nvmet.queue import MAX_BACKLOG, Queue
from nvmet.resequencer import Resequencer
from nvmet.stats import CommandStats

WINDOW = 64
"""Packets that a SEND may be ahead of a missing one."""


class LinkSide(Protocol):
    """Receives the events of a link and its packets."""

    def opened(self, params: LinkParameters, peer: str) -> None:
        """Handle a new link with the host called ``peer``."""

    def closed(self, reason: str) -> None:
        """Handle the end of the link."""

    def packet(self, packet: bytes | memoryview) -> None:
        """Handle a packet; it is valid during the call only."""

    def violated(self, error: LinkViolation) -> None:
        """Handle a violation by the host; an open link is closed next."""


class _Held(NamedTuple):
    """A RECV that waits for a packet until ``until``, seconds of the clock."""

    queue: Queue
    cid: int
    until: float


class _Link:
    """An open link."""

    def __init__(self, params: LinkParameters) -> None:
        self.params = params
        self.tag = params.generation % MODULUS
        self.least = params.vnet_header + 1
        self.most = params.vnet_header + MAX_MTU  # with offloads at any MTU
        self.incoming = Resequencer(WINDOW)
        self.sent = 0


class VendorCommands:
    """The device's side of the tunnel. ``idle`` is the longest time that a RECV is held, seconds."""

    def __init__(
        self,
        own: LinkParameters,
        side: LinkSide,
        clock: Callable[[], float],
        idle: float,
        stats: CommandStats,
    ) -> None:
        self._own, self._side, self._clock, self._idle, self._stats = own, side, clock, idle, stats
        self._generation = own.generation - 1
        self._offer: LinkParameters | None = None
        self._link: _Link | None = None
        self._held: deque[_Held] = deque()

    def admin(self, command: Command, data: memoryview) -> CommandAnswer:
        """Execute IDENTIFY or OPEN."""
        if command.length != ADMIN_BUFFER:
            return CommandAnswer(TargetStatus.INVALID_FIELD)
        try:
            return self._identify(data) if command.opcode == Opcode.IDENTIFY else self._open()
        except VersionMismatch as error:
            return CommandAnswer(TargetStatus.VERSION_MISMATCH, error.ours)
        except LinkViolation as error:
            self._side.violated(error)
            return CommandAnswer(TargetStatus.INVALID_FIELD)

    def _identify(self, data: memoryview) -> CommandAnswer:
        self.close("the host opens the link anew")
        self._offer = None
        offer = parse(bytes(data), "host", self._own.version)
        negotiate(offer, self._own)
        self._offer = offer
        return CommandAnswer()

    def _open(self) -> CommandAnswer:
        if self._offer is None:
            return CommandAnswer(TargetStatus.SEQUENCE_ERROR)
        offer, self._offer = self._offer, None
        params = negotiate(offer, replace(self._own, generation=generation_after(self._generation)))
        self._generation = params.generation
        self._link = _Link(params)
        self._side.opened(params, offer.name)
        return CommandAnswer(data=params.pack().ljust(ADMIN_BUFFER, b"\0"))

    def io(self, queue: Queue, command: Command, data: memoryview) -> CommandAnswer | None:
        """Execute SEND or RECV; None if the RECV waits for a packet."""
        link = self._link
        if link is None or command.cdw12 != link.tag:
            return CommandAnswer(TargetStatus.NOT_OPEN)
        if command.opcode == Opcode.SEND:
            return self._send(link, command, data)
        if command.length < link.most:
            return CommandAnswer(TargetStatus.INVALID_FIELD)
        wait = min(self._idle, command.cdw13 / 1000 or self._idle)
        self._held.append(_Held(queue, command.cid, self._clock() + wait))
        return None

    def _send(self, link: _Link, command: Command, data: memoryview) -> CommandAnswer:
        size = command.cdw10
        try:
            if not link.least <= size <= len(data):
                raise LinkViolation(f"SEND of {size} bytes with {len(data)} of data")
            for packet in link.incoming.accept(command.cdw11, data[:size]):
                self._side.packet(packet)
        except LinkViolation as error:
            self._side.violated(error)
            self.close(str(error))
            return CommandAnswer(TargetStatus.INVALID_FIELD)
        self._stats.count(Opcode.SEND, size)
        return CommandAnswer()

    @property
    def can_deliver(self) -> bool:
        """Whether a RECV waits on a queue whose answers are being sent."""
        return bool(self._held) and self._held[0].queue.backlog < MAX_BACKLOG

    def deliver(self, packet: memoryview) -> Queue:
        """Complete the RECV that waits longest with ``packet``, only while ``can_deliver``; returns its
        queue.
        """
        link, held = self._link, self._held.popleft()
        if link is None:
            raise AssertionError("no RECV is held without a link")
        held.queue.complete(held.cid, CommandAnswer(result=len(packet) | link.sent << 32, data=packet))
        link.sent = (link.sent + 1) % MODULUS
        self._stats.count(Opcode.RECV, len(packet))
        return held.queue

    def next_expiry(self) -> float | None:
        """Return the time at which the next RECV has waited long enough, None without one."""
        return min((held.until for held in self._held), default=None)

    def expire(self) -> None:
        """Complete, without a packet, the RECVs that have waited long enough."""
        now = self._clock()
        due = [held for held in self._held if held.until <= now]
        for held in due:
            self._held.remove(held)
            held.queue.complete(held.cid, CommandAnswer())

    def abort(self, qid: int, cid: int) -> bool:
        """Abort a RECV that waits; False if there is no such one."""
        for held in self._held:
            if held.queue.qid == qid and held.cid == cid:
                self._held.remove(held)
                held.queue.complete(cid, CommandAnswer(TargetStatus.ABORTED))
                return True
        return False

    def forget(self, queue: Queue) -> None:
        """Drop the RECVs of ``queue``, which is gone."""
        self._held = deque(held for held in self._held if held.queue is not queue)

    def close(self, reason: str) -> None:
        """Close the link, if there is one; waiting RECVs fail."""
        held, self._held = self._held, deque()
        for one in held:
            one.queue.complete(one.cid, CommandAnswer(TargetStatus.NOT_OPEN))
        if self._link is not None:
            self._link = None
            self._side.closed(reason)

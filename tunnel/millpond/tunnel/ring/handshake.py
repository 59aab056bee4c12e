# SPDX-License-Identifier: Apache-2.0
"""Pure: open a link: enable, IDENTIFY, OPEN. The caller provides the function that waits for the peer."""

from __future__ import annotations

from collections.abc import Callable

from millpond.base.errors import VersionMismatch
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.layout import ADMIN, ADMIN_BUFFER, ADMIN_ENTRIES
from millpond.tunnel.ring.link_params import LinkParameters, check_negotiated, negotiate, parse
from millpond.tunnel.ring.nvme_defs import Opcode, Status
from millpond.tunnel.ring.queue_pair import Command, Completion, ControllerQueue, HostQueue
from millpond.tunnel.ring.region import Region

Wait = Callable[[Callable[[], bool]], None]
"""Waits for the peer until a condition holds; raises if it never will."""


def open_as_host(region: Region, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
    """Open a link as the host. Returns the negotiated parameters and the device's name. Raises
    VersionMismatch, LinkViolation, and errors of ``wait``.
    """
    region.registers.enable(region.layout)
    wait(lambda: region.registers.ready)
    admin = HostQueue(region.queue(ADMIN, ADMIN_ENTRIES))
    done, _ = _command(admin, wait, Opcode.IDENTIFY, own.pack())
    _, result, status = done
    if status == Status.VERSION_MISMATCH:
        raise VersionMismatch("the device end of the tunnel", result, own.version)
    _expect_success(done, Opcode.IDENTIFY)
    done, answer = _command(admin, wait, Opcode.OPEN, b"")
    _expect_success(done, Opcode.OPEN)
    negotiated = parse(answer, "device", own.version)
    check_negotiated(negotiated, own)
    if negotiated.depth > region.layout.entries:
        raise LinkViolation(f"the device chose depth {negotiated.depth}; its queues have less")
    return negotiated, negotiated.name


def _command(admin: HostQueue, wait: Wait, opcode: Opcode, data: bytes) -> tuple[Completion, bytes]:
    cid = admin.acquire()
    if cid is None:
        raise LinkViolation("the admin queue is full")
    buffer = admin.buffers[cid]
    buffer[: len(data)] = data
    admin.submit(opcode, cid, ADMIN_BUFFER)
    wait(admin.ready)
    done = admin.reap()
    if done is None:
        raise LinkViolation(f"the completion of {opcode.name} was taken back")
    return done, bytes(buffer)


def _expect_success(done: Completion, opcode: Opcode) -> None:
    status = done[2]
    if status != Status.SUCCESS:
        raise LinkViolation(f"{opcode.name} failed with NVMe status {status:#x}")


def open_as_device(region: Region, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
    """Open a link as the device. Returns the negotiated parameters and the host's name. Raises
    VersionMismatch, LinkViolation, and errors of ``wait``.
    """
    wait(lambda: region.registers.enabled)
    region.registers.check_enabled(region.layout)
    region.registers.set_ready()
    admin = ControllerQueue(region.queue(ADMIN, ADMIN_ENTRIES), (Opcode.IDENTIFY, Opcode.OPEN))
    offer = _take_offer(admin, own, wait)
    negotiated = negotiate(offer, own)
    region.registers.set_generation(negotiated.generation)
    _, cid, index, _ = _fetch(admin, wait, Opcode.OPEN)
    record = negotiated.pack()
    admin.buffers[index][: len(record)] = record
    admin.complete(cid)
    return negotiated, offer.name


def _take_offer(admin: ControllerQueue, own: LinkParameters, wait: Wait) -> LinkParameters:
    _, cid, index, _ = _fetch(admin, wait, Opcode.IDENTIFY)
    try:
        offer = parse(bytes(admin.buffers[index]), "host", own.version)
    except VersionMismatch:
        admin.complete(cid, own.version, Status.VERSION_MISMATCH)
        raise
    admin.complete(cid)
    return offer


def _fetch(admin: ControllerQueue, wait: Wait, opcode: Opcode) -> Command:
    wait(admin.ready)
    command = admin.fetch()
    if command is None or command[0] != opcode or command[3] != ADMIN_BUFFER:
        raise LinkViolation(f"the host did not begin with {opcode.name} over {ADMIN_BUFFER} bytes")
    return command

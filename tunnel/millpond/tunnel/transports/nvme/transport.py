# SPDX-License-Identifier: Apache-2.0
"""Edge: the transport of real controllers, the host's side: vendor commands through the kernel's NVMe driver.

Several SENDs and RECVs are outstanding at once, each submitted by a thread that waits for it. They may
overtake each other on their way; sequence numbers put the packets back in order at either end
(``nvmet/vendor_commands.py`` describes the commands).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, Self

from millpond.base.errors import ConnectionLost, Refused, VersionMismatch
from millpond.linux.confinement.seccomp import THREADS
from millpond.linux.syscalls import CAP_SYS_ADMIN
from millpond.tunnel.datapath.context import DatapathContext, Loop, PumpNeeds
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.layout import ADMIN_BUFFER
from millpond.tunnel.ring.link_params import MAX_MTU, LinkParameters, check_negotiated, parse
from millpond.tunnel.ring.nvme_defs import Opcode, Status
from millpond.tunnel.transports.base import Wait
from millpond.tunnel.transports.nvme.ioctl import (
    IO_REQUEST,
    MODULUS,
    CommandOutcome,
    NvmeDevice,
    VendorCommand,
    find_device,
)

SENDERS, RECEIVERS = 4, 8
WAIT_MS = 1000
"""Milliseconds that an idle RECV waits: a killed endpoint's process is gone only when its last command has
ended.
"""
GAP_SECONDS = 10.0
"""How long a packet waits for one before it, whose command may have been lost: the link begins anew then."""
NOT_OPEN = 0x702
_PATH_RELATED = 0x300
_ROOM = 17 * 4096
"""Whole pages for the largest packet with its header."""
_PAGED = 4096


class CommandDevice(Protocol):
    """A device that executes commands, such as ``ioctl.NvmeDevice``."""

    descriptors: frozenset[int]
    """The open device, as descriptors that commands are submitted by."""

    def buffer(self, size: int) -> memoryview:
        """Allocate memory for data."""

    def admin(self, command: VendorCommand) -> CommandOutcome:
        """Submit and wait. Raises ConnectionLost."""

    def io(self, command: VendorCommand) -> CommandOutcome:
        """Submit and wait. Raises ConnectionLost."""

    def close(self) -> None:
        """Close the device."""


class NvmeConnection:
    """A ``transports.base.Connection`` with the controller behind ``device``."""

    def __init__(self, device: CommandDevice) -> None:
        self._device = device
        self.gone = os.eventfd(
            0, os.EFD_CLOEXEC
        )  # never readable: outstanding RECVs fail when the controller is gone
        self.check_seconds: float | None = None

    def open(self, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
        """Send IDENTIFY and OPEN; the driver limits their time."""
        wait((), 0)
        buffer = self._device.buffer(ADMIN_BUFFER)
        record = own.pack()
        buffer[: len(record)] = record
        done = self._device.admin(VendorCommand(Opcode.IDENTIFY, buffer))
        if done.status == Status.VERSION_MISMATCH:
            raise VersionMismatch("the device end of the tunnel", done.result & 0xFFFFFFFF, own.version)
        _expect_success(done, Opcode.IDENTIFY)
        _expect_success(self._device.admin(VendorCommand(Opcode.OPEN, buffer)), Opcode.OPEN)
        negotiated = parse(bytes(buffer), "device", own.version)
        check_negotiated(negotiated, own)
        return negotiated, negotiated.name

    @property
    def needs(self) -> PumpNeeds:
        """Threads, and I/O commands by ioctl. The kernel asks for CAP_SYS_ADMIN at each vendor command, not
        when the device is opened (``nvme_cmd_allowed`` in drivers/nvme/host/ioctl.c), so pumps keep it.
        """
        return PumpNeeds(self._device.descriptors, THREADS, frozenset((IO_REQUEST,)), (CAP_SYS_ADMIN,))

    def check(self) -> None:
        """Do nothing: outstanding RECVs fail when the controller is gone."""

    def loops(self, datapath: DatapathContext) -> tuple[Loop, Loop]:
        """Return the loop that runs the SEND threads, and the one that runs the RECV threads."""
        return lambda: _run(_Sending(self._device, datapath).loops()), lambda: _run(
            _Receiving(self._device, datapath).loops()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.gone)
        self._device.close()


class NvmeTransport:
    """Opens the controller again and again by ``open_device``; ``where`` names it in the status."""

    def __init__(self, open_device: Callable[[], CommandDevice], where: str) -> None:
        self._open_device, self._where = open_device, where

    def readiness(self) -> int | None:
        """Return None: there is no event for a controller that comes up."""
        return None

    def join(self) -> NvmeConnection:
        """Open the controller. Raises ConnectionLost if there is none."""
        return NvmeConnection(self._open_device())

    def reject(self) -> None:
        """Do nothing: a host has no listener."""

    def close(self) -> None:
        """Do nothing: there is no state between connections."""

    def __str__(self) -> str:
        return f"the NVMe controller at {self._where}"


def passthrough_to(where: str) -> NvmeTransport:
    """Return a transport through the character device ``where``, or through millpond's own if that is
    ``auto``.
    """
    return NvmeTransport(lambda: NvmeDevice(find_device() if where == "auto" else Path(where)), where)


def _expect_success(done: CommandOutcome, opcode: Opcode) -> None:
    """Check a completion. Raises ConnectionLost if the path to the controller failed, else Refused or
    LinkViolation.
    """
    if done.status == Status.SUCCESS:
        return
    text = f"{opcode.name} failed with NVMe status {done.status:#05x}"
    if done.status & 0x700 == _PATH_RELATED or done.status == NOT_OPEN:
        raise ConnectionLost(text)
    if opcode in (Opcode.IDENTIFY, Opcode.OPEN):
        raise Refused("device", "nvme", text)
    raise LinkViolation(text)


class _Sending:
    """Moves packets from the interface into SENDs. Threads take turns to read, so numbers
    follow the packets.
    """

    def __init__(self, device: CommandDevice, datapath: DatapathContext) -> None:
        self._device, self._datapath = device, datapath
        self._tag = datapath.params.generation % MODULUS
        self._turn = threading.Lock()
        self._number = self._outstanding = 0

    def loops(self) -> Sequence[Loop]:
        return [self._loop] * SENDERS

    def _loop(self) -> NoReturn:
        buffer = self._device.buffer(_ROOM)
        while True:
            size, number = self._read(buffer)
            data = buffer[: _transfer_size(size)]
            done = self._device.io(VendorCommand(Opcode.SEND, data, size, number, self._tag))
            _expect_success(done, Opcode.SEND)
            with self._turn:
                self._outstanding -= 1

    def _read(self, buffer: memoryview) -> tuple[int, int]:
        with self._turn:
            size = self._datapath.interface.read_into(buffer)
            number = self._number
            self._number = (number + 1) % MODULUS
            self._outstanding += 1
            self._datapath.outward.count(size, self._outstanding)
            return size, number


def _transfer_size(size: int) -> int:
    """Return the bytes to transfer for a packet: a multiple of 512 spares the kernel a copy of
    a large one.
    """
    unit = 4 if size < _PAGED else 512
    return -(-size // unit) * unit


class _Receiving:
    """Moves packets from RECVs to the interface, in the order of the sequence numbers."""

    def __init__(self, device: CommandDevice, datapath: DatapathContext) -> None:
        self._device, self._datapath = device, datapath
        self._tag = datapath.params.generation % MODULUS
        self._least, self._most = datapath.params.vnet_header + 1, datapath.params.vnet_header + MAX_MTU
        self._changed = threading.Condition()
        self._next = 0
        self._held: set[int] = set()

    def loops(self) -> Sequence[Loop]:
        return [self._loop] * RECEIVERS

    def _loop(self) -> NoReturn:
        buffer = self._device.buffer(_ROOM)
        while True:
            done = self._device.io(VendorCommand(Opcode.RECV, buffer, 0, 0, self._tag, WAIT_MS))
            _expect_success(done, Opcode.RECV)
            size, number = done.result & 0xFFFFFFFF, done.result >> 32
            if size:
                self._take(buffer, size, number)

    def _take(self, buffer: memoryview, size: int, number: int) -> None:
        if not self._least <= size <= self._most:
            raise LinkViolation(f"a packet of {size} bytes; {self._least} to {self._most} are possible")
        with self._changed:
            self._await_turn(number)
            self._deliver(buffer, size)
            self._next = (self._next + 1) % MODULUS
            self._changed.notify_all()

    def _await_turn(self, number: int) -> None:
        """Wait until ``number`` is next. Each thread holds one packet, which limits how far a number can be
        ahead.
        """
        if number in self._held or (number - self._next) % MODULUS >= RECEIVERS:
            raise LinkViolation(f"the device sent packet {number} when {self._next} was due")
        self._held.add(number)
        if not self._changed.wait_for(lambda: number == self._next, GAP_SECONDS):
            raise LinkViolation(f"packet {self._next} has not come {GAP_SECONDS:g} s after packet {number}")
        self._held.remove(number)

    def _deliver(self, buffer: memoryview, size: int) -> None:
        datapath = self._datapath
        head = bytes(buffer[: min(size, datapath.filter.head)])
        cause = datapath.filter.verdict(head, size)
        if cause is None and not datapath.interface.write(head, buffer[len(head) : size]):
            cause = "refused"
        if cause is None:
            datapath.inward.count(size)
        else:
            datapath.inward.drop(cause)


def _run(loops: Sequence[Loop]) -> NoReturn:
    """Run the loops in threads until one fails; raise its error."""
    failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def guard(loop: Loop) -> None:
        try:
            loop()
        except Exception as error:  # noqa: BLE001 - raised below
            failures.put(error)

    for loop in loops:
        threading.Thread(target=guard, args=(loop,), daemon=True).start()
    raise failures.get()

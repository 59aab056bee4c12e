"""Edge: the transport of real controllers, the host's side: vendor commands through the kernel's NVMe driver.

Several SENDs and RECVs are outstanding at once, each submitted by a thread that waits for it. They may
overtake each other on their way; sequence numbers put the packets back in order at either end
(``fabrics/port.py`` describes the commands).
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
from millpond.tunnel.datapath.context import DatapathContext, Loop
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.layout import ADMIN_BUFFER
from millpond.tunnel.ring.link_params import MAX_MTU, LinkParameters, check_settled, parse
from millpond.tunnel.ring.nvme_defs import Opcode, Status
from millpond.tunnel.transports.base import Wait
from millpond.tunnel.transports.nvme.ioctl import CommandOutcome, NvmeDevice, VendorCommand, find_device
from millpond.tunnel.transports.nvme.resequencer import MODULUS

SENDERS, RECEIVERS = 4, 8
WAIT_MS = 1000
"""How long an idle RECV waits: a killed end is gone only when its last command has ended."""
NOT_OPEN = 0x702
_PATH_RELATED = 0x300
_ROOM = 17 * 4096
"""Whole pages for the largest packet with its header."""
_PAGED = 4096


class CommandDevice(Protocol):
    """What takes commands: ``nvme_device.NvmeDevice``."""

    def buffer(self, size: int) -> memoryview:
        """Memory for data."""

    def admin(self, command: VendorCommand) -> CommandOutcome:
        """Submit and wait. Raises ConnectionLost."""

    def io(self, command: VendorCommand) -> CommandOutcome:
        """Submit and wait. Raises ConnectionLost."""

    def close(self) -> None:
        """Let it go."""


class NvmeConnection:
    """A ``transport.Connection`` with the controller behind ``device``."""

    calls = THREADS | {"ioctl"}
    privileged = True  # vendor commands take CAP_SYS_ADMIN

    def __init__(self, device: CommandDevice) -> None:
        self._device = device
        self.gone = os.eventfd(0, os.EFD_CLOEXEC)  # never readable: the outstanding RECVs tell
        self.check_seconds: float | None = None

    def open(self, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
        """IDENTIFY and OPEN; the driver bounds how long they take."""
        wait((), 0)
        buffer = self._device.buffer(ADMIN_BUFFER)
        record = own.pack()
        buffer[: len(record)] = record
        done = self._device.admin(VendorCommand(Opcode.IDENTIFY, buffer))
        if done.status == Status.VERSION_MISMATCH:
            raise VersionMismatch("the device end of the tunnel", done.result & 0xFFFFFFFF, own.version)
        _expect_success(done, Opcode.IDENTIFY)
        _expect_success(self._device.admin(VendorCommand(Opcode.OPEN, buffer)), Opcode.OPEN)
        settled = parse(bytes(buffer), "device", own.version)
        check_settled(settled, own)
        return settled, settled.name

    def check(self) -> None:
        """Nothing to look at."""

    def loops(self, gear: DatapathContext) -> tuple[Loop, Loop]:
        """Threads that SEND, and threads that RECV."""
        return lambda: _run(_Sending(self._device, gear).loops()), lambda: _run(
            _Receiving(self._device, gear).loops()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.gone)
        self._device.close()


class NvmeTransport:
    """Finds the controller again and again, by what ``open_device`` opens."""

    def __init__(self, open_device: Callable[[], CommandDevice], where: str) -> None:
        self._open_device, self._where = open_device, where

    def readiness(self) -> int | None:
        """Nothing tells when the controller comes up."""
        return None

    def join(self) -> NvmeConnection:
        """Raises ConnectionLost."""
        return NvmeConnection(self._open_device())

    def turn_away(self) -> None:
        """Nobody knocks at a host."""

    def close(self) -> None:
        """Nothing is held between connections."""

    def __str__(self) -> str:
        return f"the NVMe controller at {self._where}"


def passthrough_to(where: str) -> NvmeTransport:
    """Through the character device ``where``, or the one that is millpond's if that is ``auto``."""
    return NvmeTransport(lambda: NvmeDevice(find_device() if where == "auto" else Path(where)), where)


def _expect_success(done: CommandOutcome, opcode: Opcode) -> None:
    """Raises ConnectionLost if the way to the controller is at fault, else Refused or LinkViolation."""
    if done.status == Status.SUCCESS:
        return
    text = f"{opcode.name} failed with NVMe status {done.status:#05x}"
    if done.status & 0x700 == _PATH_RELATED or done.status == NOT_OPEN:
        raise ConnectionLost(text)
    if opcode in (Opcode.IDENTIFY, Opcode.OPEN):
        raise Refused("device", "nvme", text)
    raise LinkViolation(text)


class _Sending:
    """From the interface into SENDs. Threads take turns to read, so that numbers follow the packets."""

    def __init__(self, device: CommandDevice, gear: DatapathContext) -> None:
        self._device, self._gear = device, gear
        self._tag = gear.terms.generation % MODULUS
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
            size = self._gear.interface.read_into(buffer)
            number = self._number
            self._number = (number + 1) % MODULUS
            self._outstanding += 1
            self._gear.outward.count(size, self._outstanding)
            return size, number


def _transfer_size(size: int) -> int:
    """Bytes to transfer for a packet: multiples of 512 spare the kernel a copy of a large one."""
    unit = 4 if size < _PAGED else 512
    return -(-size // unit) * unit


class _Receiving:
    """From RECVs to the interface, in the order of the sequence numbers."""

    def __init__(self, device: CommandDevice, gear: DatapathContext) -> None:
        self._device, self._gear = device, gear
        self._tag = gear.terms.generation % MODULUS
        self._least, self._most = gear.terms.vnet_header + 1, gear.terms.vnet_header + MAX_MTU
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
        """Each thread holds one packet, which bounds how far a number is ahead: of all one is due."""
        if number in self._held or (number - self._next) % MODULUS >= RECEIVERS:
            raise LinkViolation(f"the device sent packet {number} when {self._next} was due")
        self._held.add(number)
        while number != self._next:
            self._changed.wait()
        self._held.remove(number)

    def _deliver(self, buffer: memoryview, size: int) -> None:
        gear = self._gear
        head = bytes(buffer[: min(size, gear.filter.head)])
        cause = gear.filter.verdict(head)
        if cause is None and not gear.interface.write(head, buffer[len(head) : size]):
            cause = "refused"
        if cause is None:
            gear.inward.count(size)
        else:
            gear.inward.drop(cause)


def _run(loops: Sequence[Loop]) -> NoReturn:
    """Run the loops in threads until one fails; raises what it raised."""
    failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def guard(loop: Loop) -> None:
        try:
            loop()
        except Exception as error:  # noqa: BLE001 - it is raised below
            failures.put(error)

    for loop in loops:
        threading.Thread(target=guard, args=(loop,), daemon=True).start()
    raise failures.get()

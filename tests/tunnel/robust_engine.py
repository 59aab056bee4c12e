"""A pump of either engine in a process of its own; a socket pair stands for the interface."""

from __future__ import annotations

import ipaddress
import mmap
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NoReturn

from millpond.tunnel import engine
from millpond.tunnel.bells import Bell
from millpond.tunnel.counters import Counters, Counts, make_counters, map_counters
from millpond.tunnel.errors import InterfaceGone
from millpond.tunnel.filter import Address, AddressFilter
from millpond.tunnel.layout import RECV, SEND, Layout
from millpond.tunnel.link import Link
from millpond.tunnel.parameters import Parameters
from millpond.tunnel.pump import Station
from millpond.tunnel.region import QueueMemory, Region
from millpond.tunnel.transport import Gear, Loop
from millpond.wire.deadline import Deadline
from millpond.wire.errors import MillpondError

LOOPS = {
    "submit_packets": ("host", 0, SEND),
    "deliver_receives": ("host", 1, RECV),
    "answer_receives": ("device", 0, RECV),
    "execute_sends": ("device", 1, SEND),
}
"""Role, place among the role's loops, queue."""
ADDRESS: Address = ipaddress.ip_interface("10.77.0.1/30")
PEER = "10.77.0.2"


class Wire:
    """A ``transport.PacketInterface``: one end of a socket pair that keeps packets apart, as a TUN does."""

    name = "wire"

    def __init__(self, sock: socket.socket) -> None:
        self.descriptor = sock.fileno()

    def read_into(self, buffer: memoryview) -> int:
        return os.readv(self.descriptor, [buffer])

    def write(self, head: bytes, rest: memoryview) -> bool:
        os.writev(self.descriptor, (head, rest))
        return True

    def check_gone(self, error: OSError) -> None:
        if not isinstance(error, BlockingIOError):
            raise InterfaceGone("the wire is gone") from None

    @contextmanager
    def errors(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class OneLoop:
    """What ``Link`` takes of a connection."""

    station: Station
    engine: str
    role: str
    place: int
    calls: frozenset[str] = frozenset()
    privileged: bool = False

    def loops(self, gear: Gear) -> tuple[Loop, ...]:
        loop = engine.loops(self.engine, self.role)[self.place]

        def run() -> NoReturn:
            loop(self.station)

        return (run,)


class RunningLoop:
    """One of ``LOOPS``; the peer's side of its queue, ``memory``, is the test's, and so is ``wire``."""

    def __init__(self, undo: ExitStack, engine_name: str, loop: str, depth: int, address: Address) -> None:
        self.role, place, number = LOOPS[loop]
        layout = Layout(depth)
        self._map = mmap.mmap(-1, layout.size)
        self.region = Region.create(memoryview(self._map), layout)
        self.memory: QueueMemory = self.region.queue(number, depth)
        self.wake, self.peer_wake = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        inner, self.wire = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (inner, self.wire):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            undo.callback(sock.close)
        for bell in (self.wake, self.peer_wake):
            undo.callback(os.close, bell)
        counters = make_counters()
        self._counters: Counters = map_counters(counters)[0]
        os.close(counters)
        terms = Parameters(depth=depth)
        gate = AddressFilter(address, terms.vnet_header)
        gear = Gear(terms, Wire(inner), gate, self._counters, self._counters, engine_name)
        station = Station(
            self.role == "host", self.memory, self.wake, Bell(self.peer_wake), gear, self._counters
        )
        self.sleeps = self.memory.host_sleeps if self.role == "host" else self.memory.controller_sleeps
        self._link = Link(OneLoop(station, engine_name, self.role, place), gear)  # type: ignore[arg-type]
        undo.callback(self._link.__exit__)

    @property
    def counts(self) -> Counts:
        return self._counters.read()

    def rest(self, seconds: float = 10) -> MillpondError | None:
        """Wait until it can do nothing more: None, or why it ended."""
        report, deadline = self._link.pumps[0].report, Deadline.after(seconds)
        while True:
            os.eventfd_write(self.wake, 1)
            asleep, sleeps = self.sleeps[0], self.counts.sleeps
            if select.select([report], [], [], 0.001)[0]:
                return self._link.pumps[0].verdict()
            if asleep and self.sleeps[0] == asleep and self.counts.sleeps > sleeps:
                return None
            assert not deadline.passed, "the loop neither rests nor ends"
            time.sleep(0)

    def delivered(self) -> list[bytes]:
        """Packets that it gave the interface."""
        packets = []
        while select.select([self.wire], [], [], 0)[0]:
            packets.append(self.wire.recv(1 << 18))
        return packets

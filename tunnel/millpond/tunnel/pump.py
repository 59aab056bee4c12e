"""Edge: the Python engine: the loops that carry packets between the interface and a queue pair.

One per direction and end. Each runs for ever in a process of its own; it ends by being killed, or by
LinkViolation and InterfaceGone. ``engine.c`` has the same loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from millpond.tunnel.bells import Bell, Ringer, Sleeper
from millpond.tunnel.counters import Counters
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.nvme import Command, Opcode
from millpond.tunnel.queues import ControllerQueue, HostQueue
from millpond.tunnel.region import QueueMemory
from millpond.tunnel.transport import Gear


@dataclass(frozen=True, slots=True)
class Station:
    """One queue pair as a pump of the host or the device sees it: the eventfd ``wake`` rings for it, ``bell``
    rings at the peer.
    """

    host: bool
    memory: QueueMemory
    wake: int
    bell: Bell
    gear: Gear
    counters: Counters


class Bench:
    """A pump's tools at its station."""

    def __init__(self, station: Station) -> None:
        memory = station.memory
        own, peer = memory.host_sleeps, memory.controller_sleeps
        if not station.host:
            own, peer = peer, own
        self.memory, self.counters = memory, station.counters
        self.sleeper = Sleeper(own, station.wake, station.counters)
        self.ringer = Ringer(peer, station.bell, station.counters)
        self.interface, self.filter = station.gear.interface, station.gear.filter
        self.least = station.gear.terms.vnet_header + 1
        self.half = (memory.entries - 1) // 2
        """How far ahead to wait when a ring is exhausted: one wake-up for half of it, not for each entry."""
        self.interface.set_blocking()


def submit_packets(station: Station) -> NoReturn:
    """Host: from the interface into SEND commands."""
    bench = Bench(station)
    queue = HostQueue(bench.memory)
    read_into, ring, count = bench.interface.read_into, bench.ringer.ring, bench.counters.count
    while True:
        _reap_sends(queue)  # before each read: the buffer that is free is then the one still in the cache
        cid = queue.acquire()
        if cid is None:
            bench.counters.was_full()
            bench.sleeper.wait(queue.slot(bench.half), lambda: queue.ready(bench.half))
            continue
        size = read_into(queue.buffers[cid])
        ring(queue.submit(Opcode.SEND, cid, size))
        count(size, queue.backlog)


def _reap_sends(queue: HostQueue) -> None:
    while (done := queue.reap()) is not None:
        if done.status:
            raise LinkViolation(f"SEND failed with NVMe status {done.status:#x}")


def execute_sends(station: Station) -> NoReturn:
    """Device: from SEND commands to the interface."""
    bench = Bench(station)
    queue = ControllerQueue(bench.memory, (Opcode.SEND,))
    while True:
        command = queue.fetch()
        if command is None:
            bench.sleeper.wait(queue.slot(0), queue.ready)
            continue
        _deliver(bench, queue.buffer(command), command.length)
        bench.ringer.ring(queue.complete(command))


def answer_receives(station: Station) -> NoReturn:
    """Device: from the interface into the buffers of waiting RECV commands."""
    bench = Bench(station)
    queue = ControllerQueue(bench.memory, (Opcode.RECV,))
    while True:
        command = queue.fetch()
        if command is None:
            bench.counters.was_full()
            bench.sleeper.wait(queue.slot(bench.half), lambda: queue.ready(bench.half))
            continue
        _check_room(bench, command)
        size = bench.interface.read_into(queue.buffer(command))
        bench.ringer.ring(queue.complete(command, size))
        bench.counters.count(size, queue.backlog())


def _check_room(bench: Bench, command: Command) -> None:
    """A TUN cuts what does not fit, so a RECV is for a whole buffer."""
    if command.length != bench.memory.span.size:
        raise LinkViolation(f"RECV for {command.length} bytes; a buffer has {bench.memory.span.size}")


def deliver_receives(station: Station) -> NoReturn:
    """Host: from completed RECV commands to the interface; posts them all in advance and again."""
    bench = Bench(station)
    queue = HostQueue(bench.memory)
    while (cid := queue.acquire()) is not None:
        bench.ringer.ring(queue.submit(Opcode.RECV, cid, bench.memory.span.size))
    while True:
        done = queue.reap()
        if done is None:
            bench.sleeper.wait(queue.slot(0), queue.ready)
            continue
        if done.status:
            raise LinkViolation(f"RECV failed with NVMe status {done.status:#x}")
        if done.result:  # a controller may complete an idle RECV with nothing in it
            _deliver(bench, queue.buffers[done.cid], done.result)
        _repost(bench, queue)


def _repost(bench: Bench, queue: HostQueue) -> None:
    cid = queue.acquire()
    if cid is None:
        raise LinkViolation("a completion freed no command")
    bench.ringer.ring(queue.submit(Opcode.RECV, cid, bench.memory.span.size))


def _deliver(bench: Bench, buffer: memoryview, size: int) -> None:
    """Give the interface a packet, unless it is not from the peer to us; the head that is checked is the head
    that is written, whatever the peer does to the buffer meanwhile."""
    if not bench.least <= size <= bench.memory.span.size:
        raise LinkViolation(
            f"a packet of {size} bytes; {bench.least} to {bench.memory.span.size} are possible"
        )
    length = min(size, bench.filter.head)
    head = bytes(buffer[:length])
    cause = bench.filter.verdict(head)
    if cause is None and not bench.interface.write(head, buffer[length:size]):
        cause = "refused"
    if cause is None:
        bench.counters.count(size)
    else:
        bench.counters.drop(cause)


LOOPS = {"host": (submit_packets, deliver_receives), "device": (answer_receives, execute_sends)}
"""Per role: from the interface, and to it."""

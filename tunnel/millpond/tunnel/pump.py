"""Edge: the loops that carry packets between the TUN interface and a queue pair, one per direction and end.

Each runs for ever in a process of its own; it ends by being killed, or by LinkViolation and InterfaceGone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from millpond.tunnel.bells import Ringer, Sleeper
from millpond.tunnel.counters import Counters
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.layout import RECV, SEND
from millpond.tunnel.nvme import Command, Opcode
from millpond.tunnel.parameters import Parameters
from millpond.tunnel.queues import ControllerQueue, HostQueue
from millpond.tunnel.region import QueueMemory
from millpond.tunnel.transport import Connection
from millpond.tunnel.tun import Tun


@dataclass(frozen=True, slots=True)
class Bench:
    """All that a pump works with."""

    memory: QueueMemory
    sleeper: Sleeper
    ringer: Ringer
    tun: Tun
    counters: Counters
    least: int
    """Bytes of the smallest packet: its vnet header and one more."""


def host_bench(link: Connection, queue: int, terms: Parameters, tun: Tun, counters: Counters) -> Bench:
    """The host's side of a queue pair."""
    memory = link.region.queue(queue, terms.depth)
    sleeper = Sleeper(memory.host_sleeps, link.bells.to_host[queue])
    ringer = Ringer(memory.controller_sleeps, link.bells.to_controller[queue])
    return Bench(memory, sleeper, ringer, tun, counters, terms.vnet_header + 1)


def device_bench(link: Connection, queue: int, terms: Parameters, tun: Tun, counters: Counters) -> Bench:
    """The controller's side of a queue pair."""
    memory = link.region.queue(queue, terms.depth)
    sleeper = Sleeper(memory.controller_sleeps, link.bells.to_controller[queue])
    ringer = Ringer(memory.host_sleeps, link.bells.to_host[queue])
    return Bench(memory, sleeper, ringer, tun, counters, terms.vnet_header + 1)


def submit_packets(bench: Bench) -> NoReturn:
    """Host: from the interface into SEND commands."""
    queue = HostQueue(bench.memory)
    while True:
        cid = queue.acquire()
        if cid is None:
            _reap_sends(bench, queue)
            continue
        size = bench.tun.read_into(queue.buffers[cid])
        queue.submit(Opcode.SEND, cid, size)
        bench.ringer.ring()
        bench.counters.count(size)


def _reap_sends(bench: Bench, queue: HostQueue) -> None:
    """Free the buffers of all SENDs that are done; wait for one if there is none."""
    done = queue.reap()
    if done is None:
        bench.sleeper.wait(queue.ready)
    while done is not None:
        if done.status:
            raise LinkViolation(f"SEND failed with NVMe status {done.status:#x}")
        done = queue.reap()


def execute_sends(bench: Bench) -> NoReturn:
    """Device: from SEND commands to the interface."""
    queue = ControllerQueue(bench.memory, (Opcode.SEND,))
    while True:
        command = queue.fetch()
        if command is None:
            bench.sleeper.wait(queue.ready)
            continue
        _deliver(bench, queue.buffer(command), command.length)
        queue.complete(command)
        bench.ringer.ring()


def answer_receives(bench: Bench) -> NoReturn:
    """Device: from the interface into the buffers of waiting RECV commands."""
    queue = ControllerQueue(bench.memory, (Opcode.RECV,))
    while True:
        command = queue.fetch()
        if command is None:
            bench.sleeper.wait(queue.ready)
            continue
        _check_room(bench, command)
        size = bench.tun.read_into(queue.buffer(command))
        queue.complete(command, size)
        bench.ringer.ring()
        bench.counters.count(size)


def _check_room(bench: Bench, command: Command) -> None:
    """A TUN cuts what does not fit, so a RECV is for a whole buffer."""
    if command.length != bench.memory.span.size:
        raise LinkViolation(f"RECV for {command.length} bytes; a buffer has {bench.memory.span.size}")


def deliver_receives(bench: Bench) -> NoReturn:
    """Host: from completed RECV commands to the interface; posts them all in advance and again."""
    queue = HostQueue(bench.memory)
    while (cid := queue.acquire()) is not None:
        queue.submit(Opcode.RECV, cid, bench.memory.span.size)
    bench.ringer.ring()
    while True:
        done = queue.reap()
        if done is None:
            bench.sleeper.wait(queue.ready)
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
    queue.submit(Opcode.RECV, cid, bench.memory.span.size)
    bench.ringer.ring()


def _deliver(bench: Bench, buffer: memoryview, size: int) -> None:
    if not bench.least <= size <= bench.memory.span.size:
        raise LinkViolation(
            f"a packet of {size} bytes; {bench.least} to {bench.memory.span.size} are possible"
        )
    if bench.tun.write(buffer[:size]):
        bench.counters.count(size)
    else:
        bench.counters.drop()


OUTWARD = {"host": (SEND, submit_packets), "device": (RECV, answer_receives)}
INWARD = {"host": (RECV, deliver_receives), "device": (SEND, execute_sends)}
"""Per role: the queue pair and the loop from the interface, and to it."""

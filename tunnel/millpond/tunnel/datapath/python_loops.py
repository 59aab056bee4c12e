"""Edge: the Python engine: the loops that carry packets between the interface and a queue pair.

One per direction and end. Each runs for ever in a process of its own; it ends by being killed, or by
LinkViolation and InterfaceGone. ``datapath.c`` has the same loops.
"""

from __future__ import annotations

from collections.abc import Callable
from os import readv, writev
from typing import NoReturn

from millpond.tunnel.datapath.context import QueueContext
from millpond.tunnel.datapath.notifier import Sleeper, Waker
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.barrier import barrier
from millpond.tunnel.ring.nvme_defs import Opcode
from millpond.tunnel.ring.queue_pair import ControllerQueue, HostQueue

_SEND, _RECV = int(Opcode.SEND), int(Opcode.RECV)


class LoopState:
    """A pump's tools at its station."""

    def __init__(self, station: QueueContext) -> None:
        memory = station.memory
        own, peer = memory.host_sleeps, memory.controller_sleeps
        if not station.host:
            own, peer = peer, own
        self.sleeper = Sleeper(own, station.wake, station.counters)
        self.ringer = Waker(peer, station.bell, station.counters)
        self.counters, self.interface, self.filter = (
            station.counters,
            station.gear.interface,
            station.gear.filter,
        )
        self.room = memory.span.size
        self.half = (memory.entries - 1) // 2
        """How far ahead to wait when a ring is exhausted: one wake-up for half of it, not for each entry."""

    def wait_for_room(self, queue: HostQueue | ControllerQueue) -> None:
        """Sleep until half of an exhausted ring is there again. The next entry counts too: a device may
        write the later one alone, with which there would be nothing to do and no sleep.
        """
        self.counters.was_full()
        self.sleeper.wait(queue.slot(self.half), lambda: queue.ready(self.half) and queue.ready())


# The loops are flat for speed: a call costs a tenth of a microsecond, and each runs for every packet.


def submit_packets(station: QueueContext) -> NoReturn:
    """Host: from the interface into SEND commands."""
    bench, queue = LoopState(station), HostQueue(station.memory)
    reap, acquire, submit, count = queue.reap, queue.acquire, queue.submit, bench.counters.count
    word, wake, limit = bench.ringer.word, bench.ringer.wake, station.memory.entries - 1
    descriptor, vectors = bench.interface.descriptor, [[buffer] for buffer in queue.buffers]
    with bench.interface.errors():
        while True:
            while (done := reap()) is not None:  # before each read: the free buffer is then still cached
                if done[2]:
                    raise LinkViolation(f"SEND failed with NVMe status {done[2]:#x}")
            cid = acquire()
            if cid is None:
                bench.wait_for_room(queue)
                continue
            size = readv(descriptor, vectors[cid])
            slot = submit(_SEND, cid, size)
            barrier()
            if word[0] == slot + 1:
                wake()
            count(size, limit - len(queue.free))


def answer_receives(station: QueueContext) -> NoReturn:
    """Device: from the interface into the buffers of waiting RECV commands."""
    bench, queue = LoopState(station), ControllerQueue(station.memory, (Opcode.RECV,))
    fetch, complete, count = queue.fetch, queue.complete, bench.counters.count
    word, wake, backlog = bench.ringer.word, bench.ringer.wake, queue.backlog
    descriptor, vectors = bench.interface.descriptor, [[buffer] for buffer in queue.buffers]
    with bench.interface.errors():
        while True:
            command = fetch()
            if command is None:
                bench.wait_for_room(queue)
                continue
            _, cid, index, room = command
            if room != bench.room:  # a TUN cuts what does not fit
                raise LinkViolation(f"RECV for {room} bytes; a buffer has {bench.room}")
            size = readv(descriptor, vectors[index])
            slot = complete(cid, size)
            barrier()
            if word[0] == slot + 1:
                wake()
            count(size, backlog())


def execute_sends(station: QueueContext) -> NoReturn:
    """Device: from SEND commands to the interface."""
    bench, queue = LoopState(station), ControllerQueue(station.memory, (Opcode.SEND,))
    deliver, buffers = _deliverer(bench), queue.buffers
    fetch, complete, word, wake = queue.fetch, queue.complete, bench.ringer.word, bench.ringer.wake
    while True:
        command = fetch()
        if command is None:
            bench.sleeper.wait(queue.slot(0), queue.ready)
            continue
        deliver(buffers[command[2]], command[3])
        slot = complete(command[1])
        barrier()
        if word[0] == slot + 1:
            wake()


def deliver_receives(station: QueueContext) -> NoReturn:
    """Host: from completed RECV commands to the interface; posts them all in advance and again."""
    bench, queue = LoopState(station), HostQueue(station.memory)
    deliver, buffers, room = _deliverer(bench), queue.buffers, bench.room
    reap, submit, word, wake = queue.reap, queue.submit, bench.ringer.word, bench.ringer.wake
    while (free := queue.acquire()) is not None:
        bench.ringer.ring(submit(_RECV, free, room))
    while True:
        done = reap()
        if done is None:
            bench.sleeper.wait(queue.slot(0), queue.ready)
            continue
        cid, size, status = done
        if status:
            raise LinkViolation(f"RECV failed with NVMe status {status:#x}")
        if size:  # a controller may complete an idle RECV with nothing in it
            deliver(buffers[cid], size)
        queue.free.pop()  # the same CID: the last that became free
        slot = submit(_RECV, cid, room)
        barrier()
        if word[0] == slot + 1:
            wake()


def _deliverer(bench: LoopState) -> Callable[[memoryview, int], None]:
    """What gives the interface a packet of some bytes in a buffer, unless the filter is against it. The
    head that is checked is the head that is written, whatever the peer does to the buffer meanwhile.
    """
    gate, counters, count, room = bench.filter, bench.counters, bench.counters.count, bench.room
    descriptor, interface, most = bench.interface.descriptor, bench.interface, gate.head
    start, wanted, bits, number = gate.start, gate.wanted, gate.bits, int.from_bytes
    version_at, version = gate.vnet_header, gate.version << 4

    def deliver(buffer: memoryview, size: int) -> None:
        if not version_at < size <= room:
            raise LinkViolation(f"a packet of {size} bytes; {version_at + 1} to {room} are possible")
        head = bytes(buffer[: most if size > most else size])
        if size < most or number(head[start:]) & bits != wanted or head[version_at] & 0xF0 != version:
            counters.drop(gate.verdict(head) or "malformed")
            return
        try:
            writev(descriptor, (head, buffer[most:size]))
        except OSError as error:
            interface.check_gone(error)
            counters.drop("refused")
        else:
            count(size)

    return deliver


LOOPS = {"host": (submit_packets, deliver_receives), "device": (answer_receives, execute_sends)}
"""Per role: from the interface, and to it."""

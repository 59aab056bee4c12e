# SPDX-License-Identifier: Apache-2.0
"""Edge: the datapath in Python: loops that carry packets between the interface and a queue pair.

One loop per direction and endpoint. Each runs in a process of its own (a pump), until it is killed or raises
LinkViolation or InterfaceGone. ``datapath.c`` has the same loops.
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
    """A loop's helpers for its queue pair: sleeper, waker, stats, interface and filter."""

    def __init__(self, context: QueueContext) -> None:
        memory = context.memory
        own, peer = memory.host_sleep_word, memory.controller_sleep_word
        if not context.host:
            own, peer = peer, own
        self.sleeper = Sleeper(own, context.wake, context.stats)
        self.waker = Waker(peer, context.notifier, context.stats)
        self.stats, self.interface, self.filter = (
            context.stats,
            context.datapath.interface,
            context.datapath.filter,
        )
        self.room = memory.span.size
        self.half = (memory.entries - 1) // 2
        """Entries to wait for when a ring is exhausted: one wake-up for half of it, not one for each entry.
        """

    def wait_for_room(self, queue: HostQueue | ControllerQueue) -> None:
        """Sleep until half of an exhausted ring is free again. The next entry is checked too: a device may
        write a later one alone, which leaves nothing to do, and without the check nothing would sleep.
        """
        self.stats.was_full()
        self.sleeper.wait(queue.entry(self.half), lambda: queue.ready(self.half) and queue.ready())


# The loops are flat for speed: a call costs a tenth of a microsecond, and each runs for every packet.


def submit_packets(context: QueueContext) -> NoReturn:
    """Carry packets of the host from the interface into SEND commands."""
    state, queue = LoopState(context), HostQueue(context.memory)
    reap, acquire, submit, count = queue.reap, queue.acquire, queue.submit, state.stats.count
    word, wake, limit = state.waker.word, state.waker.wake, context.memory.entries - 1
    descriptor, vectors = state.interface.descriptor, [[buffer] for buffer in queue.buffers]
    with state.interface.errors():
        while True:
            while (done := reap()) is not None:  # before each read: the free buffer is then still cached
                if done[2]:
                    raise LinkViolation(f"SEND failed with NVMe status {done[2]:#x}")
            cid = acquire()
            if cid is None:
                state.wait_for_room(queue)
                continue
            size = readv(descriptor, vectors[cid])
            entry = submit(_SEND, cid, size)
            barrier()
            if word[0] == entry + 1:
                wake()
            count(size, limit - len(queue.free))


def answer_receives(context: QueueContext) -> NoReturn:
    """Carry packets of the device from the interface into the buffers of posted RECV commands."""
    state, queue = LoopState(context), ControllerQueue(context.memory, (Opcode.RECV,))
    fetch, complete, count = queue.fetch, queue.complete, state.stats.count
    word, wake, backlog = state.waker.word, state.waker.wake, queue.backlog
    descriptor, vectors = state.interface.descriptor, [[buffer] for buffer in queue.buffers]
    with state.interface.errors():
        while True:
            command = fetch()
            if command is None:
                state.wait_for_room(queue)
                continue
            _, cid, index, room = command
            if room != state.room:  # a TUN truncates a packet to the buffer
                raise LinkViolation(f"RECV for {room} bytes; a buffer has {state.room}")
            size = readv(descriptor, vectors[index])
            entry = complete(cid, size)
            barrier()
            if word[0] == entry + 1:
                wake()
            count(size, backlog())


def execute_sends(context: QueueContext) -> NoReturn:
    """Carry packets from SEND commands to the interface of the device."""
    state, queue = LoopState(context), ControllerQueue(context.memory, (Opcode.SEND,))
    deliver, buffers = _deliverer(state), queue.buffers
    fetch, complete, word, wake = queue.fetch, queue.complete, state.waker.word, state.waker.wake
    while True:
        command = fetch()
        if command is None:
            state.sleeper.wait(queue.entry(0), queue.ready)
            continue
        deliver(buffers[command[2]], command[3])
        entry = complete(command[1])
        barrier()
        if word[0] == entry + 1:
            wake()


def deliver_receives(context: QueueContext) -> NoReturn:
    """Carry packets from completed RECV commands to the interface of the host; posts all RECVs in advance,
    and each again.
    """
    state, queue = LoopState(context), HostQueue(context.memory)
    deliver, buffers, room = _deliverer(state), queue.buffers, state.room
    reap, submit, word, wake = queue.reap, queue.submit, state.waker.word, state.waker.wake
    while (free := queue.acquire()) is not None:
        state.waker.wake_if_waiting(submit(_RECV, free, room))
    while True:
        done = reap()
        if done is None:
            state.sleeper.wait(queue.entry(0), queue.ready)
            continue
        cid, size, status = done
        if status:
            raise LinkViolation(f"RECV failed with NVMe status {status:#x}")
        if size:  # a controller may complete an idle RECV without a packet
            deliver(buffers[cid], size)
        queue.free.pop()  # the same CID: the last that became free
        entry = submit(_RECV, cid, room)
        barrier()
        if word[0] == entry + 1:
            wake()


def _deliverer(state: LoopState) -> Callable[[memoryview, int], None]:
    """Return a function that writes a packet of a given size from a buffer to the interface, if the filter
    passes it. The head that was checked is the head that is written, whatever the peer does to the buffer
    meanwhile.
    """
    allowed, stats, count, room = state.filter, state.stats, state.stats.count, state.room
    descriptor, interface, most = state.interface.descriptor, state.interface, allowed.head
    version_at, verdict = allowed.vnet_header, allowed.verdict

    def deliver(buffer: memoryview, size: int) -> None:
        if not version_at < size <= room:
            raise LinkViolation(f"a packet of {size} bytes; {version_at + 1} to {room} are possible")
        head = bytes(buffer[: most if size > most else size])
        cause = verdict(head, size)
        if cause is not None:
            stats.drop(cause)
            return
        try:
            writev(descriptor, (head, buffer[most:size]))
        except OSError as error:
            interface.check_gone(error)
            stats.drop("refused")
        else:
            count(size)

    return deliver


LOOPS = {"host": (submit_packets, deliver_receives), "device": (answer_receives, execute_sends)}
"""Loops by role: from the interface, and to it."""

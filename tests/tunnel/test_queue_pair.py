# SPDX-License-Identifier: Apache-2.0
"""Queue pairs against a model: nothing is lost, doubled or reordered; entries lie as NVMe has them."""

from __future__ import annotations

import struct
from collections import deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.tunnel.ring.layout import SEND, Layout
from millpond.tunnel.ring.nvme_defs import Opcode, Status
from millpond.tunnel.ring.queue_pair import ControllerQueue, HostQueue
from millpond.tunnel.ring.region import QueueMemory, Region

SQE = struct.Struct("<BBHIQQQQIIIIII")
CQE_BODY = struct.Struct("<IIHHH")
LAYOUT = Layout(8)
_memory = memoryview(bytearray(LAYOUT.size))


def fresh(queue: int, depth: int) -> QueueMemory:
    """A queue pair in zeroed memory; the buffers keep what was in them."""
    for ring in (LAYOUT.submission_ring(queue), LAYOUT.completion_ring(queue)):
        _memory[ring.start : ring.end] = bytes(ring.end - ring.start)
    _memory[0x1000:0x3000] = bytes(0x2000)
    return Region(_memory, LAYOUT).queue(queue, depth)


class Exchange(RuleBasedStateMachine):
    """SENDs of numbered buffers, fetched and completed in any interleaving."""

    def __init__(self) -> None:
        super().__init__()
        memory = fresh(SEND, 5)
        self.host = HostQueue(memory)
        self.controller = ControllerQueue(memory, (Opcode.SEND,))
        self.submitted: deque[tuple[int, int]] = deque()
        self.fetched: deque[tuple[int, int]] = deque()
        self.completed: deque[tuple[int, int]] = deque()
        self.commands: deque[int] = deque()
        self.serial = 0

    def in_flight(self) -> int:
        return len(self.submitted) + len(self.fetched) + len(self.completed)

    @rule()
    def submit(self) -> None:
        cid = self.host.acquire()
        assert (cid is None) == (self.in_flight() == 4), "a queue of 5 holds 4"
        if cid is None:
            return
        self.serial += 1
        self.host.buffers[cid][:4] = self.serial.to_bytes(4, "little")
        self.host.submit(Opcode.SEND, cid, 4)
        self.submitted.append((cid, self.serial))

    @rule()
    def fetch(self) -> None:
        assert self.controller.ready() == bool(self.submitted)
        command = self.controller.fetch()
        assert (command is None) == (not self.submitted)
        if command is None:
            return
        cid, serial = self.submitted.popleft()
        assert command[1] == cid and command[3] == 4
        assert bytes(self.controller.buffers[command[2]][:4]) == serial.to_bytes(4, "little")
        self.fetched.append((cid, serial))
        self.commands.append(command[1])

    @precondition(lambda self: self.fetched)
    @rule(last=st.booleans())
    def complete(self, last: bool) -> None:
        if last:  # a controller may complete in any order
            self.commands.rotate(1)
            self.fetched.rotate(1)
        cid, serial = self.fetched.popleft()
        self.controller.complete(self.commands.popleft(), serial)
        self.completed.append((cid, serial))

    @rule()
    def reap(self) -> None:
        assert self.host.ready() == bool(self.completed)
        done = self.host.reap()
        assert (done is None) == (not self.completed)
        if done is not None:
            assert done == (*self.completed.popleft(), 0)

    @invariant()
    def never_more_than_it_holds(self) -> None:
        assert self.in_flight() <= 4


TestExchange = Exchange.TestCase


def test_entries_lie_as_nvme_has_them() -> None:
    memory = fresh(SEND, 8)
    host, controller = HostQueue(memory), ControllerQueue(memory, (Opcode.SEND,))
    host.submit(Opcode.SEND, host.acquire() or 0, 60)
    cid, address = 6, LAYOUT.buffers(SEND).start + 6 * (1 << 17)
    assert SQE.unpack_from(memory.submissions) == (0x81, 0, cid, 0, 0, 0, address, 0, 60, 0, 0, 0, 0, 0)
    controller.fetch()
    controller.complete(cid, 0x1234_5678, Status.VERSION_MISMATCH)
    assert CQE_BODY.unpack_from(memory.completions) == (0x1234_5678, 0, 1, SEND, cid)
    assert struct.unpack_from("<H", memory.completions, 14) == (0x701 << 1 | 1,)

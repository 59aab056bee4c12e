# SPDX-License-Identifier: Apache-2.0
"""Queue pairs against a model: nothing is lost, doubled or reordered, and hostile values are refused."""

from __future__ import annotations

import struct
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.layout import RECV, SEND, Layout
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


@given(depth=st.integers(2, 8), turns=st.integers(1, 60))
def test_rings_wrap_with_the_phase(depth: int, turns: int) -> None:
    memory = fresh(RECV, depth)
    host, controller = HostQueue(memory), ControllerQueue(memory, (Opcode.RECV,))
    for number in range(turns):
        cid = host.acquire()
        assert cid is not None and host.reap() is None
        host.submit(Opcode.RECV, cid, 1 << 17)
        command = controller.fetch()
        assert command is not None and controller.fetch() is None
        controller.complete(command[1], number)
        done = host.reap()
        assert done is not None and done[1] == number and not host.ready()


GOOD = {"opcode": 0x81, "cid": 0, "address": LAYOUT.buffers(SEND).start, "length": 100}
BAD_COMMANDS = [
    {"opcode": 0x82},
    {"opcode": 0x02},
    {"cid": 8},
    {"cid": 0xFFFF},
    {"address": 0},
    {"address": GOOD["address"] + 1},
    {"address": LAYOUT.buffers(SEND).end},
    {"address": 2**64 - 1},
    {"length": 0},
    {"length": (1 << 17) + 1},
    {"length": 2**32 - 1},
]


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


def put(memory: QueueMemory, opcode: int, cid: int, address: int, length: int) -> None:
    SQE.pack_into(memory.submissions, 0, opcode, 0, cid, 0, 0, 0, address, 0, length, 0, 0, 0, 0, 0)
    memory.tail_doorbell[0] = 1


@pytest.mark.parametrize("wrong", BAD_COMMANDS)
def test_a_bad_command_is_refused(wrong: dict[str, int]) -> None:
    memory = fresh(SEND, 8)
    controller = ControllerQueue(memory, (Opcode.SEND,))
    put(memory, **GOOD)
    assert controller.fetch() is not None
    memory, controller = fresh(SEND, 8), ControllerQueue(fresh(SEND, 8), (Opcode.SEND,))
    put(memory, **(GOOD | wrong))
    with pytest.raises(LinkViolation):
        controller.fetch()


@given(tail=st.integers(8, 2**32 - 1))
def test_a_tail_out_of_range_is_refused(tail: int) -> None:
    memory = fresh(SEND, 8)
    controller = ControllerQueue(memory, (Opcode.SEND,))
    memory.tail_doorbell[0] = tail
    assert controller.ready()
    with pytest.raises(LinkViolation, match="tail doorbell"):
        controller.fetch()


@pytest.mark.parametrize("head", [8, 2**32 - 1])
def test_a_completion_head_out_of_range_is_refused(head: int) -> None:
    memory = fresh(SEND, 8)
    host, controller = HostQueue(memory), ControllerQueue(memory, (Opcode.SEND,))
    host.submit(Opcode.SEND, host.acquire() or 0, 5)
    command = controller.fetch()
    assert command is not None
    memory.head_doorbell[0] = head
    with pytest.raises(LinkViolation, match="head doorbell"):
        controller.complete(command[1])


def test_a_host_that_takes_no_completions_is_refused() -> None:
    memory = fresh(SEND, 2)
    controller = ControllerQueue(memory, (Opcode.SEND,))
    put(memory, **GOOD)
    command = controller.fetch()
    assert command is not None
    controller.complete(command[1])
    with pytest.raises(LinkViolation, match="more commands"):
        controller.complete(command[1])


@pytest.mark.parametrize(
    ("cid", "sq_head", "sq_id"),
    [
        (7, 1, SEND),
        (8, 1, SEND),
        (0xFFFF, 1, SEND),
        (0, 1, RECV),
        (0, 2, SEND),
        (0, 8, SEND),
        (0, 0xFFFF, SEND),
    ],
)
def test_a_bad_completion_is_refused(cid: int, sq_head: int, sq_id: int) -> None:
    memory = fresh(SEND, 8)
    host = HostQueue(memory)
    own = host.acquire()
    assert own is not None
    host.submit(Opcode.SEND, own, 5)
    CQE_BODY.pack_into(memory.completions, 0, 0, 0, sq_head, sq_id, own if cid == 0 else cid + (cid == own))
    memory.completions.cast("H")[7] = 1
    with pytest.raises(LinkViolation):
        host.reap()


@given(data=st.binary(min_size=64, max_size=64), tail=st.integers(0, 2**32 - 1))
def test_any_garbage_ends_in_a_command_in_range_or_a_violation(data: bytes, tail: int) -> None:
    memory = fresh(SEND, 8)
    memory.submissions[:64] = data
    memory.tail_doorbell[0] = tail
    controller = ControllerQueue(memory, (Opcode.SEND,))
    try:
        command = controller.fetch()
    except LinkViolation:
        return
    if command is not None:
        assert 0 < command[3] <= len(controller.buffers[command[2]])

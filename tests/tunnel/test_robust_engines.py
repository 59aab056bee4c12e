# SPDX-License-Identifier: Apache-2.0
"""The C engine and the Python engine behave alike, whatever the peer writes into the ring's memory."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import pytest

from millpond.base.deadline import Deadline
from millpond.linux.syscalls import die_with_parent
from millpond.tunnel.datapath import native

from ..effort import scaled
from ..waiting import eventually
from .robust_controller_half import ControllerHalf
from .robust_engine import RunningLoop, why_not_observable
from .robust_honest_peer import HonestPeer
from .robust_host_half import HostHalf
from .robust_loop_context import LOOPS, Observation, Setting
from .robust_packets import Packets, is_foreign
from .robust_queue_half import Half

HALVES: dict[str, type[Half]] = {"host": ControllerHalf, "device": HostHalf}
"""The peer's, per role of the loop."""
ADDRESSES = ("10.77.0.1/30", "10.77.0.2/30", "10.1.2.3/31", "fd00::/127", "fd00::1/127")
PEERS = {"10.77.0.1/30": ["", "10.77.0.0/16", "10.77.0.0/29"], "10.77.0.2/30": ["", "10.64.0.0/11"]}
"""Networks that the device may speak with; other addresses have the host alone."""
ROUNDS = scaled(2, 4)
"""Scripts per loop and kind of mischief."""
LENGTHS = (60, 1500, 65000)
IMPOSSIBLE = 2**32 - 1
ENOUGH, RACES = scaled((100, 3), (500, 20))
QUIET, MOST_CPU = 0.5, 0.1
"""Seconds, and how many of them a loop may take that has nothing to do; one that spins takes them all."""
MOST_TURNS = 20
"""In that time; a nap lasts 100 ms."""
Change = Callable[[RunningLoop], NoReturn]
Script = list[tuple[str, int]]

OUTWARD, INWARD = ("submit_packets", "answer_receives"), ("deliver_receives", "execute_sends")
pytestmark = pytest.mark.skipif(bool(why_not_observable()), reason=why_not_observable())
needs_c = pytest.mark.skipif(
    native.resolve("auto") != "c", reason="the C engine was not built: there was no C compiler"
)
each_engine = pytest.mark.parametrize("name", ["python", pytest.param("c", marks=needs_c)])


def random_setting(loop: str, source: random.Random) -> Setting:
    address = source.choice(ADDRESSES)
    return Setting(
        loop,
        depth=source.choice((2, 3, 5, 8)),
        spare=source.choice((0, 0, 3)),
        address=address,
        peers=source.choice(PEERS.get(address, [""])),
        vnet_header=source.choice((12, 12, 10, 0)),
        offloads=source.choice((0, 1, 3, 5, 7)),
        register=source.random() < 0.2,
    )


def random_script(half: type[Half], mischief: str, source: random.Random) -> Script:
    """Honest for a while, then that, then anything; enough for a ring to wrap."""
    before = source.choices(half.HONEST, k=source.randrange(8))
    after = source.choices((*half.HONEST, *half.WRONG), k=source.randrange(8))
    names = (*before, mischief, "work", *after, "work", "work")
    return [(name, source.getrandbits(32)) for name in names]


def check(half: Half, seen: Observation) -> None:
    """What is asked of one engine alone."""
    assert not [packet for packet in seen.delivered if is_foreign(packet, half.loop.setting)]
    assert half.received == half.sent[: len(half.received)] or not half.honest
    if half.honest:
        assert seen.verdict is None
        assert list(seen.delivered) == half.expected
        assert half.loop.outward or seen.counts.bytes >= sum(map(len, half.expected))


def observe(half: Half) -> Observation:
    half.loop.rest()
    seen = half.loop.observe()
    check(half, seen)
    return seen


def act(half: Half, name: str, seed: int) -> None:
    with half.loop.paused():
        half.act(name, seed)


def compare(setting: Setting, script: Script) -> bool:
    """Both engines through it: did it end in a violation?"""
    with ExitStack() as undo:
        kind = HALVES[LOOPS[setting.loop][0]]
        halves = [kind(RunningLoop(undo, name, setting)) for name in ("python", "c")]
        one, other = map(observe, halves)
        for number, (name, seed) in enumerate(script):
            assert not one.difference(other), f"{setting}, {script[:number]}: {one.difference(other)}"
            assert halves[0].received == halves[1].received
            if one.verdict:
                assert one.verdict[0] == "LinkViolation"
                return True
            for half in halves:
                act(half, name, seed)
            one, other = map(observe, halves)
        return False


@needs_c
@pytest.mark.parametrize("loop", LOOPS)
def test_both_engines_do_the_same(loop: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source, half, violations = random.Random(seed), HALVES[LOOPS[loop][0]], 0
    for mischief in half.WRONG * ROUNDS:
        violations += compare(random_setting(loop, source), random_script(half, mischief, source))
    assert 0 < violations < len(half.WRONG) * ROUNDS


# A peer that changes things while they are looked at


def change_packets_for_ever(loop: RunningLoop) -> NoReturn:
    """The addresses of all packets and all lengths, these seldom to one that is impossible."""
    memory, gate = loop.memory, loop.setting.gate
    half = len(gate.expected) // 2
    source, destination, other = gate.expected[:half], gate.expected[half:], bytes(half - 1) + b"\7"
    addresses = [first + second for second in (destination, other, source) for first in (source, other)]
    fields = [buffer[gate.head - 2 * half : gate.head] for buffer in memory.buffers]
    lengths = lengths_of(loop)
    while True:
        for turn in range(200):
            for there in addresses:
                for field in fields:
                    field[:] = there
            for length in lengths:
                length[0] = IMPOSSIBLE if turn == 0 else LENGTHS[turn % len(LENGTHS)]


def change_lengths_for_ever(loop: RunningLoop) -> NoReturn:
    """To impossible ones and back."""
    lengths = lengths_of(loop)
    while True:
        for length in lengths:
            length[0] = IMPOSSIBLE
            length[0] = LENGTHS[0]


def lengths_of(loop: RunningLoop) -> list[memoryview]:
    """The word of each ring entry that says how long the packet is."""
    memory = loop.memory
    ring, first, step = (memory.completions, 0, 4) if loop.role == "host" else (memory.submissions, 10, 16)
    words = ring.cast("I")
    return [words[index : index + 1] for index in range(first, len(words), step)]


@contextmanager
def happening(change: Change, loop: RunningLoop) -> Iterator[None]:
    """A process does that meanwhile."""
    pid = os.fork()
    if not pid:
        try:
            die_with_parent(signal.SIGKILL)
            change(loop)
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def race(name: str, setting: Setting, change: Change) -> tuple[list[bytes], int]:
    """What gets through in a second or until the loop ends, and how many packets were dropped as foreign."""
    longest, got, deadline = LENGTHS[-1], list[bytes](), Deadline.after(1)
    packet = (Packets(setting, random.Random(), longest).good() + bytes(longest))[:longest]
    with ExitStack() as undo:
        loop = RunningLoop(undo, name, setting)
        peer = HonestPeer(loop)
        undo.enter_context(happening(change, loop))
        while not loop.ended() and not deadline.passed:
            peer.give(deque([packet] * setting.depth))
            got += loop.delivered()
        got += loop.delivered()
        assert loop.verdict is None or f" {IMPOSSIBLE} bytes" in loop.verdict[1], loop.verdict
        assert not [packet[:60].hex() for packet in got if is_foreign(packet, setting)]
        assert {len(packet) for packet in got} <= {*LENGTHS} and not loop.counts.refused
        return got, loop.counts.foreign_source + loop.counts.foreign_destination


@each_engine
@pytest.mark.parametrize("address", scaled(["10.77.0.1/30"], ["10.77.0.1/30", "fd00::1/127"]))
@pytest.mark.parametrize("loop", INWARD)
def test_nothing_foreign_passes_however_packets_change_meanwhile(loop: str, address: str, name: str) -> None:
    setting, deadline, passed, dropped = Setting(loop, depth=4, address=address), Deadline.after(100), 0, 0
    while min(passed, dropped) < ENOUGH:
        assert not deadline.passed, f"only {passed} packets passed and {dropped} did not"
        packets, foreign = race(name, setting, change_packets_for_ever)
        passed, dropped = passed + len(packets), dropped + foreign


@each_engine
@pytest.mark.parametrize("loop", INWARD)
def test_a_length_that_changes_meanwhile_is_taken_as_it_was_checked(loop: str, name: str) -> None:
    passed = sum(len(race(name, Setting(loop, depth=4), change_lengths_for_ever)[0]) for _ in range(RACES))
    assert passed > 0


# A side that takes nothing


def assert_quiet(loop: RunningLoop) -> None:
    before, turns = loop.cpu_seconds(), loop.counts.full
    time.sleep(QUIET)
    assert loop.cpu_seconds() - before < MOST_CPU
    assert loop.counts.full - turns < MOST_TURNS


def numbered() -> list[bytes]:
    return [bytes([number]) * (100 + number) for number in range(40)]


def fill(undo: ExitStack, name: str, loop: str) -> tuple[RunningLoop, HonestPeer, list[bytes]]:
    """More packets from the interface than the ring holds, of which the peer has not taken one."""
    running = RunningLoop(undo, name, Setting(loop))
    peer = HonestPeer(running)
    received = peer.take()
    for packet in numbered():
        running.wire.send(packet)
    running.rest()
    assert received == [] and running.counts.packets == running.setting.depth - 1
    return running, peer, received


def take_all(peer: HonestPeer) -> list[bytes]:
    received: list[bytes] = []

    def come() -> bool:
        received.extend(peer.take())
        return len(received) >= len(numbered())

    eventually(come, "all packets come")
    return received


@each_engine
@pytest.mark.parametrize("loop", OUTWARD)
def test_a_peer_that_takes_nothing_costs_no_time_and_no_packet(undo: ExitStack, loop: str, name: str) -> None:
    running, peer, _ = fill(undo, name, loop)
    assert_quiet(running)
    assert running.counts.full > 0
    assert take_all(peer) == numbered()


@each_engine
def test_a_completion_out_of_turn_costs_no_time(undo: ExitStack, name: str) -> None:
    """The one that the loop waits for, without those before it."""
    running, peer, _ = fill(undo, name, "submit_packets")
    half = (running.setting.depth - 1) // 2
    cid = running.memory.submissions.cast("H")[32 * half + 1]
    quads = running.memory.completions.cast("Q")
    quads[2 * half + 1] = half + 1 | running.memory.number << 16 | cid << 32 | 1 << 48
    assert_quiet(running)
    assert take_all(peer) == numbered()


@each_engine
@pytest.mark.parametrize("loop", INWARD)
def test_an_interface_that_takes_nothing_costs_no_time_and_no_packet(
    undo: ExitStack, loop: str, name: str
) -> None:
    setting = Setting(loop)
    running, source = RunningLoop(undo, name, setting), Packets(setting, random.Random(), 9000)
    peer, sent, got = HonestPeer(running), [source.good() for _ in range(200)], list[bytes]()
    packets = deque(sent)
    for _ in range(100):
        peer.give(packets)
        time.sleep(0.002)
    assert packets, "the ring is not full"
    assert_quiet(running)

    def come() -> bool:
        peer.give(packets)
        got.extend(running.delivered())
        return len(got) >= len(sent)

    eventually(come, "all packets come")
    assert got == sent and not running.ended()

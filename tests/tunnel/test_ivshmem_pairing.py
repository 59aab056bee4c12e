# SPDX-License-Identifier: Apache-2.0
"""The pairing in memory that outlives both endpoints, which may die at any moment."""

from __future__ import annotations

import mmap
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from millpond.tunnel.ring.layout import MIN_ENTRIES, PAGE, Layout
from millpond.tunnel.ring.region import Region
from millpond.tunnel.transports.ivshmem.device_side import make_region
from millpond.tunnel.transports.ivshmem.pairing import (
    DEVICE_HEARTBEAT,
    DEVICE_WORD,
    HOST_HEARTBEAT,
    HOST_WORD,
    NUMBERS,
    DeviceSession,
    HostSession,
    Mailbox,
    Word,
)

from ..effort import scaled

HOST_ID, DEVICE_ID = 7, 65535


class Shared:
    """The memory, which region is in it, and which one the last host to accept found there."""

    def __init__(self, seed: int) -> None:
        self.memory = memoryview(bytearray(PAGE))
        self.made = self.accepted = 0
        random_number = random.Random(seed).randrange
        self.draw = lambda: random_number(1, NUMBERS)


class Host:
    """The host's end, one step at a time: ask, see the answer, accept, carry."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.session = HostSession(Mailbox(shared.memory, "host"), HOST_ID, shared.draw)
        self.seen: Word | None = None
        self.carries: Word | None = None
        self.session.ask()

    def step(self) -> bool:
        """False once the link has ended."""
        if self.carries:
            return self.session.intact
        if self.seen:
            self.session.accept(self.seen)
            self.carries, self.shared.accepted = self.seen, self.shared.made
            return True
        self.session.ask()
        answer = self.session.answer()
        self.seen = answer if answer and answer.peer == DEVICE_ID else None
        return True


class Device:
    """The device's end: see a question, make the region, answer, be accepted, carry."""

    def __init__(self, shared: Shared, *, trusts_words: bool = True) -> None:
        self.shared, self._trusts_words = shared, trusts_words
        self.box = Mailbox(shared.memory, "device")
        self.session = DeviceSession(self.box, DEVICE_ID, shared.draw)
        self.question: Word | None = None
        self.made = 0
        self.answered = self.carries = False

    def step(self) -> bool:
        if self.carries:
            return self.session.intact
        if self.question is None:
            self.question = self.session.question()
        elif not self.made:
            self.shared.made += 1
            self.made = self.shared.made
        elif not self.answered:
            self.session.answer(self.question)
            self.answered = True
        elif self.session.intact:
            same = self.made == self.shared.accepted
            assert same or not self._trusts_words, "the host accepted another region than this device's"
            self.carries = True
        elif self.box.peer_word == self.question:
            self.session.repeat()
        else:
            self.question, self.made, self.answered = None, 0, False
        return True


@given(st.lists(st.sampled_from(["host", "device", "kill host", "kill device"]), max_size=80), st.integers())
@settings(max_examples=scaled(250, 1000))
@example(["device", "device", "device", "host", "kill device", "device", "host", *["device"] * 4], 0)
@example(["device", "device", "host", "kill host", "device", "host", *["device", "host"] * 3], 0)
def test_no_end_is_ever_mixed_with_a_former_self_of_the_other(steps: list[str], seed: int) -> None:
    shared = Shared(seed)
    host, device = Host(shared), Device(shared)
    for step in steps:
        if step == "kill host" or (step == "host" and not host.step()):
            host = Host(shared)
        if step == "kill device" or (step == "device" and not device.step()):
            device = Device(shared)
    for _ in range(20):  # and without more deaths they come together
        host = host if host.step() else Host(shared)
        device = device if device.step() else Device(shared)
    assert host.carries and host.session.intact and device.carries and device.session.intact
    assert host.carries == device.box.own_word


@given(st.lists(st.tuples(st.sampled_from([HOST_WORD, DEVICE_WORD]), st.integers(0, (1 << 64) - 1))))
def test_whatever_is_written_there_only_costs_the_link(writes: list[tuple[int, int]]) -> None:
    shared = Shared(0)
    quads = shared.memory.cast("Q")
    host, device = Host(shared), Device(shared, trusts_words=False)
    for place, value in writes:
        quads[place // 8] = value
        host = host if host.step() else Host(shared)
        device = device if device.step() else Device(shared, trusts_words=False)
    for _ in range(20):
        host = host if host.step() else Host(shared)
        device = device if device.step() else Device(shared, trusts_words=False)
    assert host.carries and host.session.intact and device.carries and device.session.intact


def test_a_restarted_end_never_draws_its_former_number() -> None:
    memory = memoryview(bytearray(PAGE))
    numbers = iter([5, 5, 5, 6])
    HostSession(Mailbox(memory, "host"), HOST_ID, lambda: next(numbers)).ask()
    HostSession(Mailbox(memory, "host"), HOST_ID, lambda: next(numbers)).ask()
    assert Mailbox(memory, "host").own_word.host == 6


def test_a_region_made_anew_is_empty_but_for_the_session() -> None:
    layout = Layout(MIN_ENTRIES)
    memory = memoryview(mmap.mmap(-1, layout.size))
    memory[:] = b"\xa5" * layout.size
    make_region(memory, layout)
    region = Region.attach(memory)
    assert not region.registers.enabled and not region.registers.ready
    for number in range(3):
        queue = region.queue(number, layout.queue_entries(number))
        assert not any(queue.submissions) and not any(queue.completions)
        words = (queue.tail_doorbell, queue.head_doorbell, queue.controller_sleep_word, queue.host_sleep_word)
        assert [word[0] for word in words] == [0, 0, 0, 0]
    for place in (HOST_WORD, HOST_HEARTBEAT, DEVICE_WORD, DEVICE_HEARTBEAT):
        assert bytes(memory[place : place + 8]) == b"\xa5" * 8

# SPDX-License-Identifier: Apache-2.0
"""The tuner against a simulation of a stream: its choice is nearly the best, and follows changes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as some

from millpond.data.streaming.protocol.tuner import StreamTuner, choose

BATCH, SAMPLES = 32, 20_000


@dataclass
class Link:
    """A service and a link: seconds of a chunk, of a byte and of a round trip; and of a sample's training."""

    each: int
    chunk: float
    byte: float
    latency: float
    step: float


SHAPES = {
    "large samples, slow link": Link(150_000, 2e-4, 8e-9, 2e-4, 1.5e-3),
    "small samples, costly chunks": Link(3_000, 3e-3, 1e-9, 1e-3, 5e-5),
    "slow model": Link(3_000, 3e-4, 8e-9, 5e-4, 2e-3),
    "far away": Link(20_000, 3e-4, 8e-9, 5e-2, 4e-4),
}


def epoch(link: Link, tuner: StreamTuner | None, chunk: int, window: int, samples: int = SAMPLES) -> float:
    """Return the seconds that a consumer waits in an epoch, chunk by chunk and step by step."""
    now = free = waited = 0.0  # the consumer's clock, and when the link is free
    last, last_starved = 0.0, False
    queued: deque[tuple[float, int]] = deque()  # chunks: arrival and samples
    sent = have = 0
    grants = deque([(link.latency, window)])
    room, done = 0, 0

    def send(until: float) -> None:
        nonlocal free, room, sent, last, last_starved
        while sent < samples:
            size = min(chunk, samples - sent, max(1, window // link.each))
            while room < size * link.each and grants:
                at, granted = grants.popleft()
                free, room = max(free, at), room + granted
            if room < size * link.each or free > until:
                return
            free += link.chunk + size * link.each * link.byte
            starved = room - size * link.each >= window / 2
            room -= size * link.each
            sent += size
            queued.append((free, size))
            if tuner:
                tuner.observe_chunk(size, size * link.each, free - last if starved and last_starved else None)
            last, last_starved = free, starved

    while done < samples:
        wanted = min(BATCH, samples - done)
        began = now
        while have < wanted:
            send(math.inf if not queued else now)
            arrival, size = queued.popleft()
            now, have = max(now, arrival), have + size
            grants.append((now + link.latency, size * link.each))
            send(now)
        waited += now - began
        have, done = have - wanted, done + wanted
        send(now + wanted * link.step)
        now += wanted * link.step
        if tuner:
            tuner.observe_step(wanted, wanted * link.step)
            grown = tuner.choice.window - window
            chunk, window = tuner.choice.chunk, tuner.choice.window
            if grown > 0:
                grants.append((now + link.latency, grown))
    return waited


def tuned(link: Link, memory: int) -> tuple[StreamTuner, float]:
    """Let a tuner follow two epochs; return it with the seconds waited in the second."""
    tuner = StreamTuner(BATCH, memory)
    tuner.opened(SAMPLES, link.each, link.latency)
    for _ in range(2):
        waited = epoch(link, tuner, tuner.choice.chunk, tuner.choice.window)
    return tuner, waited


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("memory", [32 << 20, 256 << 20])
def test_the_choice_is_within_5_percent_of_the_best(name: str, memory: int) -> None:
    link = SHAPES[name]
    tuner, _ = tuned(link, memory)
    ours = epoch(link, None, tuner.choice.chunk, tuner.choice.window)
    cells = [1 << power for power in range(12)]
    best = min(epoch(link, None, chunk, memory) for chunk in cells if chunk * link.each <= memory)
    assert SAMPLES * link.step + ours <= 1.05 * (SAMPLES * link.step + best)
    assert tuner.choice.window <= memory


def test_a_slower_link_and_a_slower_model_change_the_choice() -> None:
    link = SHAPES["small samples, costly chunks"]
    tuner, _ = tuned(link, 256 << 20)
    large = tuner.choice
    link.chunk, link.step = 2e-4, 2e-3
    for _ in range(2):
        epoch(link, tuner, tuner.choice.chunk, tuner.choice.window)
    assert tuner.choice.chunk < large.chunk
    link.chunk, link.step = 3e-3, 5e-5
    for _ in range(2):
        epoch(link, tuner, tuner.choice.chunk, tuner.choice.window)
    assert tuner.choice.chunk >= large.chunk / 2


@given(
    some.integers(1, 1 << 20),
    some.floats(1e-10, 1e-5),
    some.floats(0, 0.1),
    some.floats(0, 0.1),
    some.integers(1, 512),
    some.integers(1 << 16, 1 << 30),
)
def test_any_costs_give_a_choice(
    each: int, byte: float, latency: float, step: float, batch: int, memory: int
) -> None:
    tuner = StreamTuner(batch, memory)
    tuner.opened(1000, each, latency)
    tuner.observe_chunk(batch, batch * each, batch * each * byte)
    tuner.observe_step(batch, batch * step)
    assert tuner.choice.chunk >= 1 and 0 < tuner.choice.window <= memory
    assert tuner.choice.idle >= 0 and choose(tuner.costs, batch, 1000, memory).chunk >= 1


def test_a_chunk_that_is_given_is_kept() -> None:
    tuner = StreamTuner(BATCH, 1 << 30, 7)
    tuner.opened(1000, 1000, 0.1)
    tuner.observe_step(32, 0.1)
    assert tuner.choice.chunk == 7


def test_what_a_worker_tells_of_a_stream_is_the_choice_and_its_costs() -> None:
    tuner = StreamTuner(BATCH, 1 << 26)
    tuner.opened(SAMPLES, 3_000, 5e-4)
    assert tuner.timing.idle == 100, "no time of a step is known"
    for _ in range(50):
        tuner.observe_step(BATCH, BATCH * 2e-3)
    told = tuner.timing
    assert (told.chunk, told.window) == (tuner.choice.chunk, tuner.choice.window)
    assert told.step == pytest.approx(2e-3) and told.latency == tuner.costs.latency
    assert told.idle == round(100 * tuner.choice.idle / (tuner.choice.idle + SAMPLES * 2e-3)) < 10

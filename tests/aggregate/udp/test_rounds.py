# SPDX-License-Identifier: Apache-2.0
"""Rounds of the UDP protocol over a link that loses, repeats, delays and corrupts, on a clock of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.aggregate.exact import scale_of
from millpond.aggregate.udp.aggregator import ClientHead
from millpond.aggregate.udp.datagrams import Datagram, DatagramKind, VectorPlan, seal
from millpond.aggregate.udp.outgoing import SealedDatagram

from ...effort import scaled
from .fake_link import HUB, FakeLink, Faults, Vector, exact_mean, heads_of

EXAMPLES = scaled(quick=20, full=400)


def some_vectors(count: int, size: int, seed: int = 0) -> list[Vector]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(size) * 2.0 ** rng.integers(-9, 9)).astype(np.float32) for _ in range(count)]


faults = st.builds(
    Faults,
    lost=st.floats(0, 0.4),
    repeated=st.floats(0, 0.5),
    corrupted=st.floats(0, 0.2),
    jitter=st.sampled_from([0.0, 0.001, 0.03]),
)


@settings(max_examples=EXAMPLES)
@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(1, 9),
    faults,
    st.integers(1, 40),
    st.integers(0, 1 << 30),
)
def test_the_mean_has_the_bits_of_an_exact_sum(
    clients: int, size: int, values: int, fault: Faults, window: int, seed: int
) -> None:
    vectors = some_vectors(clients, size, seed)
    heads = heads_of(vectors)
    link = FakeLink(VectorPlan(3, size, values), vectors, heads, fault, seed=seed, window=window, stall=60.0)
    link.run()
    expected = exact_mean(vectors, heads).tobytes()
    assert not link.aggregator.lost
    assert {each.mean.tobytes() for each in link.vectors} == {expected}


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 5), st.integers(1, 300), st.integers(1, 9), faults, st.integers(0, 1 << 30))
def test_without_repair_each_part_is_divided_by_the_weights_that_came(
    clients: int, size: int, values: int, fault: Faults, seed: int
) -> None:
    vectors, plan = some_vectors(clients, size, seed), VectorPlan(3, size, values, repair=False)
    heads = heads_of(vectors)
    link = FakeLink(plan, vectors, heads, fault, seed=seed, stall=60.0)
    link.run()
    assert not link.aggregator.lost
    scale = scale_of(max(head.largest for head in heads), clients)
    for index in range(plan.blocks):
        part = slice(index * values, (index + 1) * values)
        came = np.flatnonzero(link.aggregator.arrivals.has(index)).tolist()
        parts = [vectors[each][part] for each in came]
        mean = exact_mean(parts, [heads[each] for each in came], scale) if came else parts
        for participant, own in zip(link.participants, link.vectors, strict=True):
            kept = vectors[participant.client][part] / np.float32(heads[participant.client].weight)
            arrived = participant.arrivals.has(index)[0]
            assert np.array_equal(own.mean[part], mean if arrived else kept)


def test_without_faults_nothing_is_sent_twice_and_nothing_is_lost() -> None:
    vectors, plan = some_vectors(3, 4000), VectorPlan(1, 4000, 10)
    link = FakeLink(plan, vectors, heads_of(vectors))
    link.run()
    assert link.sent == {"aggregator": 1200, 0: 400, 1: 400, 2: 400}
    assert all(each.arrivals.is_whole(0) for each in link.participants)
    assert not link.aggregator.repaired and not any(each.repaired for each in link.participants)


def test_what_is_sent_again_is_counted() -> None:
    vectors, plan = some_vectors(3, 4000), VectorPlan(1, 4000, 10)
    link = FakeLink(plan, vectors, heads_of(vectors), Faults(0.2))
    link.run()
    repaired = {"aggregator": link.aggregator.repaired} | {e.client: e.repaired for e in link.participants}
    assert min(repaired.values()) > 0
    assert link.sent == {name: (3 if name == "aggregator" else 1) * 400 + n for name, n in repaired.items()}


def test_a_client_that_leaves_with_the_mean_is_not_lost() -> None:
    vectors, lost = some_vectors(2, 10), dict[int, str]()
    for seed in range(200):
        link = FakeLink(
            VectorPlan(1, 10, 10), vectors, heads_of(vectors), Faults(0.2), seed=seed, leaving=True
        )
        link.run()
        lost |= link.aggregator.lost
    assert not lost


@pytest.mark.parametrize("sent", [0, 1, 37, 99, 100])
def test_a_client_that_dies_ends_the_round(sent: int) -> None:
    """It dies after so many of its 100 datagrams, the last time just before its END."""
    vectors, plan = some_vectors(3, 1000), VectorPlan(1, 1000, 10)
    link = FakeLink(plan, vectors, heads_of(vectors), Faults(lost=0.1), lives={1: sent}, stall=0.3)
    link.run()
    assert link.aggregator.lost == {1: "no datagram came for 0.3 s"}


def test_a_client_that_dies_with_the_mean_under_way_ends_the_round() -> None:
    vectors, plan = some_vectors(2, 1000), VectorPlan(1, 1000, 10)
    link = FakeLink(plan, vectors, heads_of(vectors), stall=0.3)
    while not link.aggregator.incoming[1].ended or not link.aggregator.incoming[0].ended:
        link.step()
    link.lives[1] = 0
    link.run()
    assert link.aggregator.lost == {1: "it does not confirm the mean"}


def test_a_late_client_ends_the_round_at_the_deadline() -> None:
    vectors, plan = some_vectors(2, 100_000), VectorPlan(1, 100_000, 10)
    link = FakeLink(plan, vectors, heads_of(vectors), deadline=0.01)
    link.run()
    assert set(link.aggregator.lost.values()) == {"its values have not come by the deadline"}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1e9])
def test_a_value_beyond_its_announced_bound_is_refused_by_name(wrong: float) -> None:
    vectors, plan = some_vectors(3, 500), VectorPlan(1, 500, 10)
    heads = heads_of(vectors)
    vectors[2][250] = wrong
    link = FakeLink(plan, vectors, heads)
    link.run()
    assert link.aggregator.lost == {2: "its values are beyond those it has announced"}


def test_a_copy_from_elsewhere_does_not_turn_the_mean_away() -> None:
    vectors, plan = some_vectors(1, 500), VectorPlan(1, 500, 10)
    heads = heads_of(vectors)
    link = FakeLink(plan, vectors, heads)
    word = next(each for each in link.participants[0].poll(link.now) if isinstance(each, SealedDatagram))
    link.put(0, HUB, word.content)
    while link.now < 1.01 and not link.aggregator.incoming[0].started:
        link.step()
    link.aggregator.receive(word.content, "elsewhere", link.now)
    link.run()
    assert link.vectors[0].mean.tobytes() == exact_mean(vectors, heads).tobytes()


words = st.tuples(
    st.integers(1, 7),
    *(2 * [st.one_of(st.integers(0, 130), st.sampled_from([1 << 31, (1 << 32) - 1]))]),
    st.one_of(st.binary(max_size=20), st.just(bytes(40)), st.just(b"\xff" * 64), st.just(b"\xff" * 400)),
)


@settings(max_examples=EXAMPLES)
@given(st.lists(st.tuples(st.booleans(), words), max_size=40), st.integers(0, 1 << 30))
def test_a_client_that_says_anything_is_alone_to_blame(said: list[tuple[bool, tuple]], seed: int) -> None:  # type: ignore[type-arg]
    """Its words are genuine, as it has a key, and nobody sees to it that they make sense."""
    vectors, plan = some_vectors(2, 1000), VectorPlan(1, 1000, 10)
    heads = heads_of(vectors)
    link = FakeLink(plan, vectors, heads, seed=seed, lives={1: 0}, stall=0.3)
    for waits, (kind, sequence, index, payload) in said:
        link.put(1, HUB, seal(heads[1].key, Datagram(kind, 1, 1, sequence, index, payload)))
        if waits and not link.finished:
            link.step()
    link.run()
    assert list(link.aggregator.lost) == [1] or link.participants[0].finished


def test_a_client_that_asks_for_ever_does_not_hold_the_aggregator() -> None:
    vectors, plan = some_vectors(2, 500), VectorPlan(1, 500, 10)
    heads = heads_of(vectors)
    link = FakeLink(plan, vectors, heads)

    def step_and_ask() -> None:
        link.step()
        for passed in range(50):
            asked = Datagram(DatagramKind.MISSING, 1, 1, passed, 0, b"\xff" * 8)
            link.aggregator.receive(seal(heads[1].key, asked), 1, link.now)

    while not link.aggregator.outgoing[0].done:
        step_and_ask()
    link.lives[1] = 0
    link.now += 9.9
    while not link.aggregator.finished:
        step_and_ask()
    assert list(link.aggregator.lost) == [1] and 10.9 < link.now < 12.0


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 6), st.integers(1, 50), st.floats(0, 0.3), st.integers(0, 1 << 30))
def test_no_more_is_on_the_way_than_the_receive_buffer_holds(
    clients: int, window: int, lost: float, seed: int
) -> None:
    vectors, plan = some_vectors(clients, 240), VectorPlan(1, 240, 3)
    heads = heads_of(vectors)
    link = FakeLink(plan, vectors, heads, Faults(lost=lost), seed=seed, window=window, stall=60.0)
    while not link.finished:
        link.step()
        streams = [each.outgoing for each in link.participants]
        ahead = [each.sequence - int(link.aggregator.arrivals.seen[row]) for row, each in enumerate(streams)]
        assert sum(each for each in ahead if each > 0) <= max(window, clients)


def test_a_head_of_another_plan_is_no_start() -> None:
    vectors = some_vectors(1, 100)
    heads = heads_of(vectors)
    link = FakeLink(VectorPlan(1, 100, 10), vectors, heads, stall=0.2)
    link.participants[0].plan = VectorPlan(1, 100, 11)
    link.run()
    assert (
        link.aggregator.lost == {0: "no datagram came for 0.2 s"}
        or link.aggregator.arrivals.counted()["length"]
    )


def test_a_round_has_clients() -> None:
    plan = VectorPlan(1, 100, 10)
    with pytest.raises(ValueError, match="not 0"):
        FakeLink(plan, [], list[ClientHead]())

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
from millpond.aggregate.udp.pacing import WIRE_OVERHEAD

from ...effort import scaled
from .fake_link import HUB, FakeLink, Faults, Vector, exact_mean, heads_of

EXAMPLES = scaled(quick=20, full=400)


def some_vectors(count: int, size: int, seed: int = 0) -> list[Vector]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(size) * 2.0 ** rng.integers(-9, 9)).astype(np.float32) for _ in range(count)]


def weights_of(count: int) -> list[float]:
    return [1.0 + client for client in range(count)]


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
def test_with_repair_the_mean_has_the_bits_of_an_exact_sum(
    clients: int, size: int, values: int, fault: Faults, window: int, seed: int
) -> None:
    vectors = some_vectors(clients, size, seed)
    heads = heads_of(vectors, weights_of(clients))
    link = FakeLink(VectorPlan(3, size, values), vectors, heads, fault, seed=seed, window=window, stall=60.0)
    link.run()
    expected = exact_mean(vectors, heads).tobytes()
    assert not link.aggregator.lost and not link.aggregator.unconfirmed
    assert {each.mean.tobytes() for each in link.vectors} == {expected}
    assert link.sums.mean(link.aggregator.arrivals.counts).tobytes() == expected


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 5), st.integers(1, 300), st.integers(1, 9), faults, st.integers(0, 1 << 30))
def test_without_repair_each_part_is_divided_by_the_weights_that_came(
    clients: int, size: int, values: int, fault: Faults, seed: int
) -> None:
    vectors, plan = some_vectors(clients, size, seed), VectorPlan(3, size, values, repair=False)
    heads = heads_of(vectors, weights_of(clients))
    link = FakeLink(plan, vectors, heads, fault, seed=seed, stall=60.0)
    link.run()
    scale = scale_of(max(head.largest for head in heads), clients)
    for index in range(plan.blocks):
        part = slice(index * values, (index + 1) * values)
        came = np.flatnonzero(link.aggregator.arrivals.has(index)).tolist()
        assert {(client, index) for client in came} <= link.taken
        mean = None
        if came:
            mean = exact_mean([vectors[each][part] for each in came], [heads[each] for each in came], scale)
        for participant, own in zip(link.participants, link.vectors, strict=True):
            kept = vectors[participant.client][part] / np.float32(heads[participant.client].weight)
            arrived = participant.arrivals.has(index)[0]
            assert not arrived or mean is not None
            expected = mean if arrived and mean is not None else kept
            assert own.mean[part].tobytes() == expected.tobytes()


def test_without_faults_nothing_is_sent_twice_and_nothing_is_lost() -> None:
    vectors, plan = some_vectors(3, 4000), VectorPlan(1, 4000, 10, repair=False)
    link = FakeLink(plan, vectors, heads_of(vectors, weights_of(3)))
    link.run()
    assert link.sent == {"aggregator": 1200, 0: 400, 1: 400, 2: 400}
    assert all(each.arrivals.is_whole(0) for each in link.participants)
    assert not link.aggregator.repaired and not any(each.repaired for each in link.participants)


def test_what_is_sent_again_is_counted() -> None:
    vectors, plan = some_vectors(3, 4000), VectorPlan(1, 4000, 10)
    link = FakeLink(plan, vectors, heads_of(vectors, weights_of(3)), Faults(0.2))
    link.run()
    repaired = {"aggregator": link.aggregator.repaired} | {e.client: e.repaired for e in link.participants}
    assert min(repaired.values()) > 0
    assert link.sent == {name: (3 if name == "aggregator" else 1) * 400 + n for name, n in repaired.items()}


@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize("sent", [0, 1, 37, 99, 100])
def test_a_client_that_dies_leaves_no_trace(repair: bool, sent: int) -> None:
    """It dies after so many of its 100 datagrams, the last time just before its END."""
    vectors, plan = some_vectors(3, 1000), VectorPlan(1, 1000, 10, repair=repair)
    vectors[1] *= 1e6  # with other bits if it had counted, or if the scale were still one for its values
    heads = heads_of(vectors, weights_of(3))
    faults = Faults(lost=0.1 if repair else 0.0)
    link = FakeLink(plan, vectors, heads, faults, lives={1: sent}, stall=0.3)
    link.run()
    assert list(link.aggregator.lost) == [1] and "no datagram came for 0.3 s" in link.aggregator.lost[1]
    expected = exact_mean([vectors[0], vectors[2]], [heads[0], heads[2]]).tobytes()
    assert [link.vectors[client].mean.tobytes() == expected for client in (0, 2)] == [True, True]
    assert link.aggregator.arrivals.revision == 1


def test_a_client_that_never_comes_costs_the_others_nothing() -> None:
    vectors, plan = some_vectors(3, 1000), VectorPlan(1, 1000, 10)
    vectors = [vectors[0], vectors[0] / 2, vectors[0] / 4, vectors[0] / 8]
    heads = heads_of(vectors, weights_of(4))  # three values of the largest size need the scale of four
    link = FakeLink(plan, vectors, heads, lives={3: 0}, stall=0.3)
    link.run()
    assert link.aggregator.arrivals.revision == 0 and link.sent[0] == 100
    assert link.vectors[2].mean.tobytes() == exact_mean(vectors[:3], heads[:3]).tobytes()


def test_many_clients_die_at_different_times() -> None:
    vectors, plan = some_vectors(6, 600), VectorPlan(1, 600, 5)
    heads = heads_of(vectors, weights_of(6))
    lives = {0: 11, 2: 119, 3: 150, 5: 200}  # the last two during the second and third beginning
    link = FakeLink(plan, vectors, heads, Faults(lost=0.05), lives=lives, stall=0.4)
    link.run()
    assert link.vectors[1].mean.tobytes() == link.vectors[4].mean.tobytes()
    left = [client for client in range(6) if client not in link.aggregator.lost]
    assert {0, 2} <= set(link.aggregator.lost) and {1, 4} <= set(left)
    expected = exact_mean([vectors[each] for each in left], [heads[each] for each in left])
    assert link.vectors[1].mean.tobytes() == expected.tobytes()


def test_a_client_that_dies_with_the_mean_under_way_counts() -> None:
    vectors, plan = some_vectors(2, 1000), VectorPlan(1, 1000, 10)
    heads = heads_of(vectors, weights_of(2))
    link = FakeLink(plan, vectors, heads, stall=0.3)
    while not link.aggregator.incoming[1].ended or not link.aggregator.incoming[0].ended:
        link.step()
    link.lives[1] = 0
    link.run()
    assert link.aggregator.unconfirmed <= {1} and not link.aggregator.lost
    assert link.vectors[0].mean.tobytes() == exact_mean(vectors, heads).tobytes()


def test_a_late_client_is_left_out_at_the_deadline() -> None:
    vectors, plan = some_vectors(2, 1000), VectorPlan(1, 1000, 10)
    heads = heads_of(vectors, weights_of(2))
    link = FakeLink(plan, vectors, heads, deadline=2.0)
    link.participants[1].outgoing.next = lambda most: link.participants[1].outgoing._order[:0]  # type: ignore[method-assign]
    link.run()
    assert link.aggregator.lost == {1: "its values have not come by the deadline"}
    assert link.vectors[0].mean.tobytes() == exact_mean(vectors[:1], heads[:1]).tobytes()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1e9])
def test_a_value_beyond_its_announced_bound_is_refused_by_name(wrong: float) -> None:
    vectors, plan = some_vectors(3, 500), VectorPlan(1, 500, 10)
    heads = heads_of(vectors, weights_of(3))
    vectors[2][250] = wrong
    link = FakeLink(plan, vectors, heads)
    link.run()
    assert link.aggregator.lost == {2: "its values are beyond those it has announced"}
    assert link.vectors[0].mean.tobytes() == exact_mean(vectors[:2], heads[:2]).tobytes()


def test_a_copy_from_elsewhere_does_not_turn_the_mean_away() -> None:
    vectors, plan = some_vectors(1, 500), VectorPlan(1, 500, 10)
    heads = heads_of(vectors, [1.0])
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
    st.integers(0, 2),
    *(2 * [st.one_of(st.integers(0, 130), st.sampled_from([1 << 31, (1 << 32) - 1]))]),
    st.one_of(st.binary(max_size=20), st.just(bytes(40)), st.just(b"\xff" * 64), st.just(b"\xff" * 400)),
)


@settings(max_examples=EXAMPLES)
@given(st.lists(st.tuples(st.booleans(), words), max_size=40), st.integers(0, 1 << 30))
def test_a_client_that_says_anything_harms_nobody_else(said: list[tuple[bool, tuple]], seed: int) -> None:  # type: ignore[type-arg]
    """Its words are genuine, as it has a key, and nobody sees to it that they make sense."""
    vectors, plan = some_vectors(2, 1000), VectorPlan(1, 1000, 10)
    heads = heads_of(vectors, weights_of(2))
    link = FakeLink(plan, vectors, heads, seed=seed, lives={1: 0}, stall=0.3)
    for waits, (kind, revision, sequence, index, payload) in said:
        link.put(1, HUB, seal(heads[1].key, Datagram(kind, revision, 1, 1, sequence, index, payload)))
        if waits and not link.finished:
            link.step()
    link.run()
    assert link.participants[0].finished and 0 not in link.aggregator.lost
    if 1 in link.aggregator.lost:
        assert link.vectors[0].mean.tobytes() == exact_mean(vectors[:1], heads[:1]).tobytes()


def test_a_client_that_asks_for_ever_does_not_hold_the_aggregator() -> None:
    vectors, plan = some_vectors(2, 500), VectorPlan(1, 500, 10)
    heads = heads_of(vectors, weights_of(2))
    link = FakeLink(plan, vectors, heads)

    def step_and_ask() -> None:
        link.step()
        for passed in range(50):
            asked = Datagram(DatagramKind.MISSING, 0, 1, 1, passed, 0, b"\xff" * 8)
            link.aggregator.receive(seal(heads[1].key, asked), 1, link.now)

    while not link.aggregator.outgoing[0].done:
        step_and_ask()
    link.lives[1] = 0
    link.now += 9.9
    while not link.aggregator.finished:
        step_and_ask()
    assert link.aggregator.unconfirmed == {1} and 10.9 < link.now < 12.0


def test_no_client_is_left() -> None:
    vectors, plan = some_vectors(2, 500), VectorPlan(1, 500, 10)
    heads = heads_of(vectors, weights_of(2))
    link = FakeLink(plan, vectors, heads, lives={0: 3, 1: 4}, stall=0.3)
    link.run()
    assert link.aggregator.present == [] and set(link.aggregator.lost) == {0, 1}


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 6), st.integers(1, 50), st.floats(0, 0.3), st.integers(0, 1 << 30))
def test_no_more_is_on_the_way_than_the_receive_buffer_holds(
    clients: int, window: int, lost: float, seed: int
) -> None:
    vectors, plan = some_vectors(clients, 240), VectorPlan(1, 240, 3)
    heads = heads_of(vectors, weights_of(clients))
    link = FakeLink(plan, vectors, heads, Faults(lost=lost), seed=seed, window=window, stall=60.0)
    while not link.finished:
        link.step()
        streams = [each.outgoing for each in link.participants]
        ahead = [each.sequence - int(link.aggregator.arrivals.seen[row]) for row, each in enumerate(streams)]
        assert sum(each for each in ahead if each > 0) <= max(window, clients)


def test_a_pace_is_kept() -> None:
    rate, size = 1e6, 100_000
    vectors, plan = some_vectors(2, size), VectorPlan(1, size, 100)
    link = FakeLink(plan, vectors, heads_of(vectors, weights_of(2)), rate=rate)
    link.run()
    wire = 2 * plan.blocks * (plan.datagram + WIRE_OVERHEAD)
    assert wire / rate * 0.8 <= link.now - 1.0 <= wire / rate * 1.6


def test_a_head_of_another_plan_is_no_start() -> None:
    vectors = some_vectors(1, 100)
    heads = heads_of(vectors, [1.0])
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

# SPDX-License-Identifier: Apache-2.0
"""Which answers an exchange waits for and which count; ten thousand clients by the same code."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.host.jobs.training.collection import Collection
from millpond.host.jobs.training.membership import Membership


def begun(*ranks: int, deadline: float = math.inf, late_counts: bool = True) -> Collection:
    made = Collection(late_counts=late_counts)
    made.begin(deadline)
    for rank in ranks:
        made.plan(rank)
        made.ask(rank)
    return made


def test_it_is_over_when_all_have_answered_or_are_lost() -> None:
    made = begun(0, 1, 2)
    assert made.answered(1) and not made.is_over(1e9)
    assert made.lost(0) and made.answered(2) and made.is_over(0.0)
    assert made.end() == [] and begun().is_over(0.0)


def test_at_the_deadline_it_is_over_as_soon_as_there_is_an_answer() -> None:
    made = begun(0, 1, deadline=10.0)
    assert not made.is_over(11.0)
    made.answered(0)
    assert not made.is_over(9.0) and made.is_over(10.0)
    assert made.end() == [1]
    made.begin(20.0)
    assert made.owing == [1] and made.answered(1)  # late, and it counts


def test_where_late_answers_do_not_count_they_are_worth_nothing() -> None:
    made = begun(0, 1, deadline=10.0, late_counts=False)
    assert made.is_over(10.0) and made.end() == [0, 1] and made.owing == []
    made.begin(20.0)
    made.plan(0)
    assert not made.is_over(11.0)  # it is waited for: then it can be asked
    assert not made.answered(0)
    made.ask(0)
    assert made.answered(0) and made.is_over(12.0)
    assert not made.lost(1)


def test_a_worker_beside_the_plan_is_waited_for_where_nobody_else_answers() -> None:
    made = begun(0, deadline=10.0)
    made.ask(1)
    made.answered(0)
    assert made.is_over(1.0)
    alone = Collection(late_counts=True)
    alone.begin(10.0)
    alone.ask(1)
    assert not alone.is_over(1.0)
    without_deadline = begun(0)
    without_deadline.ask(1)
    without_deadline.answered(0)
    assert not without_deadline.is_over(1.0)


class Fleet:
    """Clients of which one in ten is late in each round, and one in ten answers lost: faults as data."""

    def __init__(self, clients: int, late_counts: bool) -> None:
        self.members = Membership(clients, range(clients), 0.5)
        self.collection = Collection(late_counts=late_counts)
        self.chance = random.Random(3)
        self.counted = self.dropped = self.lost = 0
        self._events: list[tuple[float, int]] = []
        self._owes: set[int] = set()
        for rank in range(clients):
            self.members.join(rank)

    def round(self, start: float, deadline: float) -> set[int]:
        """Run a round from its begin to its end. Returns the ranks that count."""
        self.collection.begin(start + deadline)
        for rank in self.members.joined:
            self.collection.plan(rank)
            if rank not in self._owes:
                self._ask(rank, start, deadline)
        counts, now = set[int](), start
        while not self.collection.is_over(now):
            if not self._events or self._events[0][0] > start + deadline:
                now = start + deadline
                continue
            at, rank = heapq.heappop(self._events)
            now = max(at, start)
            self._owes.discard(rank)
            if self._answers(rank, now):
                counts.add(rank)
        self.collection.end()
        self.members.counted(counts)
        self.counted += len(counts)
        return counts

    def _ask(self, rank: int, start: float, deadline: float) -> None:
        self.collection.ask(rank)
        self._owes.add(rank)
        late = self.chance.random() < 0.1
        heapq.heappush(self._events, (start + (deadline + 1 if late else self.chance.uniform(1, 9)), rank))

    def _answers(self, rank: int, now: float) -> bool:
        if self.chance.random() < 0.1:
            self.collection.lost(rank)
            self.members.lose(rank, now, for_good=False)
            self.lost += 1
            return False
        counts = self.collection.answered(rank)
        self.dropped += not counts
        return counts


@pytest.mark.parametrize("late_counts", [True, False])
def test_ten_thousand_clients_of_which_some_are_lost_and_some_late(late_counts: bool) -> None:
    clients = 10_000
    fleet = Fleet(clients, late_counts)
    for number in range(3):
        counts = fleet.round(100.0 * number, 10.0)
        assert fleet.members.is_quorum(counts)
        for rank in set(range(clients)) - fleet.members.joined:
            fleet.members.join(rank)
    assert fleet.counted > 2.2 * clients and fleet.lost > 0.2 * clients
    assert (fleet.dropped > 0) is not late_counts


RANKS = range(4)
SOME = st.sets(st.sampled_from(RANKS))


@given(st.booleans(), st.lists(st.tuples(SOME, SOME, SOME), max_size=12))
def test_each_answer_counts_once_or_never(
    late_counts: bool, exchanges: list[tuple[set[int], set[int], set[int]]]
) -> None:
    """Against a model: in which exchange each worker that owes an answer was asked."""
    made, asked = Collection(late_counts=late_counts), dict[int, int]()
    for number, (planned, answering, losing) in enumerate(exchanges):
        made.begin(10.0)
        for rank in planned:
            made.plan(rank)
        for rank in sorted(planned - asked.keys()):
            made.ask(rank)
            asked[rank] = number
        found = 0
        for rank in sorted(answering & asked.keys()):
            counts = made.answered(rank)
            assert counts is (late_counts or asked.pop(rank) == number)
            asked.pop(rank, None)
            found += counts
        for rank in losing:
            assert made.lost(rank) is (rank in asked and (late_counts or asked[rank] == number))
            asked.pop(rank, None)
        counting = sorted(rank for rank, began in asked.items() if late_counts or began == number)
        assert made.owing == counting
        waits = bool((planned - losing) & asked.keys())
        assert made.is_over(0.0) is (not waits and (not asked or found > 0))
        assert made.is_over(10.0) is (found > 0 or not late_counts or not asked)
        assert made.end() == counting

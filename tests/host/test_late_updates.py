# SPDX-License-Identifier: Apache-2.0
"""Which answers of an exchange count, late updates and asynchronous rounds, against plain references."""

from __future__ import annotations

import itertools
import math
import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.aggregate.kernels import Vector
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost
from millpond.host.jobs.training.collection import Collection, LatePolicy
from millpond.host.jobs.training.exchange_engine import ExchangeEngine, ExchangeOutcome
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.shards import Shard, WholeShards
from millpond.host.workers.dispatcher import Dispatcher
from millpond.host.workers.worker import ModelState
from millpond.train.protocol import Ready, Update, Work

from .steps import Given, zero_state

SIZE, RATE = 5, 0.4
SAMPLES = (10, 30, 20)


class Follower:
    """Trains by one step towards its own optimum, once for each permit. Given faults are by update."""

    def __init__(self, rank: int) -> None:
        self.name, self.holds = f"w{rank}", False
        self.samples, self.optimum = SAMPLES[rank], np.float32(rank + 1) * np.arange(1, SIZE + 1, dtype="f4")
        self.permits: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.asked: list[Work] = []
        self.fetched = 0
        self._fault: Exception | None = None
        self._values, self._next = np.zeros(SIZE, np.float32), 0

    def prepare(self, _deadline: Deadline) -> Ready:
        return Ready((self.samples,))

    def train(self, request: Work, state: ModelState, _deadline: Deadline) -> Update:
        self.asked.append(request)
        began = state.values.copy()
        self._fault = self.permits.get(timeout=30)
        self._values = (RATE * (began - self.optimum) * self.samples).astype(np.float32)
        self.holds = False
        largest, norm = float(np.abs(self._values).max()), float(np.linalg.norm(self._values))
        told = {"loss": (1.0, float(self.samples))}
        return Update(request.exchange, self.samples, self.samples, largest, norm, 0.1, math.nan, 0, told)

    def fetch(self, _stop: int, _deadline: Deadline) -> None:
        self._next = 0

    def read(self, out: Vector, _deadline: Deadline) -> None:
        self.fetched += 1
        if self._fault:
            out[:] = 1e30  # what came before the loss must not stay in any sum
            raise self._fault
        out[:] = self._values[self._next : self._next + len(out)]
        self._next += len(out)

    def close(self) -> None:
        self.permits.put(None)


class Claimant(Follower):
    """Claims next to no weight for large values: its mean is beyond what counts."""

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        update = super().train(request, state, deadline)
        self._values[:] = 1000.0
        return replace(update, weight=1e-3, largest=1000.0, norm=float(np.linalg.norm(self._values)))


class Script:
    """An engine whose workers answer in a given order, one after the other."""

    def __init__(
        self,
        late: LatePolicy,
        order: Sequence[int],
        faults: dict[int, Exception],
        claimant: int | None = None,
    ) -> None:
        self.mean, shards = np.zeros(SIZE, np.float32), WholeShards(len(SAMPLES))
        self.roster = JobRoster(len(SAMPLES), range(len(SAMPLES)), 0.0)
        self.engine = ExchangeEngine(self.roster, self.mean, shards, self._release, late=late)
        shards.begin(1)
        self.workers = [Claimant(r) if r == claimant else Follower(r) for r in range(len(SAMPLES))]
        for rank, worker in enumerate(self.workers):
            assert not shards.add(rank, [Shard(worker.name, False, worker.samples)])
            self.roster.join(rank, Dispatcher(rank, worker, self.roster.events))
        self._made = list(self.roster.present.values())
        self._script = enumerate(order)
        self._faults, self._waiting_for = faults, (0, 0)
        self.state, self.rounds = zero_state(SIZE), 0

    def _release(self) -> None:
        """Let the next worker answer, as soon as the engine has dealt with the one before."""
        rank, asked = self._waiting_for
        worker = self.workers[rank]
        if len(worker.asked) + worker.fetched <= asked:
            return
        for number, following in itertools.islice(self._script, 1):
            worker = self.workers[following]
            self._waiting_for = following, len(worker.asked) + worker.fetched
            worker.permits.put(self._faults.get(number))

    def run(self) -> ExchangeOutcome:
        """Run a round and apply its mean; the state is a new one, as others are still at the old one."""
        self.rounds += 1
        policy = Given(*SAMPLES)
        outcome = self.engine.run(self.rounds, 7, self.state, policy, np.zeros(len(SAMPLES), np.int64))
        if outcome.samples:
            following = zero_state(SIZE)
            following.values[:] = self.state.values - self.mean
            self.state = following
        return outcome

    def close(self) -> None:
        for dispatcher in self._made:
            dispatcher.worker.close()
            dispatcher.end()


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    made: list[Script] = []
    yield made
    for script in made:
        script.close()


def fedbuff(order: Sequence[int], buffer: int, most: int | None = None) -> list[tuple[list[int], np.ndarray]]:
    """Return the ages of the updates of each round, and the state after it."""
    optima = [(rank + 1.0) * np.arange(1, SIZE + 1) for rank in range(len(SAMPLES))]
    state, version, rounds = np.zeros(SIZE), 1, []
    bases = [(version, state)] * len(SAMPLES)
    found: list[tuple[int, int, np.ndarray]] = []
    idle: list[int] = []
    for rank in order:
        began, base = bases[rank]
        age = version - began
        if most is None or age <= most:
            found.append((rank, age, RATE * (base - optima[rank])))
        bases[rank] = version, state
        if len(found) == buffer:
            weights = sum(SAMPLES[r] for r, _, _ in found)
            state = state - sum(SAMPLES[r] / math.sqrt(1 + a) * d for r, a, d in found) / weights
            rounds.append((sorted(a for _, a, _ in found), state))
            version, found, idle = version + 1, [], [rank]
        for free in idle:
            bases[free] = version, state
        idle = []
    return rounds


ORDER = (0, 0, 1, 0, 0, 2, 0, 1, 1, 2, 0, 0, 0, 0, 2)


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("buffer", [1, 2, 3])
def test_asynchronous_rounds_are_those_of_a_plain_reference(
    scripts: list[Script], buffer: int, most: int | None
) -> None:
    expected = fedbuff(ORDER, buffer, most)
    script = Script(LatePolicy(discounted=True, most=most, buffer=buffer), ORDER, {})
    scripts.append(script)
    for ages, state in expected:
        outcome = script.run()
        assert sorted(outcome.ages) == ages and not outcome.lost and not outcome.missing
        np.testing.assert_allclose(script.state.values, state, rtol=2e-6)
    if buffer > 1:
        seeds = [request.seed for request in script.workers[0].asked]
        assert len(set(seeds)) == len(seeds), "a device that answers twice must not train on the same order"
    assert max(max(ages) for ages, _ in expected) >= 1 or most == 1


def test_the_mean_of_a_buffer_has_the_same_bits_for_every_order(scripts: list[Script]) -> None:
    found = set()
    for order in itertools.permutations(range(3)):
        scripts.append(Script(LatePolicy(discounted=True, buffer=3), order, {}))
        scripts[-1].run()
        found.add(scripts[-1].mean.tobytes())
    assert len(found) == 1


def test_an_update_that_is_lost_in_the_middle_leaves_no_trace(scripts: list[Script]) -> None:
    order = (1, 2, 0, 0)
    whole = Script(LatePolicy(discounted=True, buffer=2), (2, 0), {})
    cut = Script(LatePolicy(discounted=True, buffer=2), order, {0: ConnectionLost("w1 was switched off")})
    scripts += [whole, cut]
    whole.run()
    outcome = cut.run()
    assert [loss.dispatcher.rank for loss in outcome.lost] == [1]
    assert outcome.counted == {2: 20, 0: 10} and 1 not in cut.roster.present
    assert cut.mean.tobytes() == whole.mean.tobytes()


def test_an_update_beyond_what_counts_is_refused_and_leaves_no_trace(scripts: list[Script]) -> None:
    whole = Script(LatePolicy(discounted=True, buffer=2), (2, 0), {})
    claimed = Script(LatePolicy(discounted=True, buffer=2), (1, 2, 0, 0), {}, claimant=1)
    scripts += [whole, claimed]
    whole.run()
    (loss,) = claimed.run().lost
    assert loss.dispatcher.rank == 1 and loss.for_good and "beyond 131072 per unit" in loss.reason
    assert claimed.mean.tobytes() == whole.mean.tobytes()


def test_a_buffer_that_cannot_be_filled_counts_nothing(scripts: list[Script]) -> None:
    gone = {number: ConnectionLost("gone") for number in (1, 2, 3)}
    script = Script(LatePolicy(buffer=3), (0, 0, 1, 2), gone)
    scripts.append(script)
    outcome = script.run()
    assert (outcome.samples, len(outcome.lost)) == (0, 3)


def test_an_exchange_with_a_buffer_waits_for_no_worker() -> None:
    made = Collection(late_counts=True, buffer=2)
    made.begin(math.inf)
    for rank in range(3):
        made.plan(rank)
        made.ask(rank)
    assert made.answered(0) and not made.is_over(1e9)
    made.ask(0)
    assert not made.answered(0, too_old=True) and not made.is_over(1e9)
    assert made.answered(2) and made.is_over(0.0)
    assert made.end() == [] and made.owing == [1]
    made.begin(math.inf)
    assert not made.is_over(1e9)
    assert made.lost(1) and made.is_over(0.0)


def test_a_carried_update_counts_less(scripts: list[Script]) -> None:
    late = LatePolicy(discounted=True)
    assert [round(late.weight(age), 3) for age in range(4)] == [1.0, 0.707, 0.577, 0.5]
    assert LatePolicy().weight(3) == 1.0
    script = Script(late, (), {})
    scripts.append(script)
    script.workers[0].permits.put(None)
    first = script.engine.run(1, 7, script.state, Given(*SAMPLES, deadline=0.05), np.zeros(3, np.int64))
    assert (first.counted, first.missing) == ({0: 10}, [1, 2])
    for worker in script.workers:
        worker.permits.put(None)
    second = script.engine.run(2, 7, script.state, Given(*SAMPLES), np.zeros(3, np.int64))
    assert second.counted == {0: 10, 1: 30, 2: 20} and second.ages == [0, 1, 1]
    expected = -RATE * np.arange(1, SIZE + 1) * (10 * 1 + 30 * 2 / math.sqrt(2) + 20 * 3 / math.sqrt(2)) / 60
    np.testing.assert_allclose(script.mean, expected, rtol=1e-6)


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

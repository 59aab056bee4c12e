# SPDX-License-Identifier: Apache-2.0
"""Exchanges with late, lost or wrong workers: each sample counts exactly once, and the mean is right."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from millpond.aggregate.exact import RefusedUpdate
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.host.jobs.training import exchange_engine
from millpond.host.jobs.training.collection import ALL_COUNT, LatePolicy
from millpond.host.workers.worker import ModelState
from millpond.train.protocol import Update, Work

from .steps import CountingWorker, Given, Team, zero_state

Make = Callable[..., Team]


@pytest.fixture
def make() -> Iterator[Make]:
    """Teams whose threads end with the test."""
    made: list[Team] = []

    def team(*private: int, public: int = 0, late: LatePolicy = ALL_COUNT) -> Team:
        made.append(Team(private, public, late=late))
        return made[-1]

    yield team
    for one in made:
        one.close()


def late_in_first_exchange(make: Make) -> tuple[Team, threading.Event]:
    """Two workers, of whom the second has not answered when the first step ends; its answer waits."""
    team = make(100, 100)
    held = team.workers[1].hold_at(1)
    outcome = team.run(Given(4, 10, deadline=0.05))
    assert outcome.counted == {0: 4}
    return team, held


def test_a_step_waits_for_all_and_its_mean_is_over_samples(make: Make) -> None:
    team = make(100, 100, 100)
    held = team.workers[1].hold_at(1)
    looked: list[list[int]] = []

    def on_wait() -> None:
        looked.append([dispatcher.rank for dispatcher in team.engine.outstanding()])
        if looked[-1] == [1]:
            held.set()

    team.on_wait = on_wait
    outcome = team.run(Given(4, 10, 2))
    assert looked[-1] == [1]
    assert outcome.counted == {0: 4, 1: 10, 2: 2}
    assert (outcome.samples, outcome.whole, outcome.late) == (16, 16, 0)
    assert (outcome.loss, outcome.count) == (32.0, 16.0)
    assert 0 < outcome.work <= outcome.seconds
    assert not outcome.lost


def test_how_far_an_exchange_is_follows_from_answers_and_the_workers_word(make: Make) -> None:
    team = make(100, 100)
    held, looked = team.workers[1].hold_at(1), set[float]()

    def on_wait() -> None:
        looked.add(team.engine.done(1))
        team.workers[1].percent = 50
        if max(looked) > 0.6:
            held.set()

    team.on_wait = on_wait
    assert team.engine.done(1) == 0.0
    team.run(Given(4, 12))
    assert max(looked) == 1 - 12 * 0.5 / 16 and team.engine.done(2) == 0.0


def test_workers_are_told_behind_which_exchange_a_host_may_resume(make: Make) -> None:
    team = make(10, 10)
    told = [(0, False), (0, True), (2, False)]
    for recorded, records in told:
        team.run(Given(4, 4), recorded=recorded, records=records)
    for worker in team.workers.values():
        assert [(work.recorded, work.records) for work in worker.asked] == told


def test_a_state_is_held_until_all_that_are_at_it_have_answered(make: Make) -> None:
    team, held = late_in_first_exchange(make)
    assert team.roster.states_in_use == {team.states[0]}
    assert team.run(Given(4, 10, deadline=0.05)).counted == {0: 4}
    assert team.roster.states_in_use == {team.states[0]}
    held.set()
    assert team.run(Given(4, 0)).late == 10
    assert team.roster.states_in_use == set()


def test_the_policy_is_told_which_part_of_the_epoch_is_left(make: Make) -> None:
    team, policy = make(20, 20), Given(5, 5)
    for _ in range(4):
        team.run(policy)
    assert policy.left == [0.75, 0.5, 0.25, 0.0]


def test_what_comes_late_counts_later_and_its_worker_begins_with_the_next_exchange(make: Make) -> None:
    team, held = late_in_first_exchange(make)
    policy = Given(4, 10)
    held.set()
    outcome = team.run(policy)
    assert outcome.counted == {0: 4, 1: 10}
    assert (outcome.late, outcome.whole) == (10, 14)  # of the first exchange, which was the larger one
    assert policy.shown == [{0: 4, 1: 10}]
    assert team.run(policy).counted == {0: 4, 1: 10}
    assert [request.exchange for request in team.workers[1].asked] == [1, 3]
    assert max(team.counted.values()) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_sums_that_are_not_finite_refuse_the_worker_for_good(make: Make, value: float) -> None:
    team = make(100, 100)
    team.workers[1].poison_at(1, value)
    outcome = team.run(Given(4, 10))
    (loss,) = outcome.lost
    assert loss.for_good and loss.reason.startswith("update refused: ") and "not finite" in loss.reason
    assert outcome.counted == {0: 4}
    assert sum(team.shards.left.values()) == 200 - 4


@pytest.mark.parametrize(
    ("error", "for_good"),
    [
        (RefusedUpdate("w1", "odd"), True),
        (Refused("w1", "data", "no samples"), True),
        (Refused("w1", "model", "ValueError"), True),
        (Refused("w1", "worker", "it hangs"), False),
        (ProtocolError("w1 answered another step than the one it was asked for"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_whether_a_lost_worker_may_come_back(make: Make, error: Exception, for_good: bool) -> None:
    team = make(100, 100)
    team.workers[1].fail_at(1, error)
    outcome = team.run(Given(4, 10))
    assert [loss.for_good for loss in outcome.lost] == [for_good]
    assert outcome.counted == {0: 4}


@pytest.mark.expected_log("w1: internal error")
def test_an_error_of_ours_is_logged_and_the_step_goes_on(make: Make) -> None:
    team = make(100, 100)
    team.workers[1].fail_at(1, ZeroDivisionError("of ours"))
    assert team.run(Given(4, 10)).lost[0].reason == "of ours"


def test_a_worker_that_sits_out_works_beside_the_plan_without_delay_for_others(make: Make) -> None:
    team = make(100, 100)
    held = team.workers[1].hold_at(1)
    for _ in range(2):
        outcome = team.run(Given(4, 0, deadline=600.0), rest=(0, 6))
        assert (outcome.counted, outcome.lost) == ({0: 4}, [])
    assert [request.samples for request in team.workers[1].asked] == [6]
    held.set()
    release_when_idle(team)
    outcome = team.run(Given(4, 0, deadline=600.0))
    assert outcome.counted == {0: 4, 1: 6}
    assert outcome.late == 6


def release_when_idle(team: Team) -> None:
    """The first worker's next answer waits until the second's is there: then both are of one step."""
    held = team.workers[0].hold_at(team.exchanges + 1)
    second = team.roster.present[1]

    def on_wait() -> None:
        if second.task is None:
            held.set()

    team.on_wait = on_wait


def test_when_nobody_else_has_anything_to_do_who_sits_out_is_waited_for(make: Make) -> None:
    team = make(2, 12)
    held = team.workers[1].hold_at(1)
    policy = Given(2, 0, deadline=600.0)
    assert team.run(policy, rest=(0, 6)).counted == {0: 2}
    team.on_wait = held.set
    assert team.run(policy, rest=(0, 6)).counted == {1: 6}
    assert team.run(policy, rest=(0, 6)).counted == {1: 6}
    assert team.run(policy, rest=(0, 6)).samples == 0
    assert team.once


def test_without_a_deadline_who_sits_out_is_waited_for_in_every_step(make: Make) -> None:
    """So that the same plan has the same bits."""
    team = make(100, 100)
    assert team.run(Given(4, 0), rest=(0, 6)).counted == {0: 4, 1: 6}


def test_what_looking_around_raises_ends_the_step(make: Make) -> None:
    team = make(100, 100)
    team.workers[1].hold_at(1)

    def stop() -> None:
        raise KeyboardInterrupt

    team.on_wait = stop
    with pytest.raises(KeyboardInterrupt):
        team.run(Given(4, 10))


@pytest.mark.parametrize("seed", range(4))
def test_exactly_once_whatever_happens(make: Make, seed: int) -> None:
    """Workers of changing speed under a deadline that many miss; one in ten tasks ends in a loss."""
    chance = random.Random(seed)
    team = make(40, 60, 20, public=150)

    def troubled(worker: CountingWorker) -> None:
        worker.seconds = lambda samples: chance.choice((0.0, 0.0, 0.001, 0.01, 0.03))
        for step in range(200):
            if chance.random() < 0.1:
                worker.fail_at(step, ConnectionLost("gone"))

    for worker in team.workers.values():
        troubled(worker)
    late = lost = 0
    while team.shards.left or team.engine.outstanding():
        policy = Given(*(chance.choice((0, 3, 6, 10)) for _ in range(3)), seconds=0.02, deadline=0.008)
        outcome = team.run(policy, rest=(2, 2, 2))
        late, lost = late + outcome.late, lost + len(outcome.lost)
        for loss in outcome.lost:
            troubled(team.join(loss.dispatcher.rank))
    assert late and lost
    assert team.once


def test_where_late_updates_do_not_count_they_are_dropped_and_their_samples_asked_again(make: Make) -> None:
    team = make(4, 10, late=LatePolicy(counts=False))
    held = team.workers[1].hold_at(1)
    outcome = team.run_until_late(Given(4, 10, deadline=600.0), 1)
    assert (outcome.counted, outcome.missing) == ({0: 4}, [1])
    assert sum(team.shards.left.values()) == 10 and not team.engine.outstanding()
    team.shards.begin(2)
    held.set()
    outcome = team.run(Given(4, 10, deadline=600.0))
    assert (outcome.counted, outcome.late, outcome.missing) == ({0: 4, 1: 10}, 0, [])
    assert [request.exchange for request in team.workers[1].asked] == [1, 2]
    assert team.counted == {place: 2 if place < 4 else 1 for place in range(14)}


def test_a_worker_that_is_lost_after_its_answer_was_dropped_gives_nothing_back(make: Make) -> None:
    team = make(4, 10, late=LatePolicy(counts=False))
    held = team.workers[1].hold_at(1)
    team.workers[1].fail_at(1, ConnectionLost("gone"))
    team.run_until_late(Given(4, 10, deadline=600.0), 1)
    team.shards.begin(2)
    held.set()
    outcome = team.run(Given(4, 10, deadline=600.0))
    assert [loss.dispatcher.rank for loss in outcome.lost] == [1] and outcome.counted == {0: 4}
    assert sum(team.shards.left.values()) == 10


def test_updates_that_are_not_enough_are_not_fetched_and_their_samples_given_back(make: Make) -> None:
    team = make(4, 10)
    team.workers[1].fail_at(1, ConnectionLost("gone"))
    outcome = team.run(Given(4, 10), enough=lambda ranks: len(ranks) == 2)
    assert (outcome.samples, len(outcome.lost)) == (0, 1)
    assert team.workers[0].reads == [] and sum(team.shards.left.values()) == 14
    team.join(1)
    assert team.run(Given(4, 10), enough=lambda ranks: len(ranks) == 2).counted == {0: 4, 1: 10}
    assert team.once


def test_a_worker_that_is_lost_while_its_update_is_fetched_leaves_no_trace(make: Make) -> None:
    team = make(4, 10, 6)
    team.workers[1].fail_reading_at(1, 0, ConnectionLost("gone"))
    outcome = team.run(Given(4, 10, 6))
    assert outcome.counted == {0: 4, 2: 6} and [loss.dispatcher.rank for loss in outcome.lost] == [1]
    assert set(team.counted) == {*range(4), *range(14, 20)}
    team.join(1)
    team.finish(Given(4, 10, 6))
    assert team.once


def test_a_score_is_of_all_that_idle_workers_hold_out(make: Make) -> None:
    team = make(100, 100, 100)
    team.workers[2].held = 30
    state = zero_state(team.size)
    sums, scored, lost = team.engine.score(7, state)
    assert (
        sorted(scored) == [0, 1, 2] and lost == [] and sums == {"accuracy": (25.0, 50.0), "loss": (4.5, 50.0)}
    )
    for worker in team.workers.values():
        (request,) = worker.asked
        assert (request.exchange, request.held_out, request.ranges) == (7, True, ())
    assert not any(dispatcher.task for dispatcher in team.roster.present.values())
    assert team.finish(Given(50, 50, 50)) and team.once


class Timely(CountingWorker):
    """A worker that is lost at the time limit of its task, as those on devices are."""

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        update = super().train(request, state, deadline)
        deadline.remaining()
        return update


def test_a_score_may_take_as_long_as_all_take(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: the workers of a fleet that takes more than an hour to score were lost, all of them."""
    monkeypatch.setattr(exchange_engine, "SCORE_SECONDS", 0.05)
    team = make(100, 100)
    for rank, dispatcher in team.roster.present.items():
        dispatcher.worker = worker = Timely(f"w{rank}", [range(100)], team.size)
        worker.seconds = lambda _samples: 0.2
    sums, scored, lost = team.engine.score(7, zero_state(team.size))
    assert (sorted(scored), lost, sums["loss"]) == ([0, 1], [], (3.0, 20.0))


def test_a_score_does_not_wait_for_one_that_takes_far_longer_than_the_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is not trusted: it could hold up its job by a score that never ends."""
    monkeypatch.setattr(exchange_engine, "SCORE_SECONDS", 0.1)
    team = make(100, 100)
    team.workers[1].seconds = lambda _samples: 60.0
    _, scored, (loss,) = team.engine.score(7, zero_state(team.size))
    assert scored == [0] and (loss.dispatcher.rank, loss.for_good) == (1, False)
    assert loss.reason.startswith("no score within ")


def test_a_score_goes_without_who_is_lost_or_late(make: Make) -> None:
    team, held = late_in_first_exchange(make)
    outstanding: list[list[int]] = []

    def on_wait() -> None:
        outstanding.append([dispatcher.rank for dispatcher in team.engine.outstanding()])
        held.set()

    team.on_wait = on_wait
    sums, _, lost = team.engine.score(2, zero_state(team.size))
    assert outstanding[0] == [0, 1] and lost == []
    assert sums["loss"] == (1.5, 10.0) and len(team.workers[1].asked) == 1
    assert team.run(Given(4, 0)).counted == {0: 4, 1: 10}  # the late update counts as ever

    team.workers[0].fail_at(9, ConnectionLost("gone"))
    sums, scored, (loss,) = team.engine.score(9, zero_state(team.size))
    assert (loss.dispatcher.worker.name, loss.reason, loss.for_good) == ("w0", "gone", False)
    assert scored == [1] and sums["loss"] == (1.5, 10.0) and set(team.roster.present) == {1}

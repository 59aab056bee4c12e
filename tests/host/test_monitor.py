# SPDX-License-Identifier: Apache-2.0
"""Histories of devices, courses of jobs, and the feed of both through restarts of the daemon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from millpond.host.api.daemon import DeviceInfo, Devices, JobInfo
from millpond.host.api.progress import JobProgress
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.monitor import fleet_history, job_view
from millpond.host.monitor.dashboard.charts import of_job
from millpond.host.monitor.feed import Feed
from millpond.host.monitor.fleet_history import FleetHistory
from millpond.host.monitor.fleet_snapshot import FleetSnapshot
from millpond.host.monitor.job_view import MOST_DETAILED, WHOLE, Axis, JobCourse, along
from millpond.host.records.data_costs import RECENT, DataCosts
from millpond.host.records.jobs import JobEvent, Round
from millpond.wire.control_messages import Load, Welcome

from .daemon_rig import Rig

CSD0 = DeviceInfo(
    "csd0",
    "emulated",
    "ready",
    "",
    "10.77.0.2",
    Welcome("csd0", "1", "boot", "x86_64", 4, 100, 1000),
    Load(0.5, 40, 300, 51.0, ()),
    (1000, 5000),
    7.5,
)
JOB = JobInfo(7, "digits", "running", "", "", 2, 10, "round", "accuracy", 0.6, 0.6, 2, 0.0, None)


def a_round(number: int, **values: object) -> Round:
    first = Round(
        number,
        {"host": {"loss": 2.0 / number, "accuracy": 0.3 * number}},
        2.0,
        40,
        {"csd0": 30, "host": 10},
        {},
        {"csd0": (100, 50)},
        joules={"csd0": 5.0},
        metrics={"loss": 1.5},
        by_worker={"csd0": {"loss": 1.0 / number}, "host": {}},
    )
    return replace(first, **values)  # type: ignore[arg-type]


def history(*answers: tuple[DeviceInfo, ...]) -> FleetHistory:
    """Fold answers that come once a second."""
    found = FleetHistory()
    for number, infos in enumerate(answers):
        found = found.after(100.0 + number, Devices(infos))
    return found


def test_rates_are_of_the_time_between_two_answers() -> None:
    found = history((CSD0,), (replace(CSD0, tunnel=(4000, 5500)),), (replace(CSD0, tunnel=(7, 9)),))
    first, second, anew = found.samples["csd0"]
    assert (first.at, first.cpu, first.memory, first.flash) == (100.0, 0.5, 40, 300)
    assert (first.temperature, first.watts, first.to, first.back) == (51.0, 7.5, None, None)
    assert (second.to, second.back) == (3000.0, 500.0)
    assert (anew.to, anew.back) == (None, None), "the counters of a new interface begin with zero"
    assert found.last("csd0") == anew and found.last("csd1") is None


def test_a_look_between_two_counts_of_a_tunnel_is_no_sample() -> None:
    found = history((CSD0,)).after(100.2, Devices((replace(CSD0, state="faulty"),)))
    assert [each.at for each in found.samples["csd0"]] == [100.0]
    assert found.events[-1].state == "faulty", "what has changed is told all the same"
    after = found.after(101.0, Devices((replace(CSD0, tunnel=(3000, 6000)),)))
    assert (after.samples["csd0"][-1].to, after.samples["csd0"][-1].back) == (2000.0, 1000.0)


def test_the_history_of_devices_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_history, "KEPT_SAMPLES", 3)
    monkeypatch.setattr(fleet_history, "KEPT_EVENTS", 2)
    states = ("ready", "absent", "ready", "faulty", "ready")
    found = history(*((replace(CSD0, state=state),) for state in states))
    assert [sample.at for sample in found.samples["csd0"]] == [102.0, 103.0, 104.0]
    assert [event.state for event in found.events] == ["faulty", "ready"]


def test_changes_of_devices_are_events() -> None:
    gone = replace(CSD0, state="absent", reason="no answer for 3 s", load=None)
    again = replace(CSD0, welcome=replace(CSD0.welcome, boot="other"))  # type: ignore[type-var]
    faulty = replace(again, state="faulty", reason="the flash is full")
    csd1 = replace(CSD0, name="csd1")
    found = history(
        (CSD0,),
        (gone,),
        (replace(gone, state="connecting"),),
        (CSD0,),
        (again, csd1),
        (faulty, csd1),
        (replace(faulty, reason="the flash fails"), csd1),
        (csd1,),
    )
    assert [(event.at, event.device, event.state, event.text) for event in found.events] == [
        (101.0, "csd0", "absent", "is lost: no answer for 3 s"),
        (103.0, "csd0", "ready", "is ready"),
        (104.0, "csd0", "ready", "its agent was started again"),
        (104.0, "csd1", "added", "is new in the fleet: ready"),
        (105.0, "csd0", "faulty", "is faulty: the flash is full"),
        (106.0, "csd0", "faulty", "is faulty: the flash fails"),
        (107.0, "csd0", "removed", "is no longer in the fleet"),
    ]
    assert set(found.samples) == {"csd1"}
    assert found.device("csd1") == csd1 and found.device("csd0") is None
    lost = history((CSD0,), (gone,)).samples["csd0"][1]
    assert (lost.cpu, lost.memory, lost.temperature) == (None, None, None)


def course(*rounds: Round, **info: object) -> JobCourse:
    now = replace(JOB, **info)  # type: ignore[arg-type]
    return JobCourse(now).after(JobProgress(now, rounds))


def test_a_course_has_the_curves_of_its_rounds() -> None:
    found = course(a_round(1), a_round(2, scores={"devices": {"accuracy": None}, "host": {"accuracy": 0.7}}))
    assert found.scores() == {
        ("host", "accuracy"): ((1.0, 0.3), (2.0, 0.7)),
        ("host", "loss"): ((1.0, 2.0),),
    }
    assert next(iter(found.scores())) == ("host", "accuracy"), "the deciding metric is the first"
    assert found.curve() == found.scores()["host", "accuracy"]
    assert found.curve(Axis.SECONDS) == ((2.0, 0.3), (4.0, 0.7))
    assert found.metrics(Axis.BYTES) == {"loss": ((150.0, 1.5), (300.0, 1.5))}
    assert found.by_worker("loss", Axis.JOULES) == {"csd0": ((5.0, 1.0), (10.0, 0.5))}
    assert along(found.rounds, Axis.ROUNDS) == (1.0, 2.0)
    assert course().curve() == ()


def test_a_course_keeps_the_costs_of_data_of_the_last_rounds_alone() -> None:
    costs = {"csd0": DataCosts(seconds=4.0, waited=1.0)}
    first = course(*(a_round(number, data=costs) for number in range(1, 9)))
    found = first.after(JobProgress(JOB, (a_round(9, data=costs),)))
    assert [bool(each.data) for each in found.rounds] == [False] * (9 - RECENT) + [True] * RECENT
    assert [each.round for each in found.rounds] == list(range(1, 10))
    assert course().after(JobProgress(JOB, ())).rounds == ()


def test_a_course_of_many_rounds_keeps_the_figures_by_worker_of_few() -> None:
    """Before: eight jobs of 1,000 rounds of 64 workers took half a gigabyte in the dashboard."""
    every = [a_round(number, joules={"csd0": 2.0}) for number in range(1, 1001)]
    whole, found = JobCourse(JOB, tuple(every)), course()
    for start in range(0, 1000, 10):
        found = found.after(JobProgress(JOB, tuple(every[start : start + 10])))
    assert (found.outcome, found.links) == (whole.outcome, whole.links)
    assert [found.curve(axis) for axis in Axis] == [whole.curve(axis) for axis in Axis]
    assert found.stride == 16 and [each.round for each in found.detailed] == [*range(16, 1000, 16), 1000]
    assert all(each.workers and each.by_worker for each in found.detailed)
    assert sum(bool(each.workers) for each in found.rounds) <= MOST_DETAILED + WHOLE
    at_once = course().after(JobProgress(JOB, tuple(every)))
    assert (at_once.rounds, at_once.stride, at_once.links) == (found.rounds, 16, whole.links)
    charts = of_job(found)
    assert charts["chart_shares"].across == "round (one of 16)" and charts["chart_scores"].across == "round"


def test_a_course_of_a_million_rounds_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a page, and the live view, kept all rounds of a job, and went through them at each update."""
    monkeypatch.setattr(job_view, "MOST_ROUNDS", 200)
    found = JobCourse(JOB)
    lost = JobEvent(1.0, "lost", "csd0", "no answer")
    for first in range(1, 5001, 100):
        new = (
            a_round(number, joules={"csd0": 1.0}, events=(lost,) if number == 7 else ())
            for number in range(first, first + 100)
        )
        found = found.after(JobProgress(JOB, tuple(new)))
        assert len(found.rounds) <= 2 * 200
    each, whole = a_round(1), [each.round for each in found.rounds[-job_view.WHOLE :]]
    assert whole == list(range(5000 - job_view.WHOLE + 1, 5001))
    assert len(found.detailed) <= job_view.MOST_DETAILED + 1
    assert all(part.workers for part in found.detailed)
    total = found.outcome
    to, back = map(sum, zip(*each.tunnel.values(), strict=True))
    assert total.seconds == pytest.approx(5000 * each.seconds) and total.joules == pytest.approx(5000)
    assert (total.to_devices, total.from_devices) == (5000 * to, 5000 * back)
    assert found.links == {name: (5000 * a, 5000 * b) for name, (a, b) in each.tunnel.items()}
    assert [event for _, event in found.events] == [lost]
    assert found.curve(Axis.JOULES)[-1] == (5000.0, pytest.approx(0.3 * 5000))


def test_a_figure_that_is_not_finite_has_no_point() -> None:
    """Before: the browser could not read the message with it, and the page stood still."""
    found = course(a_round(1), a_round(2, metrics={"loss": math.inf, "accuracy": math.nan}))
    assert [len(points) for points in found.metrics().values()] == [1] * len(a_round(1).metrics)


def test_a_course_has_the_parts_of_workers() -> None:
    waits = {"csd0": DataCosts(seconds=4.0, waited=1.0)}
    lost = a_round(2, workers={"host": 40}, missing={"csd0": "no answer for 3 s"}, data=waits)
    csd0, host = course(a_round(1), lost).workers
    assert (csd0.worker, csd0.samples, csd0.missing) == ("csd0", 0, "no answer for 3 s")
    assert (csd0.share, csd0.waits, host.share, host.missing) == (0.375, 0.25, 0.625, "")
    assert course().workers == ()
    assert course(a_round(1), lost).plan == ((1, {"csd0": 0.75, "host": 0.25}), (2, {"host": 1.0}))


def test_a_course_tells_bytes_events_and_the_remaining_time() -> None:
    event = JobEvent(5.0, "lost", "csd0", "no answer")
    found = course(a_round(1, events=(event,)), a_round(2, seconds=4.0))
    assert found.links == {"csd0": (200, 100)}
    assert found.events == ((1, event),)
    assert found.remaining == 8 * 3.0
    assert course().remaining is None and course(a_round(1), state="stopped").remaining is None
    assert (found.outcome.seconds, found.outcome.joules, found.outcome.best) == (6.0, 10.0, 0.6)


def test_rounds_that_are_computed_again_replace_the_old_ones() -> None:
    found = course(a_round(1), a_round(2), a_round(3))
    again = found.after(JobProgress(JOB, (a_round(2, seconds=9.0),), ("goes on",)))
    assert [(each.round, each.seconds) for each in again.rounds] == [(1, 2.0), (2, 9.0)]
    assert again.lines == ("goes on",)


@pytest.fixture
def feed(rig: Rig) -> Iterator[Feed]:
    with Feed(rig.directory, period=0.02) as found:
        yield found


def until(feed: Feed, condition: Callable[[FleetSnapshot], object], what: str) -> FleetSnapshot:
    """Wait for a snapshot."""
    now = feed.snapshot
    for _ in range(1000):
        if condition(now):
            return now
        now = feed.wait(now.version, 10.0)
    pytest.fail(f"{what}: not in version {now.version}")


def test_the_feed_shows_devices_and_jobs(rig: Rig, feed: Feed) -> None:
    first = until(feed, lambda now: now.at, "an answer")
    assert [info.state for info in first.fleet.devices] == ["ready"] * 3 and not first.jobs
    rig.submit()
    rig.set_device("csd1", state=DeviceState.FAULTY, reason="the flash is full")
    now = until(feed, lambda now: now.jobs and now.fleet.events, "a job and an event")
    assert [(event.device, event.text) for event in now.fleet.events] == [
        ("csd1", "is faulty: the flash is full")
    ]
    assert now.version > first.version and now.job(1) == now.jobs[0] and now.job(2) is None


def test_the_feed_follows_jobs_until_they_end_and_again_when_they_go_on(rig: Rig, feed: Feed) -> None:
    rig.submit(text="\n[federated]\nrounds = 3\n")
    rig.wait_for(1, "running")
    rig.add_round(1)
    feed.follow(1)
    feed.follow(99)
    until(feed, lambda now: 1 in now.followed and now.refused, "the course of job 1")
    assert feed.snapshot.refused == {99: "there is no job 99"}
    rig.add_round(1, round=2)
    rig.begun[1].context.changed()
    now = until(feed, lambda now: len(now.followed[1].rounds) == 2, "its second round")
    assert now.followed[1].info.round == 2
    rig.jobs.stop(1)
    until(feed, lambda now: now.followed[1].info.state == "stopped", "its end")
    rig.jobs.restart(1, None)
    until(feed, lambda now: now.followed[1].info.state == "running", "that it goes on")
    feed.unfollow(1)
    feed.unfollow(99)
    assert not feed.snapshot.followed and not feed.snapshot.refused


def test_the_feed_survives_a_restart_of_the_daemon(open_rig: Callable[[], Rig]) -> None:
    rig = open_rig()
    with Feed(rig.directory, period=0.02) as feed:
        rig.submit()
        rig.wait_for(1, "running")
        feed.follow(1)
        until(feed, lambda now: 1 in now.followed, "the course of job 1")
        rig.server.close()
        rig.jobs.close()
        assert feed._client
        feed._client.close()  # as the kernel does at the end of a daemon's process
        now = until(feed, lambda now: now.fault, "that the daemon does not answer")
        assert "no host daemon runs" in now.fault or "has ended" in now.fault
        assert now.jobs and now.fleet.devices, "the last answer stays"
        rig = open_rig()
        until(feed, lambda now: not now.fault, "that it answers again")
        rig.add_round(1)
        rig.begun[1].context.changed()
        until(feed, lambda now: now.followed[1].rounds, "a round of the next daemon")


def test_a_feed_without_a_daemon_says_so_and_ends(rig: Rig) -> None:
    rig.server.close()
    with Feed(rig.directory, period=0.02) as feed:
        assert "no host daemon runs" in until(feed, lambda now: now.fault, "the fault").fault

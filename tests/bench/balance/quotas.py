# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, cgroups): Stannis A for real: three equal processes, gzip beside one for a while."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.balance.cgroups import Cgroup, cgroup
from bench.balance.load import count_for, gzip
from bench.balance.noise import random_work
from bench.balance.processes import Processes, processes
from bench.experiment import Experiment, Findings, Line, Panel, Run
from bench.rows import Row, summary
from millpond.train.job.spec import SynchronousSpec

WORKERS, QUOTA = 3, 0.5
LOADS = (75, 50)
_FULL, _QUICK = (8, 10, 8, 20, 8.0), (2, 2, 2, 3, 1.0)
"""Steps before gzip, beside it until they are measured, measured, and without it again; seconds in which the
workers are measured.
"""
_LIMIT = "the limit: two whole workers and what gzip leaves of the third, by the speed without it just before"


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Images per second before gzip and beside it, of each step until it was measured, and the part of its
    group's time that the worker had.
    """

    usual: float
    beside: float
    course: tuple[float, ...]
    left: float


def measure(run: Run) -> Findings:
    """Rows ``a_real_75``, ``a_real_50``, ``a_real_back``."""
    before, tuning, measured, after_it, seconds = _QUICK if run.quick else _FULL
    shares: dict[int, list[float]] = defaultdict(list)
    back: list[float] = []
    left: dict[int, list[float]] = defaultdict(list)
    course: list[float] = []
    with limited_groups() as groups, ExitStack() as stack:
        team = stack.enter_context(workers(groups, SynchronousSpec(), seconds))
        run.say(f"measured: {team.planner.description}")
        for repeat in range(1 if run.quick else 5):
            for percent in LOADS:
                squeezed = squeeze(team, groups[-1], percent, before, tuning, measured)
                left[percent].append(squeezed.left)
                recovering = [speed(team, 1) for _ in range(after_it)]
                after = speed(team, measured)
                limit = squeezed.usual * (WORKERS - percent / 100) / WORKERS
                shares[percent].append(squeezed.beside / limit)
                back.append(after / squeezed.usual)
                if not repeat and percent == LOADS[0]:
                    course = [squeezed.usual, *squeezed.course, squeezed.beside, *recovering, after]
                told = f"{squeezed.usual:.1f} img/s, {squeezed.beside:.1f} beside gzip (limit {limit:.1f})"
                run.say(f"{percent} %: {told}, then {after:.1f}")
    rows = []
    for percent in LOADS:
        had = sum(left[percent]) / len(left[percent])
        what = (
            f"steps {tuning + 1} to {tuning + measured} beside gzip that takes {percent} % of one worker's "
            f"quota; of the time of its group the worker had {had:.0%}"
        )
        rows.append(_row(percent, what, shares[percent]))
    what = f"steps {after_it + 1} to {after_it + measured} after gzip has ended, over the speed before it"
    rows.append(_row("back", what, back))
    panel = Panel(
        "A for real: gzip takes 75 % of one of three",
        "step",
        "img/s",
        (Line("millpond", "millpond", list(range(len(course))), course),),
        event=(0.5, "gzip begins"),
    )
    return Findings(tuple(rows), (panel,))


@contextmanager
def limited_groups() -> Iterator[list[Cgroup]]:
    """A group with QUOTA of a processor for each worker. Raises Unmeasured."""
    with ExitStack() as stack:
        groups = [stack.enter_context(cgroup(f"millpond-bench-{rank}")) for rank in range(WORKERS)]
        for group in groups:
            group.limit(QUOTA)
        yield groups


@contextmanager
def workers(groups: Sequence[Cgroup], how: SynchronousSpec, seconds: float) -> Iterator[Processes]:
    """Three workers, one in each group, that have been measured for so many ``seconds``."""
    counts = {f"private{rank}": 2 for rank in range(WORKERS)} | {"public": 1000, "test": 10}
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as name:
        work = random_work(Path(name), counts, how, 1, measure_seconds=seconds, endless=True)
        with processes(work, Path(name)) as team:
            for group, worker in zip(groups, team.locals, strict=True):
                group.add(worker.pid)
            team.measure()
            yield team


def squeeze(team: Processes, group: Cgroup, percent: int, before: int, tuning: int, measured: int) -> Squeeze:
    """Run steps ``before`` gzip takes ``percent`` of the last worker's quota, and beside it: ``tuning`` ones,
    and those that are ``measured``.
    """
    usual = speed(team, before)
    with gzip(count_for(percent / 100), group) as load:
        began, spent = _cpu(team), load.cpu_seconds()
        course = tuple(speed(team, 1) for _ in range(tuning))
        beside = speed(team, measured)
        own = _cpu(team) - began
        return Squeeze(usual, beside, course, own / (own + load.cpu_seconds() - spent))


EXPERIMENT = Experiment(
    "a_real",
    "Stannis A with real processes, cgroup quotas and gzip",
    measure,
    figures=tuple(f"a_real_{name}" for name in (*LOADS, "back")),
)


def speed(team: Processes, steps: int) -> float:
    """Images per second over so many steps."""
    done = [team.step() for _ in range(steps)]
    return sum(outcome.samples for _, outcome in done) / sum(seconds for seconds, _ in done)


def _cpu(team: Processes) -> float:
    """Seconds of processor time that the worker beside gzip has had."""
    top = psutil.Process(team.locals[-1].pid)
    times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _row(name: int | str, what: str, values: list[float]) -> Row:
    note = (
        f"{WORKERS} real processes of one machine with {QUOTA} of a processor each (cgroup quota), one with "
        "gzip in its group; no tunnels"
    )
    return summary(f"a_real_{name}", what, values, "x", peer=_LIMIT, emulation=note)

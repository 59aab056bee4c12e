# SPDX-License-Identifier: Apache-2.0
"""Pure: the course of a job from its rounds: curves, shares, waiting, bytes, remaining time, events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from math import isfinite
from sys import intern
from typing import Final, TypeVar

from millpond.host.api.daemon import JobInfo
from millpond.host.api.progress import JobProgress
from millpond.host.records.comparison import ComparedJob, results
from millpond.host.records.data_costs import RECENT, shares, total
from millpond.host.records.jobs import ACTIVE, JobEvent, JobState, Round, seconds_left

KEPT_LINES: Final = 1000
WHOLE: Final = 64
"""The last rounds of a job that have all figures by worker."""
MOST_DETAILED: Final = 120
"""The most rounds at even distances that have figures by worker; a chart of many workers shows no more."""
MOST_ROUNDS: Final = 10_000
"""The rounds of a job to which twice as many are brought down: rounds that follow each other become one."""
MOST_EVENTS: Final = 64
"""Events of such rounds that are kept, the last ones."""
ALL: Final = ""
"""The name of all workers together, where the figures of each are left out."""
Points = tuple[tuple[float, float], ...]
K = TypeVar("K")
T = TypeVar("T")


class Axis(StrEnum):
    """The quantity over which a curve is drawn; all but rounds are sums since the job's first round."""

    ROUNDS = "rounds"
    SECONDS = "seconds"
    BYTES = "bytes"
    JOULES = "joules"


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """A worker's part in the last rounds: its ``samples`` in the last one, its ``share`` of the samples and
    the share of its time in which it ``waits`` for data in the last RECENT, the reason why it is ``missing``
    in the last, "" if it took part.
    """

    worker: str
    samples: int
    share: float
    waits: float
    missing: str = ""


@dataclass(frozen=True, slots=True)
class JobCourse:
    """A job as it is now and its finished ``rounds``, in order; ``lines`` are the last of its log, of
    ``line_count`` in all. What takes most of the memory is left out: the costs of data of rounds before the
    last RECENT, and the figures by worker of rounds before the last WHOLE but those whose number is divisible
    by ``stride``. Of such rounds ``tunnel`` and ``joules`` have the sums, by ALL, and ``before`` the bytes by
    device. Of a job with more than MOST_ROUNDS, one round may stand for several: it has the figures of the
    last of them, and the sums of their seconds, bytes, joules and samples.
    """

    info: JobInfo
    rounds: tuple[Round, ...] = ()
    lines: tuple[str, ...] = ()
    line_count: int = 0
    stride: int = 1
    before: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def after(self, progress: JobProgress) -> JobCourse:
        """Return the course with what the daemon has told since."""
        rounds = self.rounds
        if new := progress.rounds:
            while rounds and rounds[-1].round >= new[0].round:  # it has computed its last rounds again
                rounds = rounds[:-1]
            old = -len(new) - RECENT
            rounds = (*rounds, *map(_with_shared_names, new))
            stripped = [replace(each, data={}, energy={}) for each in rounds[old:-RECENT]]
            rounds = (*rounds[:old], *stripped, *rounds[-RECENT:])
            if len(rounds) > 2 * MOST_ROUNDS:
                rounds = _joined(rounds)
        lines = (*self.lines, *progress.lines)[-KEPT_LINES:]
        count = self.line_count + len(progress.lines)
        return JobCourse(progress.info, rounds, lines, count, self.stride, self.before)._thinned(len(new))

    def _thinned(self, new: int) -> JobCourse:
        """Return the course with as few figures by worker as it keeps, after so many ``new`` rounds."""
        stride = self.stride
        while self.rounds and self.rounds[-1].round > MOST_DETAILED * stride:
            stride *= 2
        end = max(0, len(self.rounds) - WHOLE)
        first = max(0, end - new) if stride == self.stride else 0
        left = [each for each in self.rounds[first:end] if each.round % stride and each.workers]
        if not left:
            return replace(self, stride=stride)
        thin = {each.round: _without_workers(each) for each in left}
        rounds = [thin.get(each.round, each) for each in self.rounds[first:end]]
        return replace(
            self,
            rounds=(*self.rounds[:first], *rounds, *self.rounds[end:]),
            stride=stride,
            before=_bytes_by_device(left, self.before),
        )

    @property
    def detailed(self) -> tuple[Round, ...]:
        """The rounds with figures by worker, at even distances, and the last one."""
        return tuple(each for each in self.rounds if each.round % self.stride == 0 or each is self.rounds[-1])

    @property
    def outcome(self) -> ComparedJob:
        """The results so far, as 'millpond jobs compare' has them: seconds, bytes, joules, scores."""
        return outcome(self.info, self.rounds)

    @property
    def remaining(self) -> float | None:
        """The seconds until the last round; None before the first one, and for a job that does not run."""
        if self.info.state != JobState.RUNNING:
            return None
        return seconds_left(self.info.rounds_left, self.rounds)

    @property
    def workers(self) -> tuple[WorkerPart, ...]:
        """The parts of the workers, by name; those that were missing in the last round are there, too."""
        if not self.rounds:
            return ()
        recent, last = self.rounds[-RECENT:], self.rounds[-1]
        samples = {name: sum(each.workers.get(name, 0) for each in recent) for name in _workers(recent)}
        every = sum(samples.values()) or 1
        waits = shares(total(each.data for each in recent))
        return tuple(
            WorkerPart(
                name,
                last.workers.get(name, 0),
                count / every,
                waits.get(name, 0.0),
                last.missing.get(name, ""),
            )
            for name, count in sorted(samples.items())
        )

    @property
    def links(self) -> dict[str, tuple[int, int]]:
        """The bytes (to, from) that crossed the tunnel of each device in all rounds."""
        found = _bytes_by_device(self.rounds, self.before)
        found.pop(ALL, None)
        return dict(sorted(found.items()))

    @property
    def events(self) -> tuple[tuple[int, JobEvent], ...]:
        """The events of all rounds, each with the number of the round in which it happened."""
        return tuple((each.round, event) for each in self.rounds for event in each.events)

    @property
    def plan(self) -> tuple[tuple[int, Mapping[str, float]], ...]:
        """The share of each worker in the samples of the detailed rounds: the plan over time."""
        return tuple((each.round, _fractions(each.workers)) for each in self.detailed)

    def scores(self, axis: Axis = Axis.ROUNDS) -> dict[tuple[str, str], Points]:
        """Return the curves of the scores by place ("host" or "devices") and name, the deciding metric first.
        A figure that was not finite has no point.
        """
        found = self._curves(
            axis,
            lambda each: (
                ((place, name), value)
                for place, figures in each.scores.items()
                for name, value in figures.items()
            ),
        )
        return dict(sorted(found.items(), key=lambda item: item[0][1] != self.info.metric))

    def metrics(self, axis: Axis = Axis.ROUNDS) -> dict[str, Points]:
        """Return the curves of the training metrics over all workers, by name."""
        return self._curves(axis, lambda each: each.metrics.items())

    def by_worker(self, metric: str, axis: Axis = Axis.ROUNDS) -> dict[str, Points]:
        """Return the curve of a training metric of each worker over detailed rounds, by the worker's name."""
        return self._curves(
            axis,
            lambda each: (
                (worker, figures[metric]) for worker, figures in each.by_worker.items() if metric in figures
            ),
        )

    def curve(self, axis: Axis = Axis.ROUNDS) -> Points:
        """Return the curve of the deciding metric; without one that of the first score; () without any."""
        return next(iter(self.scores(axis).values()), ())

    def _curves(
        self, axis: Axis, values: Callable[[Round], Iterable[tuple[K, float | None]]]
    ) -> dict[K, Points]:
        found: dict[K, list[tuple[float, float]]] = {}
        for place, each in zip(along(self.rounds, axis), self.rounds, strict=True):
            for key, value in values(each):
                if value is not None and isfinite(value):  # texts of JSON have no other
                    found.setdefault(key, []).append((place, value))
        return {key: tuple(points) for key, points in found.items()}


def _with_shared_names(found: Round) -> Round:
    """Return a round whose tables by worker have the same texts as keys as those of other rounds."""
    return replace(
        found,
        workers=_shared(found.workers),
        tunnel=_shared(found.tunnel),
        joules=_shared(found.joules),
        by_worker={intern(worker): _shared(figures) for worker, figures in found.by_worker.items()},
    )


def _joined(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
    """Return rounds of which those but the last WHOLE stand for so many each that few are left. The numbers
    that stay are divisible by a power of two, as are those of rounds with figures by worker.
    """
    old, step = rounds[:-WHOLE], 1
    while len(old) > MOST_ROUNDS:
        step *= 2
        kept, waiting = list[Round](), list[Round]()
        for each in old:
            waiting.append(each)
            if each.round % step == 0:
                kept.append(_sum(waiting))
                waiting = []
        old = (*kept, *waiting)
    return (*old, *rounds[-WHOLE:])


def _sum(rounds: Sequence[Round]) -> Round:
    """Return the last of some rounds with the sums of all."""
    if len(rounds) == 1:
        return rounds[0]
    joules: dict[str, float] = {}
    for each in rounds:
        for worker, used in each.joules.items():
            joules[worker] = joules.get(worker, 0.0) + used
    return replace(
        rounds[-1],
        seconds=sum(each.seconds for each in rounds),
        samples=sum(each.samples for each in rounds),
        tunnel=_bytes_by_device(rounds, {}),
        joules=joules,
        events=tuple(event for each in rounds for event in each.events)[-MOST_EVENTS:],
    )


def _without_workers(found: Round) -> Round:
    to, back = map(sum, zip(*found.tunnel.values(), strict=True)) if found.tunnel else (0, 0)
    return replace(
        found,
        workers={},
        missing={},
        by_worker={},
        tunnel={ALL: (to, back)} if found.tunnel else {},
        joules={ALL: sum(found.joules.values())} if found.joules else {},
    )


def _bytes_by_device(
    rounds: Iterable[Round], before: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    found = dict(before)
    for each in rounds:
        for device, (to, back) in each.tunnel.items():
            known = found.get(device, (0, 0))
            found[device] = (known[0] + to, known[1] + back)
    return found


def _shared(table: Mapping[str, T]) -> dict[str, T]:
    return {intern(key): value for key, value in table.items()}


def outcome(info: JobInfo, rounds: Sequence[Round]) -> ComparedJob:
    """Return the results of a job with these finished rounds."""
    metric, final, best = info.metric, info.score, info.best
    return results(info.id, info.name, info.state, rounds, metric=metric, final=final, best=best)


def along(rounds: Sequence[Round], axis: Axis) -> tuple[float, ...]:
    """Return the place of each round on an axis: its number, or the sum of its seconds, of the bytes that
    crossed all tunnels both ways, or of the known joules, and those of the rounds before it.
    """
    if axis is Axis.ROUNDS:
        return tuple(float(each.round) for each in rounds)
    cost: dict[Axis, Callable[[Round], float]] = {
        Axis.SECONDS: lambda each: each.seconds,
        Axis.BYTES: lambda each: sum(map(sum, each.tunnel.values())),
        Axis.JOULES: lambda each: sum(each.joules.values()),
    }
    return tuple(accumulate(map(cost[axis], rounds)))


def has_ended(info: JobInfo) -> bool:
    """Return whether a job neither runs nor waits in the queue."""
    return info.state not in ACTIVE


def _workers(rounds: Iterable[Round]) -> set[str]:
    return {name for each in rounds for name in (*each.workers, *each.missing)}


def _fractions(samples: Mapping[str, int]) -> dict[str, float]:
    every = sum(samples.values()) or 1
    return {name: count / every for name, count in samples.items()}

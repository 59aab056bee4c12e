# SPDX-License-Identifier: Apache-2.0
"""Pure: jobs and rounds as the store, the API and the terminal see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Final

from millpond.host.records.data_costs import DataCosts
from millpond.train.job.files import JobFile
from millpond.train.job.spec import Job


class JobState(StrEnum):
    """A job's life: queued, running, then one of the others until it is resumed."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


ACTIVE: frozenset[str] = frozenset({JobState.QUEUED, JobState.RUNNING})
"""The states of jobs that have not ended."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The choices that a job makes at its first start and keeps when it resumes, so that the bits stay the
    same.

    ``sources`` are the devices whose public data the host trains on.
    """

    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """The scores of a job so far: the last value of its deciding ``metric``, and the best one, None before
    the first.
    """

    metric: str = ""
    score: float | None = None
    best: float | None = None
    best_round: int = 0


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as stored; ``files`` are by name, times are Unix seconds. Its folder was removed when it was
    ``pruned``; ``owner`` is the uid of the user who has submitted it, None where that was not stored.
    ``standing`` is None where it has to be taken from the rounds.
    """

    id: int
    job: Job
    files: dict[str, JobFile]
    plan: JobPlan | None
    state: JobState
    error: str
    model: str
    created: float
    ended: float | None
    pruned: float | None = None
    owner: int | None = None
    standing: Standing | None = None


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended, at a time in Unix seconds, as the clock was then: of two jobs the one with the
    greater ``ended_as`` ended later. ``bytes`` are those of its folder.
    """

    id: int
    name: str
    ended: float
    ended_as: int
    bytes: int = 0
    pruned: bool = False


UNREADABLE = "unreadable"
"""The state, as commands see it, of a job whose row this version cannot read."""


@dataclass(frozen=True, slots=True)
class UnreadableJob:
    """A job whose row cannot be read, for a ``reason`` of one line. Its row stays as it is: another version
    of millpond may read it.
    """

    id: int
    name: str
    created: float
    ended: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A change in the course of a job ``at`` a time (Unix seconds): ``kind`` is plan, joined, lost or server
    (the parameter server was lost); ``worker`` is empty where it concerns all.
    """

    at: float
    kind: str
    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class Round:
    """A finished round: the ``scores`` of the average on held-out data by place, "host" or "devices" (None
    for a figure that is not finite; no place where it was not scored), and the workers that took part.

    ``samples`` were trained on in ``seconds``; ``workers`` maps names to samples, ``missing`` to reasons,
    ``tunnel`` devices to the bytes (to, from) that crossed their tunnels in this round. ``joules`` is the
    energy of the host and the devices, as far as known, and ``energy`` its sources. ``metrics`` are overall
    and ``by_worker`` each worker's, by name; ``events`` happened since the last round. ``data`` is what the
    data of each worker cost, as far as it was measured.
    """

    round: int
    scores: dict[str, dict[str, float | None]]
    seconds: float
    samples: int
    workers: dict[str, int]
    missing: dict[str, str]
    tunnel: dict[str, tuple[int, int]]
    joules: dict[str, float] = field(default_factory=dict)
    energy: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    by_worker: dict[str, dict[str, float]] = field(default_factory=dict)
    events: tuple[JobEvent, ...] = ()
    data: dict[str, DataCosts] = field(default_factory=dict)


HOST = "host"

_RECENT: Final = 8


def seconds_left(rounds_left: float, rounds: Sequence[Round]) -> float | None:
    """Return the seconds that so many rounds take, by the median of the last finished ``rounds``; None
    without any.
    """
    return rounds_left * median(each.seconds for each in rounds[-_RECENT:]) if rounds else None

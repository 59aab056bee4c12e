# SPDX-License-Identifier: Apache-2.0
"""Pure: the news of a job for trackers, and the method that a tracker has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from millpond.host.api.daemon import JobInfo
from millpond.host.api.progress import JobProgress
from millpond.host.records.data_costs import shares
from millpond.host.records.job_totals import JobTotals, figures_of
from millpond.host.records.jobs import ACTIVE, Round


@dataclass(frozen=True, slots=True)
class JobUpdate:
    """The news of a job: a ``round`` that it has finished, or without one its end.

    ``parameters`` are the keys of the job file, dotted (``train.learning_rate``). ``figures`` of a round are
    by name: ``host/accuracy``, ``devices/loss`` and ``train/loss`` as the job has them; of each worker
    ``worker/csd0/loss``, ``worker/csd0/samples``, ``worker/csd0/share`` of the round's samples and
    ``worker/csd0/waiting``, the share of its time in which it waited for data; ``round/seconds`` and
    ``round/samples``; and, from the first round on, ``total/seconds``, ``total/samples``,
    ``total/bytes_to_devices``, ``total/bytes_from_devices`` and ``total/joules``. ``model`` is the file of
    the trained model at the end of a job that is done; it is removed afterwards.
    """

    job: JobInfo
    parameters: dict[str, Any]
    round: Round | None = None
    figures: dict[str, float] = field(default_factory=dict)
    model: Path | None = None

    @property
    def name(self) -> str:
        """The name of the job's run: that of the job, and its number."""
        return f"{self.job.name}-{self.job.id}"


class Tracker(Protocol):
    """Anything that has this method, such as an object that writes to a tracker of your own."""

    def track(self, update: JobUpdate) -> None:
        """Take the news of a job: of each finished round in order, from the first on, then of its end. An
        exception ends the tracking, not the job.
        """


def updates(progresses: Iterable[JobProgress], parameters: dict[str, Any]) -> Iterator[JobUpdate]:
    """Yield the news of each round of a job that is followed, then that of its end, without a model."""
    totals = JobTotals()
    for progress in progresses:
        for result in progress.rounds:
            totals = totals.plus([result])
            yield JobUpdate(progress.info, parameters, result, _figures(result, totals))
        if progress.info.state not in ACTIVE and not progress.more:
            yield JobUpdate(progress.info, parameters)


def _figures(result: Round, totals: JobTotals) -> dict[str, float]:
    found = {f"{place}/{name}": value for (place, name), value in figures_of(result).items()}
    for worker, own in result.by_worker.items():
        found |= {f"worker/{worker}/{name}": value for name, value in own.items()}
    for worker, count in result.workers.items():
        found[f"worker/{worker}/samples"] = count
        found[f"worker/{worker}/share"] = count / max(result.samples, 1)
    found |= {f"worker/{worker}/waiting": share for worker, share in shares(result.data).items()}
    found |= {"round/seconds": result.seconds, "round/samples": result.samples}
    found |= {"total/seconds": totals.seconds, "total/samples": sum(totals.samples.values())}
    found["total/bytes_to_devices"] = sum(totals.to.values())
    found["total/bytes_from_devices"] = sum(totals.back.values())
    if totals.joules:
        found["total/joules"] = sum(totals.joules.values())
    return found

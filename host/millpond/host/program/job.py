# SPDX-License-Identifier: Apache-2.0
"""Edge: one job of a fleet, for programs and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.base.errors import LocalError, MillpondError, RemoteError
from millpond.host.api.daemon import JobInfo
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.monitor import job_plot
from millpond.host.monitor.job_view import JobCourse
from millpond.host.program.trackers.tracking import FINISH_SECONDS, Tracking, trackers_of
from millpond.host.program.trackers.update import Tracker
from millpond.host.records.jobs import Round

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunningJob:
    """A job of a fleet, running or ended. Iterate over it for its rounds, from the first on, as they come;
    whoever does, or waits, writes to the trackers of its job file, too.

    The host daemon runs it, whatever becomes of this program; ``Fleet.job`` finds it again by its ``number``.
    """

    def __init__(self, fleet: Path, number: int) -> None:
        self._fleet, self.number = fleet, number
        self._trackings: list[Tracking] = []
        self._follows = False

    def __repr__(self) -> str:
        """Tell the state now: ``<job 3 digits: running, 4 of 20 rounds, accuracy 0.9100>``."""
        try:
            info = self.info
        except MillpondError:
            return f"<job {self.number}>"
        score = "" if info.score is None else f", {info.metric} {info.score:.4f}"
        about = f": {info.error or info.reason}" if info.error or info.reason else ""
        rounds = f"{info.round} of {info.rounds} {info.unit}s"
        return f"<job {self.number} {info.name}: {info.state}, {rounds}{score}{about}>"

    @property
    def info(self) -> JobInfo:
        """The job now: state, round, score, model. Raises LocalError without a daemon."""
        with DaemonClient(self._fleet) as client:
            return client.job(self.number).info

    @property
    def rounds(self) -> list[Round]:
        """The rounds (or epochs) that are finished."""
        with DaemonClient(self._fleet) as client:
            return list(client.job(self.number).rounds)

    @property
    def scores(self) -> list[dict[str, dict[str, float | None]]]:
        """The figures of each finished round by place, "host" or "devices"; {} where it was not scored."""
        return [each.scores for each in self.rounds]

    @property
    def model(self) -> Path:
        """The trained model, in safetensors. Raises LocalError before the job is done."""
        info = self.info
        if info.pruned is not None:
            raise LocalError(f"job {self.number}: its files are pruned")
        if not info.model:
            raise LocalError(f"job {self.number} has no model yet: it is {info.state}")
        return Path(info.model)

    def __iter__(self) -> Iterator[Round]:
        self._begin_tracking()
        with DaemonClient(self._fleet) as client:
            for progress in client.watch(self.number):
                yield from progress.rounds
        self.finish_tracking()

    def track(self, *trackers: Tracker) -> None:
        """Have trackers follow the job, from its first round on, each in a thread: what they do delays
        nobody. One that raises an exception gets no more news, and a line on standard error tells it.
        """
        fleet, number = self._fleet, self.number
        self._trackings.append(Tracking(fleet, number, trackers, lambda line: print(line, file=sys.stderr)))

    def finish_tracking(self, seconds: float | None = FINISH_SECONDS) -> None:
        """Wait until the trackers of a job that has ended have its end, so many ``seconds`` at most."""
        for tracking in self._trackings:
            tracking.finish(seconds)

    def _begin_tracking(self) -> None:
        """Begin the trackers of the job file, when the job is followed for the first time."""
        if not self._follows:
            self._follows = True
            with DaemonClient(self._fleet) as client:
                spec = client.job(self.number).job.track
            if trackers := trackers_of(spec):
                self.track(*trackers)

    def wait(self) -> JobInfo:
        """Wait until the job has ended. Returns how. Raises RemoteError if it has failed or was stopped."""
        for _ in self:
            pass
        info = self.info
        if info.state != "done":
            raise RemoteError(f"job {self.number}: {info.error or info.state}")
        return info

    def stop(self) -> None:
        """Stop the job; its last checkpoint is kept. Raises Refused if it does not run."""
        with DaemonClient(self._fleet) as client:
            client.stop(self.number)

    def resume(self, rounds: int | None = None) -> None:
        """Resume the job if it was stopped or has failed, or go on with it up to ``rounds`` rounds if it is
        done. Raises Refused.
        """
        with DaemonClient(self._fleet) as client:
            client.resume(self.number, rounds)

    def log(self, lines: int = 20) -> list[str]:
        """Return the last lines of the job's log."""
        with DaemonClient(self._fleet) as client:
            return list(client.log(str(self.number), lines))

    def load_state_dict(self, *, best: bool = False) -> dict[str, Any]:
        """Return the trained model's tensors by name, as torch has them; those of the ``best`` score are
        there while the job runs, too. Raises LocalError, and Refused without a model.
        """
        from safetensors.torch import load  # imports torch

        with DaemonClient(self._fleet) as client, client.open_model(self.number, best=best) as file:
            return dict(load(file.read()))

    def save_model(self, path: str | Path, *, best: bool = False) -> Path:
        """Write the trained model, or that of the ``best`` score so far, to a file of your own, also where
        the daemon's folder is closed to you. Returns its path. Raises LocalError, Refused.
        """
        with DaemonClient(self._fleet) as client:
            client.save_model(self.number, found := Path(path).expanduser(), best=best)
        return found

    def plot(self) -> Figure:
        """Draw the scores over the rounds. Raises LocalError without matplotlib."""
        with DaemonClient(self._fleet) as client:
            found = client.job(self.number)
        drawn = job_plot.curves([JobCourse(found.info, found.rounds)])
        return job_plot.figure(drawn, found.info.name, found.info.unit)

# SPDX-License-Identifier: Apache-2.0
"""Edge: a fleet and its jobs for programs and notebooks: ``from millpond.host import Fleet``.

>>> fleet = Fleet("~/fleet")
>>> job = fleet.train("job.toml", set={"train.learning_rate": 0.1})
>>> for round in job:
...     print(round.round, round.scores)
>>> job.plot().savefig("curve.png")
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.base.errors import LocalError, RemoteError
from millpond.host.api.daemon import DeviceInfo, JobInfo
from millpond.host.client import DaemonClient
from millpond.host.fleet import directory
from millpond.host.model.jobs import Round
from millpond.train.job import file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunningJob:
    """A job of a fleet, running or ended. Iterate over it for its rounds, from the first on, as they come."""

    def __init__(self, fleet: Path, number: int) -> None:
        self._fleet, self.number = fleet, number

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
        if not (found := self.info.model):
            raise LocalError(f"job {self.number} has no model yet: it is {self.info.state}")
        return Path(found)

    def __iter__(self) -> Iterator[Round]:
        with DaemonClient(self._fleet) as client:
            for progress in client.watch(self.number):
                yield from progress.rounds

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

    def load_state_dict(self) -> dict[str, Any]:
        """Return the trained model's tensors by name, as torch has them. Raises LocalError."""
        from safetensors.torch import load_file  # imports torch

        return dict(load_file(self.model))

    def plot(self) -> Figure:
        """Draw the scores over the rounds. Raises LocalError without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise LocalError("a plot needs matplotlib: pip install matplotlib") from None
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes, rounds = figure.subplots(), self.rounds
        scored = [place for each in rounds for place in each.scores.items()]
        names = dict.fromkeys((place, name) for place, figures in scored for name in figures)
        for place, name in names:
            points = [(r.round, r.scores[place][name]) for r in rounds if name in r.scores.get(place, {})]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{name} ({place})")
        axes.set(xlabel=self.info.unit, title=self.info.name)
        if names:
            axes.legend()
        return figure


class FleetProgram:
    """The fleet in a directory, whose daemon runs; without one the directory that commands use."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.directory = directory.default_directory() if path is None else Path(path).expanduser()

    def train(self, job_file: str | Path, set: Mapping[str, Any] | None = None) -> RunningJob:  # noqa: A002
        """Submit the job of a file; ``set`` changes its keys, by dotted names, as ``millpond train --set``.
        Raises ConfigError, LocalError and RemoteError.
        """
        settings = [f"{key}={_toml(value)}" for key, value in (set or {}).items()]
        job, files = file.read(Path(job_file).expanduser(), settings)
        with DaemonClient(self.directory) as client:
            return RunningJob(self.directory, client.submit(job, files))

    def job(self, number: int) -> RunningJob:
        """Return a job by its number. Raises Refused for an unknown one."""
        with DaemonClient(self.directory) as client:
            client.job(number)
        return RunningJob(self.directory, number)

    def jobs(self) -> list[JobInfo]:
        """Return all jobs now, oldest first."""
        with DaemonClient(self.directory) as client:
            return list(client.jobs())

    def devices(self) -> list[DeviceInfo]:
        """Return the devices now."""
        with DaemonClient(self.directory) as client:
            return list(client.devices())


def _toml(value: Any) -> str:
    """Return a value as TOML has it: tables inline, all else as JSON."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)

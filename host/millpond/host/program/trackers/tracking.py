# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): trackers that follow a job, each with a connection and a thread of its own.

A tracker that is slow holds up its own connection alone, on which the daemon then waits with the next rounds:
nothing is kept in memory for it, and nothing is left out. One that hangs ends with this process.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from millpond.base.errors import LocalError, MillpondError
from millpond.base.text import printable
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.program.trackers.mlflow import MlflowTracker
from millpond.host.program.trackers.tensorboard import TensorBoardTracker
from millpond.host.program.trackers.update import JobUpdate, Tracker, updates
from millpond.host.records.comparison import parameters
from millpond.host.records.jobs import JobState
from millpond.train.job.host_spec import TrackSpec

FINISH_SECONDS: Final = 30.0
"""Time that trackers have from the end of the job, for what is left and the model."""


def trackers_of(spec: TrackSpec) -> list[Tracker]:
    """Return the trackers of a job's table ``[track]``. Raises LocalError for a package that is missing."""
    for package in ("tensorboard", "mlflow"):
        if getattr(spec, package) and find_spec(package) is None:
            raise LocalError(f"track: {package} is not installed: pip install 'millpond[{package}]'")
    found: list[Tracker] = [TensorBoardTracker(Path(spec.tensorboard))] if spec.tensorboard else []
    return [*found, MlflowTracker(spec.mlflow)] if spec.mlflow else found


class Tracking:
    """Trackers that follow a job of a fleet from its first round on; ``warn`` gets a line for one that has
    failed, ``tell`` one for each round that one has taken.
    """

    def __init__(
        self,
        fleet: Path,
        number: int,
        trackers: Sequence[Tracker],
        warn: Callable[[str], None],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._fleet, self._number, self._warn, self._tell_round = fleet, number, warn, tell
        self.failed = False
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=_name(each), daemon=True)
            for each in trackers
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, seconds: float | None = FINISH_SECONDS) -> None:
        """Wait until all trackers have taken the end of the job, so many ``seconds`` at most."""
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self._tell(f"{thread.name} has not taken all of job {self._number} in {seconds:g} s")

    def _tell(self, fault: str) -> None:
        self.failed = True
        self._warn(f"{fault}; 'millpond jobs track {self._number}' begins anew")

    def _run(self, tracker: Tracker) -> None:
        number = 0
        try:
            with DaemonClient(self._fleet) as client:
                for update in updates(client.watch(self._number), parameters(client.job(self._number).job)):
                    if update.round:
                        number = update.round.round
                        tracker.track(update)
                        self._tell_round(f"{_name(tracker)} has round {number} of {update.job.rounds}")
                    else:
                        self._end(client, tracker, update)
        except Exception as error:  # noqa: BLE001 - a tracker is code of others
            said = printable(" ".join(f"{type(error).__name__}: {error}".split()))
            self._tell(f"{_name(tracker)} failed behind round {number}: {said}")

    def _end(self, client: DaemonClient, tracker: Tracker, update: JobUpdate) -> None:
        with tempfile.TemporaryDirectory(prefix="millpond-model-") as folder:
            model = Path(folder) / "model.safetensors"
            if update.job.state == JobState.DONE and update.job.model:
                try:
                    client.save_model(self._number, model)
                except MillpondError:  # it was pruned meanwhile
                    model.unlink(missing_ok=True)
            ended = JobUpdate(update.job, update.parameters, model=model if model.exists() else None)
            tracker.track(ended)


def _name(tracker: Tracker) -> str:
    return type(tracker).__name__

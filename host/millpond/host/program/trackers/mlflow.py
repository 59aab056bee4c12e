# SPDX-License-Identifier: Apache-2.0
"""Edge (MLflow): a job as a run of an MLflow server, or of a folder of its files."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millpond.host.program.trackers.update import JobUpdate
from millpond.host.records.jobs import JobState

if TYPE_CHECKING:
    from mlflow import MlflowClient

_JOB, _ROUND = "millpond.job", "millpond.round"
_MOST_VALUE: Final = 500
_MOST_AT_ONCE: Final = 100
_STATUS: Final[dict[str, str]] = {JobState.DONE: "FINISHED", JobState.STOPPED: "KILLED"}


class MlflowTracker:
    """Writes a job as a run of the experiment that bears the job's name. A job that is tracked again goes on
    with its run, behind the last round that it has.
    """

    def __init__(self, uri: str) -> None:
        self._uri = Path(uri).as_uri() if uri.startswith("/") else uri
        self._client: MlflowClient | None = None
        self._run, self._last = "", 0

    def track(self, update: JobUpdate) -> None:
        """Log a round, or the end of the job."""
        client = self._client = self._client or self._begin(update)
        if result := update.round:
            if result.round > self._last:
                self._log(client, update, result.round)
            return
        if update.model:
            client.log_artifact(self._run, str(update.model))
        status = _STATUS.get(update.job.state, "FAILED")
        ended = update.job.ended or time.time()
        client.set_terminated(self._run, status, int(1000 * ended))

    def _begin(self, update: JobUpdate) -> MlflowClient:
        """Find the run of the job, or make a new one with its parameters."""
        if self._uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # or it takes databases alone
        from mlflow import MlflowClient  # takes seconds to load
        from mlflow.entities import Param

        client, job = MlflowClient(self._uri), update.job
        known = client.get_experiment_by_name(job.name)
        experiment = known.experiment_id if known else client.create_experiment(job.name)
        tag = f"{update.name} of {job.created:.3f}"  # another fleet may have a job of that number
        if found := client.search_runs([experiment], f"tags.`{_JOB}` = '{tag}'", max_results=1):
            self._run, self._last = found[0].info.run_id, int(found[0].data.tags.get(_ROUND, 0))
            return client
        run = client.create_run(experiment, int(1000 * job.created), {_JOB: tag}, run_name=update.name)
        self._run = run.info.run_id
        given = [Param(key, str(value)[:_MOST_VALUE]) for key, value in update.parameters.items()]
        for start in range(0, len(given), _MOST_AT_ONCE):
            client.log_batch(self._run, params=given[start : start + _MOST_AT_ONCE])
        return client

    def _log(self, client: MlflowClient, update: JobUpdate, number: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        figures = [Metric(_key(name), value, now, number) for name, value in update.figures.items()]
        for start in range(0, len(figures), _MOST_AT_ONCE):
            client.log_batch(self._run, figures[start : start + _MOST_AT_ONCE])
        client.set_tag(self._run, _ROUND, number)


def _key(name: str) -> str:
    """Return a name that MLflow takes: other characters become "_"."""
    return re.sub(r"[^\w\-. /]", "_", name)

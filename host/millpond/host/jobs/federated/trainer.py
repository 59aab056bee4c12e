# SPDX-License-Identifier: Apache-2.0
"""Edge: federated averaging (FedAvg) of one job, from its first round to its model, weighted by samples.

A round's state is saved, then the round is stored: a stored round is final. A job that is started again
resumes after its last stored round and comes to the same bits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.host.jobs.federated.collection import ReceiveBuffers, RoundCollection
from millpond.host.jobs.federated.worker_group import FederatedGroup
from millpond.host.jobs.worker_group import TRIES, JobContext, JobFailed, Traffic, since
from millpond.host.model.jobs import HOST, JobPlan, JobRow, Round
from millpond.train.protocol import Ready, Score
from millpond.train.reduce.exact import ExactSum, Vector
from millpond.train.state import checkpoint


class FederatedTrainer:
    """Runs one federated job in the calling thread."""

    def __init__(self, row: JobRow, context: JobContext, stop: threading.Event) -> None:
        self._row, self._job, self._context = row, row.job, context
        self.log = logging.Logger(f"millpond.host.job.{row.id}")  # not kept for ever, as getLogger's are
        self.log.parent = logging.getLogger("millpond.host")
        self._directory = context.fleet.job_directory(row.id)
        self._group = FederatedGroup(row, context, stop, self.log)

    def run(self) -> Path:
        """Train to the target or the last round. Returns the model's path. Raises JobFailed, JobStopped."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            ready, plan = self._group.prepare()
            done = self._context.store.rounds(self._row.id)
            state, number = self._first_state(done)
            buffers = ReceiveBuffers(ready.size)
            while not self._finished(done):
                number += 1
                state, result = self._round(number, state, ready, plan, buffers)
                self._save_round(state, ready, result)
                done.append(result)
            return self._save_model(state, ready, number)
        finally:
            self.abort()

    def abort(self) -> None:
        """End the job at once, from any thread."""
        self._group.stop()

    def _first_state(self, done: list[Round]) -> tuple[Vector, int]:
        if not done:
            return self._group.first_state(), 0
        number = done[-1].round
        self.log.info("resumed after round %d", number)
        return checkpoint.load(self._checkpoint(number)).vector, number

    def _finished(self, done: list[Round]) -> bool:
        federated = self._job.federated
        reached = federated.target is not None and bool(done) and done[-1].accuracy >= federated.target
        return reached or len(done) >= federated.rounds

    def _round(
        self, number: int, state: Vector, ready: Ready, plan: JobPlan, buffers: ReceiveBuffers
    ) -> tuple[Vector, Round]:
        """Run one round; a round without quorum is tried again. Raises JobFailed, JobStopped."""
        for _ in range(TRIES):
            self._group.await_quorum()
            started, before = time.monotonic(), self._context.traffic()
            total = ExactSum(ready.tensors, plan.most_samples)
            deadline = Deadline.after(self._job.federated.deadline)
            collection = RoundCollection(number, state, total, buffers, deadline)
            collection.run(self._group.trainers())
            self._group.check_stop()
            if self._has_quorum(collection):
                new = total.average()
                return new, self._result(collection, self._group.evaluate(new), started, before)
        raise JobFailed(f"round {number} found no quorum of {self._group.quorum} devices in {TRIES} tries")

    def _has_quorum(self, collection: RoundCollection) -> bool:
        for name, missing in collection.missing.items():
            self.log.warning("round %d goes on without %s: %s", collection.number, name, missing.reason)
        counted = sum(name != HOST for name in collection.counted)
        by_job = [missing.reason for missing in collection.missing.values() if missing.by_job]
        if not collection.counted and by_job:
            raise JobFailed(by_job[0])
        return counted >= self._group.quorum

    def _result(self, collection: RoundCollection, score: Score, started: float, before: Traffic) -> Round:
        workers = {name: trained.samples for name, trained in sorted(collection.counted.items())}
        traffic = since(before, self._context.traffic())
        missing = {name: missing.reason for name, missing in sorted(collection.missing.items())}
        seconds = time.monotonic() - started
        samples = sum(workers.values())
        loss = score.loss if math.isfinite(score.loss) else None
        return Round(collection.number, score.accuracy, loss, seconds, samples, workers, missing, traffic)

    def _save_round(self, state: Vector, ready: Ready, result: Round) -> None:
        saved = checkpoint.Checkpoint(state, ready.tensors, self._job.name, result.round)
        checkpoint.save(self._checkpoint(result.round), saved)
        self._context.store.add_round(self._row.id, result)
        self._checkpoint(result.round - 1).unlink(missing_ok=True)
        self.log.info(
            "round %d: accuracy %.4f, loss %.4f, %d samples, %.2f s",
            result.round,
            result.accuracy,
            math.nan if result.loss is None else result.loss,
            result.samples,
            result.seconds,
        )
        self._context.changed()

    def _save_model(self, state: Vector, ready: Ready, number: int) -> Path:
        path = self._directory / "model.safetensors"
        checkpoint.save(path, checkpoint.Checkpoint(state, ready.tensors, self._job.name, number))
        return path

    def _checkpoint(self, number: int) -> Path:
        return self._directory / f"round-{number:05d}.safetensors"

# SPDX-License-Identifier: Apache-2.0
"""Edge: synchronous training of one job, from its first step to its model.

Workers compute sums of gradients and the parameter server applies their mean, as one process with all samples
would. Checkpoints are written during training; a job that is started again resumes at the last checkpoint, in
the middle of an epoch.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import Refused, RemoteError
from millpond.host.jobs import energy as job_energy
from millpond.host.jobs.checkpoints import CheckpointWriter, SavedCheckpoint, TrainingProgress, newest
from millpond.host.jobs.energy import Readings
from millpond.host.jobs.synchronous.epoch import Epoch
from millpond.host.jobs.synchronous.membership import Membership
from millpond.host.jobs.synchronous.planner import Planner
from millpond.host.jobs.synchronous.shards import Shards
from millpond.host.jobs.synchronous.step_engine import StepEngine, StepOutcome
from millpond.host.jobs.synchronous.worker_group import SynchronousGroup
from millpond.host.jobs.worker_group import EVALUATE_SECONDS, TRIES, JobContext, JobFailed, Traffic, since
from millpond.host.model.energy import describe
from millpond.host.model.jobs import JobRow, Round
from millpond.host.store.profiles import write_curves
from millpond.train.protocol import Ready
from millpond.train.reduce.exact import within
from millpond.train.state import checkpoint
from millpond.train.sync.lr_scaling import LearningRate

REPORT_SECONDS, MOST_REPORT_SECONDS = 2.0, 60.0


class SynchronousTrainer:
    """Runs one synchronous job in the calling thread."""

    def __init__(self, row: JobRow, context: JobContext, stop: threading.Event) -> None:
        assert row.job.synchronous is not None
        self._row, self._job, self._context = row, row.job, context
        self._spec = row.job.synchronous
        self.log = logging.Logger(f"millpond.host.job.{row.id}")  # not kept for ever, as getLogger's are
        self.log.parent = logging.getLogger("millpond.host")
        self._directory = context.fleet.job_directory(row.id)
        self._stop = stop
        self._group = SynchronousGroup(row, context, stop, self.log)
        self._closers: list[Callable[[], None]] = []
        self._rate = LearningRate(self._spec.scaling, row.job.train.batch, self._spec.warmup)

    def run(self) -> Path:
        """Train to the target or the last epoch. Returns the model's path. Raises JobFailed, JobStopped."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, TRIES + 1):
            try:
                return self._attempt()
            except Refused as error:  # the user's model in the parameter server
                raise JobFailed(str(error)) from None
            except RemoteError as error:
                if attempt == TRIES:
                    raise JobFailed(f"the parameter server was lost {TRIES} times: {error}") from None
                self.log.warning("the parameter server was lost: %s", error)
                self._group = SynchronousGroup(self._row, self._context, self._stop, self.log)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self) -> Path:
        """Train from the last checkpoint, if there is one. Raises RemoteError if the parameter server is
        lost.
        """
        try:
            ready = self._group.prepare(resumed=bool(list(self._directory.glob("step-*"))))
            self._set_up(ready)
            saved = newest(self._directory, ready.tensors)
            self._begin() if saved is None else self._resume(saved)
            self._profile_workers()
            self._train()
            return self._save_model(ready)
        finally:
            self.abort()
            while self._closers:
                self._closers.pop()()

    def _profile_workers(self) -> None:
        curves = self._membership.begin(self._server.state)
        try:
            write_curves(self._directory, curves)
        except OSError as error:  # a full disk, most likely
            self.log.warning("the curves cannot be kept: %s", error.strerror)

    def abort(self) -> None:
        """End the job at once, from any thread."""
        self._group.stop()

    def _set_up(self, ready: Ready) -> None:
        workers, self._server = len(self._group.names), self._group.parameter_server()
        self._shards = Shards(self._job.seed, workers)
        self._planner = Planner(self._spec, self._group.names, self._shards.spread)
        self._engine = StepEngine(workers, self._server.mean, self._shards, self._check_while_waiting)
        self._membership = Membership(
            self._row, self._context, self._group, self._engine, self._shards, self._planner, self.log
        )
        self._closers.append(self._membership.close)
        self._checkpoints = CheckpointWriter(self._directory, self._job.name, ready.tensors, self.log)
        self._closers.append(self._checkpoints.wait)
        self._epoch = Epoch()
        self._step, self._state_checked = 0, True

    def _begin(self) -> None:
        self._server.begin(Deadline.after(EVALUATE_SECONDS))
        self._shards.begin(self._epoch.number)

    def _resume(self, saved: SavedCheckpoint) -> None:
        progress = saved.progress
        deadline = Deadline.after(EVALUATE_SECONDS)
        self._server.restore(saved.state, saved.momentum_tensors, saved.momentum, deadline)
        self._shards.resume(progress.place)
        self._step = progress.step
        counted = Counter(progress.counted)
        self._epoch = Epoch(progress.place.epoch, counted, loss=progress.loss, seconds=progress.seconds)
        self.log.info("resumed in epoch %d after step %d", self._epoch.number, self._step)

    def _train(self) -> None:
        done = [r for r in self._context.store.rounds(self._row.id) if r.round < self._epoch.number]
        self._saved_at, self._reported_at, self._plan_unreported = time.monotonic(), 0.0, False
        self._pause = REPORT_SECONDS
        while not self._finished(done):
            before, metered = self._context.traffic(), self._read_meters()
            while self._run_step():
                pass
            done.append(self._end_epoch(before, metered))
        self._checkpoints.wait()

    def _finished(self, done: list[Round]) -> bool:
        target = self._spec.target
        reached = target is not None and bool(done) and done[-1].accuracy >= target
        return reached or len(done) >= self._spec.epochs

    def _run_step(self) -> bool:
        """Run one step. Returns whether the epoch goes on."""
        self._group.check_stop()
        self._membership.admit_new(self._server.state)
        if not self._engine.dispatchers:
            self._wait_for_workers()
            return True
        number, seed = self._step + 1, self._job.seed
        outcome = self._engine.step(number, seed, self._server.state, self._planner, self._planner.background)
        for loss in outcome.lost:
            self._membership.lost(loss)
        self._epoch.count(outcome, self._group.names)
        if outcome.samples:
            self._apply(outcome)
        self._report_plan(outcome.new_plan)
        self._save_if_due()
        return bool(outcome.samples or outcome.lost or self._engine.outstanding())

    def _check_while_waiting(self) -> None:
        """Check the state and the workers while a step waits for answers."""
        self._check_state()
        self._membership.check_silence()

    def _check_state(self) -> None:
        """Check each state once. Raises JobFailed if the state is not finite."""
        if not self._state_checked and not within(self._server.state.values, math.inf):
            raise JobFailed("the model has diverged: its state is not finite; try a lower learning rate")
        self._state_checked = True

    def _wait_for_workers(self) -> None:
        self._check_state()
        if self._membership.profiling:
            self._membership.wait_for_profiles()
        else:
            self._group.wait_for_worker()

    def _report_plan(self, new: bool) -> None:
        """Log a new plan, at growing intervals: short steps make more plans than a log should hold."""
        self._plan_unreported = self._plan_unreported or new
        due = time.monotonic() - self._reported_at > self._pause
        if self._plan_unreported and due and self._planner.plan.batches.any():
            self.log.info("step %d: new plan: %s", self._step, self._planner.description)
            self._plan_unreported, self._reported_at = False, time.monotonic()
            self._pause = min(1.5 * self._pause, MOST_REPORT_SECONDS)  # a log of days must not fill the disk

    def _apply(self, outcome: StepOutcome) -> None:
        # All samples weigh the same: a step without late samples moves less, the step that counts them more.
        factor = self._rate.at(self._step, outcome.whole, 1.0) * outcome.samples / outcome.whole
        began, server = time.monotonic(), self._server
        self._engine.average()
        optimizer = server.apply(factor, self._engine.states_in_use, Deadline.after(EVALUATE_SECONDS))
        self._state_checked = False
        self._epoch.applied(outcome, time.monotonic() - began, optimizer)
        self._membership.reset_losses(outcome.counted)
        self._step += 1

    def _save_if_due(self) -> None:
        due = time.monotonic() - self._saved_at > self._spec.checkpoint
        if due and not self._checkpoints.busy:
            self._checkpoints.save(self._snapshot())
            self._saved_at = time.monotonic()

    def _snapshot(self) -> SavedCheckpoint:
        self._check_state()
        tensors, momentum = self._server.momentum(Deadline.after(EVALUATE_SECONDS))
        position = self._shards.epoch_position
        epoch = self._epoch
        progress = TrainingProgress(self._step, position, dict(epoch.counted), epoch.loss, epoch.seconds)
        return SavedCheckpoint(self._server.state.values.copy(), tensors, momentum, progress)

    def _read_meters(self) -> Readings | None:
        """Read the meters. Returns None in a resumed epoch: the energy of its beginning is unknown."""
        return None if self._epoch.samples else self._context.energy()

    def _end_epoch(self, before: Traffic, metered: Readings | None) -> Round:
        epoch = self._epoch
        if not epoch.samples:
            raise JobFailed(f"epoch {epoch.number}: no worker could compute anything")
        self._check_state()
        taken = job_energy.between(metered, self._context.energy(), epoch.counted)
        score = self._server.score(self._job.data.test, Deadline.after(EVALUATE_SECONDS))
        result = Round(
            epoch.number,
            score.accuracy,
            score.loss if math.isfinite(score.loss) else None,
            epoch.seconds,
            epoch.samples,
            dict(sorted(epoch.counted.items())),
            self._missing(),
            since(before, self._context.traffic()),
            taken.joules,
            taken.energy,
        )
        self._context.store.add_round(self._row.id, result)
        self._report(result)
        self._epoch = Epoch(epoch.number + 1)
        self._shards.begin(self._epoch.number)
        self._context.changed()
        return result

    def _missing(self) -> dict[str, str]:
        """Return the samples that no worker could read, as text by device."""
        missing: dict[str, list[str]] = {}
        for held, count in self._shards.left.items():
            missing.setdefault(held.source, []).append(f"{count} {held.name} were left")
        return {source: ", ".join(texts) for source, texts in missing.items()}

    def _report(self, result: Round) -> None:
        energy = describe(result)
        text = f"{self._epoch.summary()}{f'; {energy}' if energy else ''}"
        self.log.info("epoch %d: accuracy %.4f, %s", result.round, result.accuracy, text)
        for text in result.missing.values():
            self.log.warning("epoch %d: %s", result.round, text)

    def _save_model(self, ready: Ready) -> Path:
        path, state = self._directory / "model.safetensors", self._server.state.values
        model = checkpoint.Checkpoint(state, ready.tensors, self._job.name, self._epoch.number - 1)
        checkpoint.save(path, model)
        self._checkpoints.clear()
        return path

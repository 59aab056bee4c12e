"""Edge: one synchronous job from its first step to its model.

Workers compute sums of gradients, the keeper applies their mean, as one process with all samples would. Where
the job stands is saved now and then while it goes on; a job that is started again goes on from there, in the
middle of an epoch.
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
from millpond.host.model.energy import described
from millpond.host.model.jobs import JobRow, Round
from millpond.host.store.profiles import write_curves
from millpond.train.protocol import Ready
from millpond.train.reduce.exact import within
from millpond.train.state import checkpoint
from millpond.train.sync.lr_scaling import LearningRate

SAY_SECONDS, MOST_SAY_SECONDS = 2.0, 60.0


class SynchronousTrainer:
    """Runs one job in the calling thread."""

    def __init__(self, row: JobRow, around: JobContext, stop: threading.Event) -> None:
        assert row.job.synchronous is not None
        self._row, self._job, self._around = row, row.job, around
        self._how = row.job.synchronous
        self.log = logging.Logger(f"millpond.host.job.{row.id}")  # not kept for ever, as getLogger's are
        self.log.parent = logging.getLogger("millpond.host")
        self._directory = around.fleet.job_directory(row.id)
        self._stop = stop
        self._crew = SynchronousGroup(row, around, stop, self.log)
        self._closers: list[Callable[[], None]] = []
        self._rate = LearningRate(self._how.scaling, row.job.train.batch, self._how.warmup)

    def run(self) -> Path:
        """Train until the target or the last epoch. Returns the model's path. Raises JobFailed, Stopped."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, TRIES + 1):
            try:
                return self._attempt()
            except Refused as error:  # the user's model in the keeper
                raise JobFailed(str(error)) from None
            except RemoteError as error:
                if attempt == TRIES:
                    raise JobFailed(f"the keeper was lost {TRIES} times: {error}") from None
                self.log.warning("the keeper of the model was lost: %s", error)
                self._crew = SynchronousGroup(self._row, self._around, self._stop, self.log)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self) -> Path:
        """From the last checkpoint, if there is one. Raises RemoteError if the keeper is lost."""
        try:
            ready = self._crew.prepare(resumed=bool(list(self._directory.glob("step-*"))))
            self._set_up(ready)
            saved = newest(self._directory, ready.tensors)
            self._begin() if saved is None else self._resume(saved)
            self._measure()
            self._train()
            return self._save_model(ready)
        finally:
            self.abort()
            while self._closers:
                self._closers.pop()()

    def _measure(self) -> None:
        curves = self._attendance.begin(self._keeper.state)
        try:
            write_curves(self._directory, curves)
        except OSError as error:  # a full disk, most likely
            self.log.warning("the curves cannot be kept: %s", error.strerror)

    def abort(self) -> None:
        """End the job at once, from any thread."""
        self._crew.stop()

    def _set_up(self, ready: Ready) -> None:
        workers, self._keeper = len(self._crew.names), self._crew.keeper()
        self._holdings = Shards(self._job.seed, workers)
        self._pacing = Planner(self._how, self._crew.names, self._holdings.spread)
        self._stepping = StepEngine(workers, self._keeper.mean, self._holdings, self._look_around)
        self._attendance = Membership(
            self._row, self._around, self._crew, self._stepping, self._holdings, self._pacing, self.log
        )
        self._closers.append(self._attendance.close)
        self._saver = CheckpointWriter(self._directory, self._job.name, ready.tensors, self.log)
        self._closers.append(self._saver.wait)
        self._epoch = Epoch()
        self._step, self._looked = 0, True

    def _begin(self) -> None:
        self._keeper.begin(Deadline.after(EVALUATE_SECONDS))
        self._holdings.begin(self._epoch.number)

    def _resume(self, saved: SavedCheckpoint) -> None:
        progress = saved.progress
        deadline = Deadline.after(EVALUATE_SECONDS)
        self._keeper.restore(saved.state, saved.momentum_tensors, saved.momentum, deadline)
        self._holdings.resume(progress.place)
        self._step = progress.step
        counted = Counter(progress.counted)
        self._epoch = Epoch(progress.place.epoch, counted, loss=progress.loss, seconds=progress.seconds)
        self.log.info("resumed in epoch %d after step %d", self._epoch.number, self._step)

    def _train(self) -> None:
        done = [r for r in self._around.record.rounds(self._row.id) if r.round < self._epoch.number]
        self._saved_at, self._said_at, self._unsaid = time.monotonic(), 0.0, False
        self._pause = SAY_SECONDS
        while not self._finished(done):
            before, metered = self._around.traffic(), self._meters()
            while self._one_step():
                pass
            done.append(self._end_epoch(before, metered))
        self._saver.wait()

    def _finished(self, done: list[Round]) -> bool:
        target = self._how.target
        reached = target is not None and bool(done) and done[-1].accuracy >= target
        return reached or len(done) >= self._how.epochs

    def _one_step(self) -> bool:
        """Whether the epoch goes on."""
        self._crew.check_stop()
        self._attendance.update(self._keeper.state)
        if not self._stepping.links:
            self._wait_for_links()
            return True
        number, seed = self._step + 1, self._job.seed
        outcome = self._stepping.step(number, seed, self._keeper.state, self._pacing, self._pacing.rest)
        for loss in outcome.lost:
            self._attendance.lost(loss)
        self._epoch.count(outcome, self._crew.names)
        if outcome.samples:
            self._apply(outcome)
        self._say_plan(outcome.new_plan)
        self._save_now_and_then()
        return bool(outcome.samples or outcome.lost or self._stepping.at_work())

    def _look_around(self) -> None:
        """While a step waits for its workers."""
        self._look_at_state()
        self._attendance.look_around()

    def _look_at_state(self) -> None:
        """Once at each. Raises JobFailed if it is no good."""
        if not self._looked and not within(self._keeper.state.values, math.inf):
            raise JobFailed("the model has diverged: its state is not finite; try a lower learning rate")
        self._looked = True

    def _wait_for_links(self) -> None:
        self._look_at_state()
        if self._attendance.measures:
            self._attendance.wait_for_measures()
        else:
            self._crew.wait_for_anyone()

    def _say_plan(self, new: bool) -> None:
        """Where steps are short, plans follow each other faster than anybody reads."""
        self._unsaid = self._unsaid or new
        due = time.monotonic() - self._said_at > self._pause
        if self._unsaid and due and self._pacing.plan.batches.any():
            self.log.info("step %d: new plan: %s", self._step, self._pacing.described)
            self._unsaid, self._said_at = False, time.monotonic()
            self._pause = min(1.5 * self._pause, MOST_SAY_SECONDS)  # a log of days must not fill the disk

    def _apply(self, outcome: StepOutcome) -> None:
        # All samples weigh alike: a step that some are late for is as much smaller as a later one is larger.
        factor = self._rate.at(self._step, outcome.whole, 1.0) * outcome.samples / outcome.whole
        began, keeper = time.monotonic(), self._keeper
        self._stepping.average()
        optimizer = keeper.apply(factor, self._stepping.held, Deadline.after(EVALUATE_SECONDS))
        self._looked = False
        self._epoch.applied(outcome, time.monotonic() - began, optimizer)
        self._attendance.did(outcome.counted)
        self._step += 1

    def _save_now_and_then(self) -> None:
        due = time.monotonic() - self._saved_at > self._how.checkpoint
        if due and not self._saver.busy:
            self._saver.save(self._snapshot())
            self._saved_at = time.monotonic()

    def _snapshot(self) -> SavedCheckpoint:
        self._look_at_state()
        tensors, momentum = self._keeper.momentum(Deadline.after(EVALUATE_SECONDS))
        place = self._holdings.place
        epoch = self._epoch
        progress = TrainingProgress(self._step, place, dict(epoch.counted), epoch.loss, epoch.seconds)
        return SavedCheckpoint(self._keeper.state.values.copy(), tensors, momentum, progress)

    def _meters(self) -> Readings | None:
        """None where an epoch was resumed: nobody knows what its beginning took."""
        return None if self._epoch.samples else self._around.energy()

    def _end_epoch(self, before: Traffic, metered: Readings | None) -> Round:
        epoch = self._epoch
        if not epoch.samples:
            raise JobFailed(f"epoch {epoch.number}: no worker could compute anything")
        self._look_at_state()
        taken = job_energy.between(metered, self._around.energy(), epoch.counted)
        score = self._keeper.score(self._job.data.test, Deadline.after(EVALUATE_SECONDS))
        result = Round(
            epoch.number,
            score.accuracy,
            score.loss if math.isfinite(score.loss) else None,
            epoch.seconds,
            epoch.samples,
            dict(sorted(epoch.counted.items())),
            self._missing(),
            since(before, self._around.traffic()),
            taken.joules,
            taken.energy,
        )
        self._around.record.add_round(self._row.id, result)
        self._report(result)
        self._epoch = Epoch(epoch.number + 1)
        self._holdings.begin(self._epoch.number)
        self._around.changed()
        return result

    def _missing(self) -> dict[str, str]:
        """By device, which of its samples nobody could take."""
        missing: dict[str, list[str]] = {}
        for held, count in self._holdings.left.items():
            missing.setdefault(held.source, []).append(f"{count} {held.name} were left")
        return {source: ", ".join(texts) for source, texts in missing.items()}

    def _report(self, result: Round) -> None:
        energy = described(result)
        told = f"{self._epoch.described()}{f'; {energy}' if energy else ''}"
        self.log.info("epoch %d: accuracy %.4f, %s", result.round, result.accuracy, told)
        for text in result.missing.values():
            self.log.warning("epoch %d: %s", result.round, text)

    def _save_model(self, ready: Ready) -> Path:
        path, state = self._directory / "model.safetensors", self._keeper.state.values
        model = checkpoint.Checkpoint(state, ready.tensors, self._job.name, self._epoch.number - 1)
        checkpoint.save(path, model)
        self._saver.clear()
        return path

# SPDX-License-Identifier: Apache-2.0
"""Edge: the training of one job, from its first exchange to its model.

Workers answer each exchange with sums of gradients (synchronous steps) or with what local training has
changed (rounds, and steps of local SGD); the parameter server's optimizer applies their mean. An epoch is the
exchanges in which each sample is used once; a round is an epoch of one exchange. Checkpoints are written
during training; a job that is started again resumes at the last one, in the middle of an epoch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from millpond.aggregate.exact import all_finite
from millpond.aggregate.rules.catalogue import rule_of
from millpond.base.deadline import Deadline
from millpond.base.errors import Refused, RemoteError
from millpond.host.jobs import artifacts
from millpond.host.jobs import energy as job_energy
from millpond.host.jobs.attempts import TRIES, Attempts
from millpond.host.jobs.context import JobContext, JobFailed, Traffic, since
from millpond.host.jobs.energy import Readings
from millpond.host.jobs.job_folder import MODEL
from millpond.host.jobs.outer.rounds import OuterRounds
from millpond.host.jobs.plan_report import PlanReport
from millpond.host.jobs.stage import JobStage, StageWatch
from millpond.host.jobs.training.admission import Admission
from millpond.host.jobs.training.checkpoints import (
    STAGED,
    BestModel,
    CheckpointWriter,
    SavedCheckpoint,
    TrainingProgress,
    newest,
)
from millpond.host.jobs.training.collection import LatePolicy
from millpond.host.jobs.training.device_reduction import masked_reduction, node_reduction, noisy_bound
from millpond.host.jobs.training.epoch import Epoch
from millpond.host.jobs.training.exchange_engine import ExchangeEngine, ExchangeOutcome
from millpond.host.jobs.training.membership import MemberState
from millpond.host.jobs.training.planner import StepSchedule
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.round_planner import RoundSchedule
from millpond.host.jobs.training.scores import ScoreBoard, Scores, described, scores_of
from millpond.host.jobs.training.shards import Shards
from millpond.host.jobs.training.worker_group import START_SECONDS, WorkerGroup
from millpond.host.records.energy import describe
from millpond.host.records.failures import MACHINE_MEMORY, diverged, too_few
from millpond.host.records.jobs import HOST, JobRow, Round
from millpond.host.workers.node_reduction import StateLost
from millpond.train.job.spec import SynchronousSpec
from millpond.train.server.lr_scaling import LearningRate
from millpond.train.state import checkpoint, layout
from millpond.train.strategies.catalogue import unfit_for_lateness
from millpond.train.task.sums import Sums

LATE = "too few devices answer within the deadline of a round: federated.deadline is too short"
ABSENT_SECONDS = 10.0
"""Time that the end of an epoch waits for a device that is not there."""


class Trainer:
    """Runs one job in the calling thread."""

    def __init__(self, row: JobRow, context: JobContext, stop: threading.Event) -> None:
        self._row, self._job, self._context = row, row.job, context
        self._steps = row.job.synchronous or SynchronousSpec(epochs=row.job.averaging.rounds)
        self.log = logging.Logger(f"millpond.host.job.{row.id}")  # not kept for ever, as getLogger's are
        self.log.parent = logging.getLogger("millpond.host")
        self._directory = context.fleet.job_directory(row.id)
        self._late = LatePolicy.of(row.job)
        self._only_prepares = not row.job.synchronous and not self._steps.epochs
        self._stop = stop
        self._group = WorkerGroup(row, context, stop, self.log)
        self._closers: list[Callable[[], None]] = []
        self._rate = LearningRate(self._steps.scaling, row.job.train.batch, self._steps.warmup)
        self._attempts = Attempts()
        self._progressed = time.monotonic()
        self._watch = StageWatch(context.changed)

    @property
    def stage(self) -> tuple[JobStage, float]:
        """The stage of the job, and the part of it that is done, 0 to 1. May be asked from any thread."""
        stage = self._watch.stage
        return stage, self._group.prepared if stage is JobStage.PREPARING else self._watch.done

    def _part_done(self) -> float:
        """Return the part of the present epoch, or round, that is done."""
        is_one = self._schedule.is_epoch
        return self._engine.done(self._step + 1) if is_one else 1 - self._shards.part_left

    def run(self) -> Path | None:
        """Train to the target or the last epoch. Returns the model's path, None for a job without rounds.
        Raises JobFailed, JobStopped.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                return self._attempt()
            except RemoteError as error:
                if (
                    isinstance(error, Refused) and error.code != MACHINE_MEMORY
                ):  # the user's model in the server
                    raise JobFailed(str(error)) from None
                self._group.check_stop()
                lost = "the model's state" if isinstance(error, StateLost) else "the parameter server"
                if (pause := self._attempts.lose()) is None:
                    raise JobFailed(f"{lost} was lost {TRIES} times in a row: {error}") from None
                self.log.warning("%s was lost: %s", lost, error)
                self._group.wait(pause)
                self._group = WorkerGroup(self._row, self._context, self._stop, self.log)

    def abort(self) -> None:
        """End the job at once, from any thread."""
        self._group.stop()

    def _attempt(self) -> Path | None:
        """Train from the last checkpoint, if there is one. Raises RemoteError if the parameter server is
        lost.
        """
        self._watch.enter(JobStage.PREPARING)
        try:
            done = self._context.store.rounds(self._row.id)
            self._set_up(resumed=bool(done) or bool(list(self._directory.glob("step-*"))))
            saved = newest(self._directory, self._server.tensors, done[-1].round if done else 0, self.log)
            self._shards.begin(1) if saved is None else self._resume(saved)
            self._gather()
            if self._only_prepares:
                self._group.write_prepared()
                return None
            if again := sum(round_.round >= self._epoch.number for round_ in done):
                self.log.warning("%d that had ended are computed again: they have no checkpoint", again)
            self._context.store.drop_rounds(self._row.id, self._epoch.number)
            self._train([round_ for round_ in done if round_.round < self._epoch.number])
            path = self._save_model(MODEL)
            if self._board.fault:
                raise JobFailed(self._board.fault)
            return path
        finally:
            self.abort()
            while self._closers:
                self._closers.pop()()

    def _set_up(self, *, resumed: bool) -> None:
        self._server = self._group.start(resumed=resumed)
        for line in self._server.description(self._job.work.local_layers):
            self.log.info("%s", line)
        names = self._group.names
        self._schedule: RoundSchedule | StepSchedule = (
            StepSchedule(self._steps, names) if self._job.synchronous else RoundSchedule(self._job, names)
        )
        self._shards: Shards = self._schedule.shards
        combine = self._server.ready.combine
        repeats, local = bool(self._late.buffer), self._server.ready.local
        if self._late.discounted and (fault := unfit_for_lateness(combine, local, repeats=repeats)):
            raise JobFailed(f"federated: strategy: {fault}")  # of a class of the user's own
        nodes = self._nodes = node_reduction(self._job, self._context, self._server, self.log, self._closers)
        devices = [rank for rank, name in enumerate(names) if name != HOST]
        self._roster = JobRoster(len(names), devices, self._job.quorum)
        self._engine = ExchangeEngine(
            self._roster,
            self._server.mean,
            self._shards,
            self._check_while_waiting,
            late=self._late,
            clip=self._job.limits.clip,
            bits=self._job.sum_bits,
            largest=noisy_bound(self._job),
            rule=rule_of(combine.rule, combine.share, self._job.work.encoding.block),
            nodes=nodes,
            coming=self._shards.coming if self._job.data.is_streamed else None,
            parameters=layout.parameters_end(self._server.tensors),
            masked=masked_reduction(self._job, self._server, nodes),
        )
        self._admission = Admission(
            self._row,
            self._context,
            self._group,
            self._roster,
            self._shards,
            self._schedule.planner,
            self.log,
        )
        self._closers.append(self._admission.close)
        self._checkpoints = CheckpointWriter(self._directory, self._job.name, self._server.tensors, self.log)
        self._closers.append(self._checkpoints.wait)
        box, place, stop = self._context.outer, self._directory, self._group.check_stop
        model, score, watch = self._server, self._score, self._watch
        self._outer = box and OuterRounds(box, self._job, place, model, score, stop, watch, self.log)
        self._epoch = Epoch()
        self._step, self._state_checked = 0, True
        self._contributors: list[str] = []
        self._reasons: dict[str, str] = {}
        self._absent_since: dict[str, float] = {}

    def _resume(self, saved: SavedCheckpoint) -> None:
        progress = saved.progress
        self._server.restore(saved.state, saved.momentum_tensors, saved.momentum)
        self._shards.resume(progress.place)
        self._step = self._checkpoints.recorded = progress.step
        counted = Counter(progress.counted)
        self._epoch = Epoch(
            progress.place.epoch,
            counted,
            loss=progress.loss,
            loss_count=progress.loss_count,
            seconds=progress.seconds,
        )
        within = "" if self._schedule.is_epoch else f"in epoch {self._epoch.number} "
        self.log.info("resumed %safter %s %d", within, self._schedule.unit, self._step)

    def _gather(self) -> None:
        """Wait until a quorum of workers takes part, and those that were prepared first are profiled."""
        while not self._can_begin() or self._admission.profiling:
            if self._admission.profiling:  # a resumed job goes on without its newcomers, but not yet
                self._admission.handle_profile()
        curves = self._admission.begin()
        if curves.profiles:
            try:
                artifacts.write(self._directory, curves)
            except OSError as error:  # a full disk, most likely
                self.log.warning("the curves cannot be kept: %s", error.strerror)

    def _can_begin(self) -> bool:
        """Admit new workers. Returns whether a quorum takes part, after a short wait if it does not. Raises
        JobFailed, JobStopped.
        """
        self._group.check_stop()
        self._admission.admit_new(self._server.state)
        enough = self._roster.is_quorum(self._roster.joined)
        if self._admission.profiling and not (enough and self._roster.present and self._step):
            self._admission.handle_profile()
        elif not enough:
            self._check_state()
            self._check_quorum()
            self._group.wait(0.1)
        return enough

    def _check_quorum(self) -> None:
        """Raise JobFailed if there is no hope for a quorum, or there was none for too long."""
        needed, wait = self._roster.needed, self._job.limits.wait
        few = f"{too_few(needed)} ({self._group.reasons})"
        few = self._group.reasons if self._only_prepares else few
        if not self._roster.can_reach_quorum:
            raise JobFailed(few)
        late = self._schedule.is_epoch and self._roster.is_quorum(self._roster.joined)
        # Those that take part have longer next time.
        goes_on = late and self._schedule.most_late
        if time.monotonic() - self._progressed > wait and not goes_on:
            raise JobFailed(f"for {wait:g} s (limits.wait), {LATE if late else few}")

    def _train(self, done: list[Round]) -> None:
        scores = [(round_.round, round_.scores) for round_ in done]
        self._board = ScoreBoard.of(self._job.scoring, self._steps.epochs, scores)
        self._best = BestModel(self._directory, self._board.best)
        self._saved_at = time.monotonic()
        self._plans = PlanReport(self._admission.note, self.log)
        self._traffic = self._context.traffic()
        self._watch.enter(JobStage.TRAINING)
        while not self._finished(done):
            metered = self._read_meters()
            while self._exchange():
                pass
            done.append(self._end_epoch(metered))
        self._checkpoints.save_now(self._snapshot())
        self._checkpoints.prune(keep=1)
        self._best.end()

    def _finished(self, done: list[Round]) -> bool:
        if self._outer:
            over = self._outer.is_over(done, self._epoch.number, begun=bool(self._epoch.samples))
            self._progressed, self._state_checked = time.monotonic(), False
            return over
        if (reason := self._board.end) and done:
            self.log.info("the job ends: %s", reason)
        return bool(reason) or len(done) >= self._steps.epochs

    def _exchange(self) -> bool:
        """Run one exchange. Returns whether the epoch goes on."""
        if not self._can_begin():
            return True
        planner, state = self._schedule.planner, self._server.state
        number, seed = self._step + 1, self._job.seed
        enough = self._schedule.choose(number, self._roster)
        one = self._schedule.is_epoch
        saves = one or (self._is_save_due and not self._checkpoints.busy)
        recorded = None if one else self._checkpoints.recorded
        outcome = self._engine.run(
            number, seed, state, planner, planner.background, enough, recorded=recorded, records=saves
        )
        for loss in outcome.lost:
            self._reasons[loss.dispatcher.worker.name] = loss.reason
            self._admission.lost(loss)
        self._note_missing(outcome)
        if one and not enough(list(outcome.counted)):
            self._begin_again(outcome)
            return True
        self._epoch.count(outcome, self._group.names)
        if outcome.samples:
            self._apply(outcome)
        if one:
            return False
        self._plans.report(self._step, planner, new=outcome.new_plan)
        if saves:  # the workers know of no other
            self._checkpoints.save(self._snapshot(copied=True))
            self._saved_at = time.monotonic()
        return bool(outcome.samples or outcome.lost or self._engine.outstanding()) or self._await_absent()

    def _begin_again(self, outcome: ExchangeOutcome) -> None:
        """Begin the round anew, in which too few have answered. Raises JobFailed."""
        if late := ", ".join(self._group.names[rank] for rank in outcome.missing):
            within, number = outcome.deadline, self._epoch.number
            self.log.info("no answer of %s within %.3g s: round %d begins again", late, within, number)
        self._shards.begin(self._epoch.number)
        self._check_quorum()

    def _note_missing(self, outcome: ExchangeOutcome) -> None:
        if outcome.failed:
            self.log.warning("there is no sum of masked updates: %s", outcome.failed)
        for rank in outcome.missing:
            self._reasons[self._group.names[rank]] = f"no answer within {outcome.deadline:.3g} s"

    def _await_absent(self) -> bool:
        """At the end of an epoch, wait a moment for lost workers whose samples are left. Returns whether any
        is still waited for.
        """
        now = time.monotonic()
        absent = {shard.source for shard in self._shards.left} - {
            self._group.names[rank] for rank in self._roster.joined
        }
        self._absent_since = {name: self._absent_since.get(name, now) for name in absent}
        awaited = [
            name for name, since_ in self._absent_since.items() if self._is_awaited(name, now - since_)
        ]
        if awaited and self._admission.profiling:  # no exchange does that: none has a task
            self._admission.handle_profile()
        elif awaited:
            self._group.wait(0.1)
        return bool(awaited)

    def _is_awaited(self, name: str, seconds: float) -> bool:
        device = self._context.devices.get(name)
        if device is None or name not in self._group.names:
            return False
        if self._roster.state(self._group.names.index(name), time.monotonic()) is not MemberState.ABSENT:
            return False
        return seconds < (START_SECONDS if device.wait_ready(Deadline.after(0.0)) else ABSENT_SECONDS)

    def _check_while_waiting(self) -> None:
        """Check the state and the workers while an exchange waits for answers."""
        self._check_state()
        self._admission.check_silence()
        if self._watch.stage is JobStage.TRAINING:
            self._watch.look(self._part_done)

    def _check_state(self) -> None:
        """Check each state once. Raises JobFailed if a parameter is not finite; buffers may always be so."""
        if self._state_checked:
            return
        values = self._server.state.values[: layout.parameters_end(self._server.tensors)]
        if len(values) and not all_finite(values):
            odd = float(values[~np.isfinite(values)][0])
            raise JobFailed(diverged(odd, self._schedule.unit, self._step, self._contributors))
        self._state_checked = True

    def _apply(self, outcome: ExchangeOutcome) -> None:
        factor, of_buffers = self._schedule.factors(outcome)
        if of_buffers != 1.0:
            self._server.mean[layout.parameters_end(self._server.tensors) :] *= of_buffers
        if not self._job.exchanges_differences:
            factor *= self._rate.at(self._step, outcome.whole, 1.0)
        began, optimizer = time.monotonic(), 0.0
        if not (self._nodes and self._nodes.advanced):
            in_use = self._roster.states_in_use
            share = self._epoch.share_before(outcome, self._shards.samples)
            optimizer = self._server.apply(factor, self._epoch.number, in_use, outcome.unused, share)
        self._state_checked = self._is_behind
        self._epoch.applied(outcome, time.monotonic() - began, optimizer)
        self._roster.counted(outcome.counted)
        self._contributors = [self._group.names[rank] for rank in outcome.counted]
        self._step, self._progressed = self._step + 1, time.monotonic()
        self._attempts.reached(self._step)

    @property
    def _is_behind(self) -> bool:
        """Whether the devices have a state that is not here yet; they have said that it is finite."""
        return self._nodes is not None and self._nodes.ahead

    def _catch_up(self) -> None:
        """Have the newest state here. Raises RemoteError."""
        if self._nodes:
            self._nodes.catch_up()

    @property
    def _is_save_due(self) -> bool:
        return time.monotonic() - self._saved_at > self._steps.checkpoint

    def _snapshot(self, *, copied: bool = False) -> SavedCheckpoint:
        self._catch_up()
        self._check_state()
        tensors, momentum = self._server.momentum()
        position, epoch, state = self._shards.epoch_position, self._epoch, self._server.state.values
        progress = TrainingProgress(
            self._step, position, dict(epoch.counted), epoch.loss, epoch.seconds, epoch.loss_count
        )
        return SavedCheckpoint(state.copy() if copied else state, tensors, momentum, progress)

    def _read_meters(self) -> Readings | None:
        """Read the meters. Returns None in a resumed epoch: the energy of its beginning is unknown."""
        return None if self._epoch.samples else self._context.energy()

    def _end_epoch(self, metered: Readings | None) -> Round:
        epoch = self._epoch
        if not epoch.samples:
            raise JobFailed(f"epoch {epoch.number}: no worker could compute anything")
        self._check_state()
        taken = job_energy.between(metered, self._context.energy(), epoch.counted)
        scores = self._score() if self._board.is_due(epoch.number) else {}
        self._watch.set(JobStage.TRAINING)
        result = Round(
            epoch.number,
            scores,
            epoch.seconds,
            epoch.samples,
            dict(sorted(epoch.counted.items())),
            self._schedule.missing(epoch.counted, self._absence),
            self._bytes_since(),
            taken.joules,
            taken.energy,
            epoch.metrics,
            epoch.by_worker,
            self._admission.take_events(),
            epoch.data,
        )
        if self._board.add(epoch.number, scores):
            self._save_model(STAGED.format(epoch.number))
        self._epoch = Epoch(epoch.number + 1)
        self._shards.begin(self._epoch.number)
        # A round that was recorded is final, but one whose state is not here: that is computed again.
        saves = self._schedule.is_epoch and (self._is_save_due or not self._is_behind)
        if saves:
            self._checkpoints.save_now(self._snapshot())
            self._saved_at = time.monotonic()
        self._context.store.add_round(self._row.id, result, self._board.standing)
        self._best.settle(self._board.best, self._checkpoints.final_round)
        if saves or not self._schedule.is_epoch:
            self._checkpoints.prune()
        self._report(result)
        self._progressed = time.monotonic()  # an evaluation may take longer than limits.wait
        self._reasons.clear()
        self._context.changed()
        return result

    def _bytes_since(self) -> Traffic:
        """Return the bytes of the tunnels since the last call, or the begin of the training."""
        before, self._traffic = self._traffic, self._context.traffic()
        return since(before, self._traffic)

    def _score(self) -> Scores:
        """Score the model on the host's test samples and on those that devices hold out."""
        self._watch.set(JobStage.SCORING)
        on, sums = self._job.evaluate.on, Sums()
        if "devices" in on:
            sums, scored, lost = self._engine.score(self._step, self._server.state)
            self._roster.counted(scored, scoring=True)
            for loss in lost:
                self._reasons[loss.dispatcher.worker.name] = loss.reason
                self._admission.lost(loss)
        if "host" in on:
            self._catch_up()
        score = self._server.score(self._job.data.test if "host" in on else "", sums)
        return scores_of({"host": score.host, "devices": score.devices}, on)

    def _absence(self, rank: int) -> str:
        """Return the reason why a worker took no part in a round."""
        return self._reasons.get(self._group.names[rank]) or self._group.supervisor(rank).reason

    def _report(self, result: Round) -> None:
        text, missing = self._schedule.described(result)
        energy = f"; {found}" if (found := describe(result)) else ""
        scored = "".join(f"{figure}, " for figure in described(result.scores))
        self.log.info("%s %d: %s%s%s", self._schedule.epoch, result.round, scored, text, energy)
        for line in missing:
            self.log.warning("%s", line)

    def _save_model(self, name: str) -> Path:
        """Save the whole model, with its frozen parameters."""
        path, number = self._directory / name, self._epoch.number - (not self._epoch.samples)
        self._catch_up()
        tensors, values = self._server.model()
        checkpoint.save(path, checkpoint.Checkpoint(values, tensors, self._job.name, number))
        return path

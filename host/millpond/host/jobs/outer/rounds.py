# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the outer rounds of a resident job: what it does between two of its own rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millpond.aggregate.kernels import Vector
from millpond.base.errors import LocalError
from millpond.host.api.outer import OuterAnswer, OuterModel
from millpond.host.jobs.job_folder import OUTER
from millpond.host.jobs.outer.mailbox import LOOK_SECONDS, Order, OuterMailbox
from millpond.host.jobs.stage import JobStage, StageWatch
from millpond.host.records.jobs import Round
from millpond.host.workers.parameter_server import ParameterServer
from millpond.train.job.spec import Job
from millpond.train.state import checkpoint, layout
from millpond.train.state.checkpoint import Checkpoint

Scores = dict[str, dict[str, float | None]]


@dataclass(frozen=True, slots=True, eq=False)
class OuterRound:
    """An outer round: its key, the number of its ``first`` round, the state that it begins with."""

    key: str
    first: int
    base: Vector


class OuterRounds:
    """Has a job's rounds begin at the states that orders bring, ``outer.every`` for an order, and answers
    with what has changed. The present order is a file of the job's ``directory``: a job that is resumed goes
    on inside its outer round, and an answer follows from its last checkpoint. ``score`` scores the present
    state; ``check_stop`` raises when the job is stopped; ``watch`` has its stage.
    """

    def __init__(
        self,
        mailbox: OuterMailbox,
        job: Job,
        directory: Path,
        model: ParameterServer,
        score: Callable[[], Scores],
        check_stop: Callable[[], None],
        watch: StageWatch,
        log: logging.Logger,
    ) -> None:
        self._mailbox, self._path, self._job = mailbox, directory / OUTER, job.name
        self._every = job.outer.every if job.outer else 1
        self._model, self._score, self._check_stop = model, score, check_stop
        self._watch, self._log = watch, log
        self._end = layout.parameters_end(model.tensors)
        self._present = self._load()
        self._told = False

    def is_over(self, done: Sequence[Round], number: int, *, begun: bool) -> bool:
        """Wait until the round with this ``number`` is ordered, and put the state in place where it is the
        first of an outer round that has not ``begun``. Returns True when the job is to end: its state is then
        the last one. ``done`` are the rounds before. Raises JobFailed, JobStopped.
        """
        if not self._told:
            self._mailbox.prepared(
                OuterModel(self._model.tensors, self._every), self._model.state.values.copy()
            )
            self._told = True
        while True:
            order, present = self._mailbox.order(), self._present
            if order and not (order.kind == "train" and present and order.key == present.key):
                if order.kind == "end":
                    self._model.replace(self._rounded(order.values))
                    return True
                self._carry_out(order, number)
            elif present and number < present.first + self._every:
                if number == present.first and not begun:
                    self._model.replace(present.base)
                self._watch.reach(JobStage.TRAINING)
                return False
            elif present and not self._mailbox.has_answer("train", present.key):
                self._mailbox.answer("train", present.key, *self._answer(present, done))
            else:
                self._check_stop()
                self._watch.reach(JobStage.WAITING)
                self._mailbox.wait(LOOK_SECONDS)

    def _carry_out(self, order: Order, number: int) -> None:
        """Score a state, or begin an outer round with the round of this ``number``."""
        values = self._rounded(order.values)
        if order.kind == "train":
            self._present = OuterRound(order.key, number, values)
            about = {"key": order.key}
            checkpoint.save(self._path, Checkpoint(values, self._model.tensors, self._job, number, about))
            self._log.info("outer round '%s' begins with round %d", order.key, number)
            return
        before = self._model.state.values.copy()
        self._model.replace(values)
        answer = OuterAnswer(scores=self._score())
        self._model.replace(before)
        self._mailbox.answer(order.kind, order.key, answer, np.empty(0, np.float32))

    def _answer(self, present: OuterRound, done: Sequence[Round]) -> tuple[OuterAnswer, Vector]:
        """Return what an outer round has changed, from the state after its last round."""
        own = [each for each in done if each.round >= present.first]
        sums = {
            name: sum(each.metrics[name] * each.samples for each in own)
            for name in ("training_loss",)
            if all(name in each.metrics for each in own)
        }
        values = self._model.state.values.copy()
        values[: self._end] -= present.base[: self._end]
        samples, seconds = sum(each.samples for each in own), sum(each.seconds for each in own)
        scores = next((each.scores for each in reversed(own) if each.scores), {})
        return OuterAnswer(samples, len(own), seconds, sums, scores), values

    def _rounded(self, values: Vector) -> Vector:
        """Return a state whose integers are whole: a mean over fleets may lie beside them."""
        found = values.copy()
        for tensor, span in layout.spans(self._model.tensors):
            if tensor.dtype not in layout.FLOATS:
                found[span] = np.rint(found[span])
        return found

    def _load(self) -> OuterRound | None:
        """Return the outer round in which the job was interrupted, None without one."""
        if not self._path.exists():
            return None
        saved = checkpoint.load(self._path)
        if saved.tensors != self._model.tensors:
            raise LocalError(f"{self._path} is of another model")
        return OuterRound(saved.about["key"], saved.round, saved.vector.copy())

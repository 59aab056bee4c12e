# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): the mean of an exchange's updates, pulled from all workers range by range.

Workers hold their updates until the next exchange, so the host needs no memory for them: it sums one range of
all updates, and writes the mean of it, before it reads the next range. An update counts whole or not at all:
if a worker is lost or refused in the middle, the ranges that had its values are pulled again from the others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.host.workers.dispatcher import WorkerAnswer, WorkerLoss
from millpond.train.protocol import PART_VALUES
from millpond.train.reduce.exact import ExactSum, RefusedUpdate, Vector, scale_of, within

log = logging.getLogger(__name__)

STALL_SECONDS = 5.0
TRANSFER_SECONDS = 10.0
SLOWEST = 1e6  # bytes per second
_NORM_ERROR = 1e-3


class Reduction:
    """Writes means of updates to ``mean``, float32 [size]. Updates are scaled down to the norm ``clip`` per
    sample.
    """

    def __init__(self, mean: Vector, clip: float | None = None) -> None:
        self._mean, self._clip = mean, clip
        self._sum = ExactSum(min(PART_VALUES, len(mean)))
        self._buffer = np.empty(min(PART_VALUES, len(mean)), np.float32)
        self._spent: dict[WorkerAnswer, float] = {}
        self._squares: dict[WorkerAnswer, dict[int, float]] = {}

    def run(self, answers: Sequence[WorkerAnswer]) -> list[WorkerLoss]:
        """Write the mean over the samples of ``answers``. Returns the losses of the answers that do not
        count; ``mean`` is of no meaning if none does.
        """
        present, lost = list(answers), []
        self._spent = dict.fromkeys(answers, 0.0)
        self._squares = {answer: {} for answer in answers}
        todo = list(range(0, len(self._mean), PART_VALUES))
        done: list[int] = []
        while todo and present:
            start = todo.pop(0)
            losses = self._sum_range(start, present)
            if not todo and not losses:
                losses = self._wrong_norms(present)
            if not losses:
                done.append(start)
                continue
            lost += losses
            present = [answer for answer in present if all(loss.task is not answer.task for loss in losses)]
            todo += [*done, start]  # later ranges first: they are on their way, and then all in order
            done = []
        return lost

    def _sum_range(self, start: int, answers: Sequence[WorkerAnswer]) -> list[WorkerLoss]:
        """Write one range of the mean, unless an answer is lost. Returns the losses."""
        out = self._mean[start : start + PART_VALUES]
        largest = max(answer.update.largest * self._factor(answer) for answer in answers)
        self._sum.begin(scale_of(largest, len(answers)))
        losses = []
        for answer in answers:
            try:
                part = self._read(answer, start, self._buffer[: len(out)])
            except Exception as error:
                if not isinstance(error, (MillpondError, OSError)):
                    log.exception("worker %s: internal error", answer.dispatcher.worker.name)
                losses.append(answer.loss(str(error), for_good=isinstance(error, RefusedUpdate)))
                continue
            if self._clip is not None:
                self._squares[answer][start] = float(np.dot(part, part))
            self._sum.add(part, self._factor(answer))
        if not losses:
            self._sum.divide(sum(answer.update.samples for answer in answers), out)
        return losses

    def _read(self, answer: WorkerAnswer, start: int, buffer: Vector) -> Vector:
        """Read part of an update. A worker that is stuck must not keep the others waiting: only the time that
        is spent on it counts.
        """
        began = time.monotonic()
        left = TRANSFER_SECONDS + 4 * len(self._mean) / SLOWEST - self._spent[answer]
        stall = STALL_SECONDS + buffer.nbytes / SLOWEST
        try:
            part = answer.dispatcher.worker.read(start, buffer, Deadline.after(min(left, stall)))
        finally:
            self._spent[answer] += time.monotonic() - began
        if not within(part, answer.update.largest):
            raise RefusedUpdate(answer.dispatcher.worker.name, "its values are beyond those it has announced")
        return part

    def _factor(self, answer: WorkerAnswer) -> float:
        update = answer.update
        if self._clip is None or update.norm <= self._clip * update.samples:
            return 1.0
        return self._clip * update.samples / update.norm

    def _wrong_norms(self, answers: Sequence[WorkerAnswer]) -> list[WorkerLoss]:
        if self._clip is None:
            return []
        return [
            answer.loss(
                f"{answer.dispatcher.worker.name}: update refused: its norm is not as announced", True
            )
            for answer in answers
            if math.sqrt(sum(self._squares[answer].values())) > answer.update.norm * (1 + _NORM_ERROR)
        ]

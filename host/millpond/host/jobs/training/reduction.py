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
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.host.model.failures import reason_of
from millpond.host.workers.dispatcher import WorkerAnswer, WorkerLoss
from millpond.host.workers.worker import Worker
from millpond.train.protocol import PART_VALUES
from millpond.train.reduce.exact import ExactSum, RefusedUpdate, Vector, scale_of, within

log = logging.getLogger(__name__)

STALL_SECONDS = 5.0
"""Time without a range of an update, after which its worker is lost."""
GRACE_SECONDS = 0.25
"""Time for a range of a worker that had as much time before, while another one was waited for."""
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
        self._present: list[WorkerAnswer] = []
        self._losses: list[WorkerLoss] = []
        self._squares: dict[WorkerAnswer, dict[int, float]] = {}
        self._spent: dict[WorkerAnswer, float] = {}
        self._heard: dict[WorkerAnswer, float] = {}

    def run(self, answers: Sequence[WorkerAnswer]) -> list[WorkerLoss]:
        """Write the mean of ``answers`` by weight. Returns the losses of the answers that do not
        count; ``mean`` is of no meaning if none does.
        """
        self._present, self._losses = list(answers), []
        self._squares = {answer: {} for answer in answers}
        stop = whole = len(self._mean)
        while stop and self._present:
            before, again = len(self._losses), self._pull(stop)
            again = whole if stop < whole and len(self._losses) > before else again
            stop = whole if not again and self._lose_wrong_norms() else again
        return self._losses

    def _pull(self, stop: int) -> int:
        """Write the first ``stop`` values of the mean. Returns how many of them must be written again: those
        until the last loss of a worker. (Those behind ``stop`` have its values, too.)
        """
        again = 0
        self._heard, self._spent = {}, dict.fromkeys(self._present, 0.0)
        for answer in tuple(self._present):
            self._attempt(answer, lambda worker: worker.fetch(stop, Deadline.after(STALL_SECONDS)))
            self._heard[answer] = time.monotonic()
        for start in range(0, stop, PART_VALUES):
            if not self._present:
                break
            out = self._mean[start : min(start + PART_VALUES, stop)]
            if not self._sum_range(start, out):
                again = start + len(out)
        return again

    def _sum_range(self, start: int, out: Vector) -> bool:
        """Write one range of the mean. Returns whether no worker was lost."""
        present = tuple(self._present)
        largest = max(answer.update.largest * self._factor(answer) for answer in present)
        self._sum.begin(scale_of(largest, len(present)))
        buffer = self._buffer[: len(out)]
        for answer in present:
            if self._attempt(answer, partial(self._read, answer, buffer)):
                if self._clip is not None:
                    self._squares[answer][start] = float(np.dot(buffer, buffer))
                self._sum.add(buffer, self._factor(answer))
        if len(self._present) < len(present):
            return False
        self._sum.divide(sum(answer.update.weight for answer in present) or 1.0, out)
        return True

    def _read(self, answer: WorkerAnswer, buffer: Vector, worker: Worker) -> None:
        """Read part of an update. A worker that is stuck must not keep the others waiting: only the time that
        is spent on it counts, and all that are stuck are waited for together.
        """
        began = time.monotonic()
        left = TRANSFER_SECONDS + 4 * len(self._mean) / SLOWEST - self._spent[answer]
        stall = max(GRACE_SECONDS, self._heard[answer] + STALL_SECONDS - began) + buffer.nbytes / SLOWEST
        try:
            worker.read(buffer, Deadline.after(min(left, stall)))
        finally:
            self._heard[answer] = time.monotonic()
            self._spent[answer] += self._heard[answer] - began
        if not within(buffer, answer.update.largest):
            raise RefusedUpdate(worker.name, "its values are beyond those it has announced")

    def _attempt(self, answer: WorkerAnswer, action: Callable[[Worker], None]) -> bool:
        """Do something with the worker of an answer. Returns whether it was not lost by that."""
        worker = answer.dispatcher.worker
        try:
            action(worker)
        except Exception as error:
            if not isinstance(error, (MillpondError, OSError)):
                log.exception("worker %s: internal error", worker.name)
            self._lose(answer, reason_of(error, worker.name), for_good=isinstance(error, RefusedUpdate))
            return False
        return True

    def _lose(self, answer: WorkerAnswer, reason: str, *, for_good: bool) -> None:
        self._present.remove(answer)
        self._losses.append(answer.loss(reason, for_good))

    def _factor(self, answer: WorkerAnswer) -> float:
        update = answer.update
        if self._clip is None or update.norm <= self._clip * update.samples:
            return 1.0
        return self._clip * update.samples / update.norm

    def _lose_wrong_norms(self) -> bool:
        """Lose the answers whose norms are not as announced, where that matters. Returns whether there are
        any.
        """
        wrong = [
            answer
            for answer in self._present
            if math.sqrt(sum(self._squares[answer].values())) > answer.update.norm * (1 + _NORM_ERROR)
        ]
        for answer in wrong:
            self._lose(answer, "update refused: its norm is not as announced", for_good=True)
        return bool(wrong)

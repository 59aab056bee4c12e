# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, threads): the mean of an exchange's updates, pulled from all workers range by range.

Workers hold their updates until the next exchange, see ``millpond.aggregate.reduction``. A late update has
changed the buffers of the state that it began from. The mean has the changes that lead from the present state
to the values which the update has led to, or a part of the way: changes of two states, added, might lead
beyond all values, and a variance below 0. Where devices have begun from states of their own, and the host has
to add, it leaves the buffers as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from millpond.aggregate.exact import ExactSum, RefusedUpdate, scale_of
from millpond.aggregate.kernels import Totals, Vector
from millpond.aggregate.masking.fixed_point import bits_of_sum, width_of
from millpond.aggregate.masking.messages import SumBits
from millpond.aggregate.reduction import Addend, Reduction
from millpond.aggregate.rules.mean import MEAN, SortedSum
from millpond.aggregate.rules.rule import CombinationRule
from millpond.aggregate.unrepaired import BOUND
from millpond.host.jobs.training.collection import ALL_COUNT, LatePolicy
from millpond.host.records.failures import reason_of
from millpond.host.workers.dispatcher import WorkerAnswer, WorkerLoss
from millpond.host.workers.node_reduction import NodeReduction

NoisyBound = Callable[[Collection[int]], float]
"""Returns what bounds the terms of a sum of updates with noise, by their samples."""


class UpdateReduction:
    """Writes means of updates to ``mean``, float32 [size], or combines them by another ``rule``, with one
    vote for each worker. Updates are scaled down to the norm ``clip`` per sample, and count as ``late`` says.
    Where there are ``nodes`` they add the updates, if they can. The first ``parameters`` values, by default
    all, are of parameters, the others of buffers. Sums of clipped updates are words of so many
    ``bits``. Where these have noise, ``largest`` bounds what they add up to, and devices alone clip them.
    """

    def __init__(
        self,
        mean: Vector,
        clip: float | None = None,
        rule: CombinationRule = MEAN,
        nodes: NodeReduction | None = None,
        late: LatePolicy = ALL_COUNT,
        parameters: int | None = None,
        bits: SumBits = 64,
        largest: NoisyBound | None = None,
    ) -> None:
        self._reduction, self._votes = Reduction(mean, 0, rule, parameters), rule.votes
        self._mean, self._nodes, self._late = mean, nodes, late
        self._clip, self.unit, self._wanted = math.inf if clip is None else clip, math.inf, bits
        self.bits = 64
        self._largest = largest
        self.buffers = mean[parameters:] if parameters is not None else mean[len(mean) :]
        self._begun: dict[int, Vector] = {}  # the buffers that exchanges began from

    def begin(self, number: int, state: Vector) -> None:
        """Note the ``state`` from which exchange ``number`` begins."""
        self.unit = math.inf
        if len(self.buffers):
            self._begun[number] = state[-len(self.buffers) :].copy()

    def expect(self, samples: Collection[int]) -> None:
        """Note the samples of the updates of an exchange: where these are clipped, their sum is of multiples
        of a unit that follows from that alone, whoever is lost, and so are the words of masked ones.
        """
        if self._clip < math.inf and self.unit == math.inf:
            largest, wanted = self._clip * max(samples), self._wanted
            if self._largest:
                largest, wanted = self._largest(samples), 64 if wanted == "auto" else wanted
            self.bits = width_of(wanted, largest, len(samples), sum(samples))
            self.unit = scale_of(largest, len(samples), bits_of_sum(self.bits))

    def keep(self, exchanges: Collection[int]) -> None:
        """Forget the states of all but these exchanges."""
        self._begun = {number: found for number, found in self._begun.items() if number in exchanges}

    def run(self, answers: Sequence[WorkerAnswer], number: int) -> list[WorkerLoss]:
        """Write the mean of ``answers`` in exchange ``number`` by weight, or what the rule makes of them.
        Returns the losses of the answers that do not count; the mean is of no meaning if none does.
        """
        answer_of = {self._addend(answer, number): answer for answer in answers}
        exchanges = {answer.task.request.exchange for answer in answers}
        # In one unit, as nodes add, changes of buffers beyond weights would cost these digits.
        even = exchanges == {number} and all(each.shift <= BOUND * each.weight for each in answer_of)
        for addend in answer_of:
            addend.even = even
        if self._nodes:
            addends = {addend.source.name: addend for addend in answer_of} if even else {}
            if self._nodes.reduce(addends, self._mean, number):
                return []
        excluded = self._reduction.run(answer_of)
        if self._nodes and self._nodes.apart:  # changes of several states: a variance could fall below 0
            self.buffers[:] = 0.0
        return [
            answer_of[lost.addend].loss(
                reason_of(lost.error, lost.addend.source.name), isinstance(lost.error, RefusedUpdate)
            )
            for lost in excluded
        ]

    def _addend(self, answer: WorkerAnswer, number: int) -> Addend:
        update = answer.update
        most = self._clip * update.samples if self._clip < math.inf and not self._largest else math.inf
        # A vote is the update per sample, of samples that the host has counted, whatever the worker claims.
        weight = float(answer.task.samples) if self._votes else update.weight
        addend = Addend(answer.dispatcher.worker, weight, update.largest, update.norm, most, update.shift)
        addend.scale = self.unit
        addend.factor *= self._late.weight(number - answer.task.request.exchange)
        addend.apart = self._apart(answer.task.request.exchange, number, weight)
        return addend

    def _apart(self, began: int, number: int, weight: float) -> Totals | None:
        """Return by how much the buffers of an exchange are apart from the present ones, times ``weight``."""
        if began == number or not len(self.buffers):
            return None
        old, now = self._begun[began], self._begun[number]
        with np.errstate(invalid="ignore"):  # an infinite constant
            apart = (old.astype(np.float64) - now) * weight
        apart[old.view(np.int32) == now.view(np.int32)] = 0.0
        return apart


class UpdateBuffer:
    """The mean of up to ``size`` updates that ``reduction`` pulls into ``mean``, float32 [size], one by one
    as they come: a worker whose update is in the buffer is free for its next task.

    An update that is lost or refused in the middle leaves no trace: it is added to the sum only when all of
    it is there. The sum has the same bits for every order of the updates: its unit follows from the largest
    value that may count, 65,536 per sample. So the mean is off by up to 5.8e-11 times ``size``, where workers
    have alike many samples. It takes the memory of two models, and of ``size`` times the buffers.
    """

    def __init__(self, mean: Vector, reduction: UpdateReduction, size: int) -> None:
        self._buffers, self._reduction, self._size = reduction.buffers, reduction, size
        self._mean = mean[: len(mean) - len(self._buffers)]
        self._sum, self._rows, self._weight = ExactSum(len(self._mean)), SortedSum(), 0.0

    def begin(self, samples: int) -> None:
        """Begin with an empty buffer, for updates of up to so many ``samples``."""
        self._sum.begin(scale_of(2 * BOUND * samples, self._size))
        self._rows, self._weight = SortedSum(), 0.0

    def add(self, answer: WorkerAnswer, number: int) -> WorkerLoss | None:
        """Add the update of an answer in exchange ``number``. Returns its loss if it cannot be had."""
        for loss in self._reduction.run([answer], number):
            return loss
        # Before it is added: the sum would be of no use afterwards.
        if not max(-float(self._mean.min()), float(self._mean.max())) <= 2 * BOUND:
            return answer.loss(f"its update is beyond {2 * BOUND:g} per unit of its weight", for_good=True)
        weight = answer.update.weight
        self._sum.add(self._mean, weight, 2 * BOUND)
        self._rows.add(self._buffers, weight)
        self._weight += weight
        return None

    def finish(self) -> None:
        """Write the mean of the updates by weight."""
        self._sum.divide(self._weight or 1.0, self._mean)
        self._rows.divide(self._weight or 1.0, self._buffers)

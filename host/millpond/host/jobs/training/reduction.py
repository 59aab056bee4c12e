# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, threads): the mean of an exchange's updates, pulled from all workers range by range.

Workers hold their updates until the next exchange, see ``millpond.aggregate.reduction``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from millpond.aggregate.exact import RefusedUpdate
from millpond.aggregate.kernels import Vector
from millpond.aggregate.reduction import Addend, Reduction
from millpond.aggregate.rules import CombinationRule
from millpond.host.model.failures import reason_of
from millpond.host.workers.dispatcher import WorkerAnswer, WorkerLoss
from millpond.host.workers.node_reduction import NodeReduction


class UpdateReduction:
    """Writes means of updates to ``mean``, float32 [size], or combines them by another ``rule``, with one
    vote for each worker. Updates are scaled down to the norm ``clip`` per sample. Where there are ``nodes``
    they add the updates, if they can.
    """

    def __init__(
        self,
        mean: Vector,
        clip: float | None = None,
        rule: CombinationRule | None = None,
        nodes: NodeReduction | None = None,
    ) -> None:
        self._reduction, self._votes = Reduction(mean, rule=rule), rule is not None
        self._mean, self._nodes = mean, nodes
        self._clip = math.inf if clip is None else clip

    def run(self, answers: Sequence[WorkerAnswer]) -> list[WorkerLoss]:
        """Write the mean of ``answers`` by weight, or what the rule makes of them. Returns the losses of the
        answers that do not count; the mean is of no meaning if none does.
        """
        answer_of = {self._addend(answer): answer for answer in answers}
        exchanges = {answer.task.request.exchange for answer in answers}
        if self._nodes and len(exchanges) == 1:
            addends = {addend.source.name: addend for addend in answer_of}
            if self._nodes.reduce(addends, self._mean, *exchanges):
                return []
        return [
            answer_of[lost.addend].loss(
                reason_of(lost.error, lost.addend.source.name), isinstance(lost.error, RefusedUpdate)
            )
            for lost in self._reduction.run(answer_of)
        ]

    def _addend(self, answer: WorkerAnswer) -> Addend:
        update = answer.update
        most = self._clip * update.samples if self._clip < math.inf else math.inf
        # A vote is the update per sample, of samples that the host has counted, whatever the worker claims.
        weight = float(answer.task.samples) if self._votes else update.weight
        return Addend(answer.dispatcher.worker, weight, update.largest, update.norm, most)

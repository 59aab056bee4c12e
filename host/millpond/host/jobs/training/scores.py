# SPDX-License-Identifier: Apache-2.0
"""Pure: which rounds are scored, which model is the best, and when a job ends before its last round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millpond.host.jobs.context import JobFailed
from millpond.host.records.jobs import Standing
from millpond.train.job.host_spec import EvaluationSpec

Scores = dict[str, dict[str, float | None]]
"""The figures of a model by place, "host" or "devices"; None for one that is not finite."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best ``value`` of the deciding metric, and its round."""

    round: int
    value: float


def described(scores: Scores) -> list[str]:
    """Return each figure as text: those on the host, or else on the devices, by name alone."""
    first = next(iter(scores), "")
    return [
        f"{'' if place == first else place + ' '}{name} {'not finite' if value is None else f'{value:.4f}'}"
        for place, figures in scores.items()
        for name, value in figures.items()
    ]


def scores_of(found: Mapping[str, Mapping[str, float]], places: Sequence[str]) -> Scores:
    """Return the figures of those ``places`` that have some."""
    return {
        place: {name: value if math.isfinite(value) else None for name, value in found[place].items()}
        for place in places
        if found[place]
    }


class ScoreBoard:
    """The scores of a job of ``total`` rounds, from which follow the best model and the end of the job."""

    def __init__(self, spec: EvaluationSpec, total: int) -> None:
        self._spec, self._total = spec, total
        self.metric = spec.metric
        self.best: Best | None = None
        self._reached = False
        self._since_best = self._scored = 0
        self.last: float | None = None

    @classmethod
    def of(cls, spec: EvaluationSpec, total: int, rounds: Sequence[tuple[int, Scores]]) -> ScoreBoard:
        """Return the board of rounds that are done."""
        board = cls(spec, total)
        for number, scores in rounds:
            board.add(number, scores)
        return board

    def is_due(self, number: int) -> bool:
        """Return whether the model is scored after round ``number``."""
        return bool(self._spec.on) and (number % self._spec.every == 0 or number == self._total)

    def add(self, number: int, scores: Scores) -> bool:
        """Take in the scores of a round, if it was scored where the metric decides. Returns whether its model
        is the best so far. Raises JobFailed if the deciding metric is not among them.
        """
        found = scores.get(self._spec.on[0]) if self._spec.on else None
        if not found:
            return False
        self.last, self._scored = (value := self._deciding(found)), number
        if value is None or (self.best is not None and not self._better(value, self.best.value)):
            self._since_best += 1
            return False
        self._reached = self._spec.target is not None and not self._better(self._spec.target, value)
        self.best, self._since_best = Best(number, value), 0
        return True

    @property
    def standing(self) -> Standing:
        """The scores so far."""
        best = (self.best.value, self.best.round) if self.best else (None, 0)
        return Standing(self.metric, self.last, *best)

    @property
    def end(self) -> str:
        """The reason why the job ends early, "" to go on."""
        spec, best = self._spec, self.best
        if self._reached:
            return f"{self.metric} has reached {spec.target:g}"
        if spec.patience is not None and self._since_best >= spec.patience:
            last = f" on {best.value:.4f} of round {best.round}" if best else ""
            return f"{self.metric} has not improved{last}"
        return ""

    @property
    def fault(self) -> str:
        """The reason why the last model is of no use, "" if nothing tells so."""
        if not self._scored or self.last is not None:
            return ""
        best = f"; the best model is that of round {self.best.round}" if self.best else ""
        return f"{self.metric} is not finite after round {self._scored}: try a lower learning rate{best}"

    def _deciding(self, found: dict[str, float | None]) -> float | None:
        """Return the value of the deciding metric, None if it is not finite."""
        self.metric = self.metric or ("accuracy" if "accuracy" in found else "loss")
        if self.metric not in found:
            known = ", ".join(sorted(found))
            raise JobFailed(
                f"evaluate: metric: there is no '{self.metric}' on the {self._spec.on[0]}; known: {known}"
            )
        return found[self.metric]

    @property
    def _smaller(self) -> bool:
        return self._spec.mode == "min" or (not self._spec.mode and self.metric == "loss")

    def _better(self, one: float, other: float) -> bool:
        return one < other if self._smaller else one > other

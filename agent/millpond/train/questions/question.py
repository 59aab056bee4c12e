# SPDX-License-Identifier: Apache-2.0
"""Pure: questions about samples, and the sums of whole numbers that answer them.

The asker gives all bounds: none is taken from the data, so that a bound tells nothing of it. A sample adds to
the sums by its one value of a column; those of an answer are

| kind      | sums                                                                            |
|-----------|---------------------------------------------------------------------------------|
| count     | samples with a value, and without                                               |
| mean      | samples with a value, and without; values of the range 0 to 1, and their squares |
| histogram | samples without a value, below the bins, above them, and in each bin            |
| confusion | samples beyond the ``labels``, and by label and predicted label                 |
| auc       | samples without a label or score; by bin of their scores the others, the positive ones |

in UNITs: a sample counts one UNIT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from millpond.base.errors import ConfigError
from millpond.base.keys import Key, check_keys

Kind = Literal["count", "mean", "histogram", "confusion", "auc"]
SCORING: tuple[Kind, ...] = ("confusion", "auc")
"""The questions about what a model predicts of samples."""
AskedKind = Literal["count", "mean", "histogram", "quantiles", "confusion", "auc"]
"""What a user asks for: quantiles are found by histograms."""
MOST_ROUNDS = 32
"""Histograms for quantiles."""
UNIT = 1 << 20
"""The whole number that stands for 1 in sums: noise of whole numbers is much finer than a sample."""
MOST_BINS = 1 << 16
MOST_LABELS = 1 << 8
MOST_SAMPLES = 1 << 32
"""The most samples of one device: the sums of 1024 devices are within 2**62."""
_BESIDE = 3  # the sums before those of bins


@dataclass(frozen=True, slots=True)
class DataQuestion:
    """A question about the values of a ``column``, "" for the samples themselves. Values are clipped to
    ``low`` and ``high``; a histogram divides that range into ``bins`` of equal width, or at ``edges`` that
    are given. ``classes`` are the names of labels in order, where labels have names. What a model predicts is
    compared with ``labels`` labels from 0 on, or its scores, 0 to 1, of the ``positive`` label are in bins.
    """

    kind: Kind
    column: str = ""
    low: float = 0.0
    high: float = 1.0
    bins: Annotated[int, Key(least=1, most=MOST_BINS)] = 1
    classes: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()
    labels: Annotated[int, Key(least=2, most=MOST_LABELS)] = 2
    positive: Annotated[int, Key(least=0, most=MOST_LABELS)] = 1

    def __str__(self) -> str:
        if self.kind == "confusion":
            return f"confusion of {self.labels} labels"
        if self.kind == "auc":
            return f"auc of label {self.positive}, {self.bins} bins"
        if self.kind == "count":
            return f"count of '{self.column}'" if self.column else "count"
        bins = f", {self.bin_count} bins" if self.kind == "histogram" else ""
        return f"{self.kind} of '{self.column}' from {self.low:g} to {self.high:g}{bins}"

    @property
    def bin_count(self) -> int:
        """The number of bins of a histogram."""
        return len(self.edges) - 1 if self.edges else self.bins

    @property
    def words(self) -> int:
        """The number of sums."""
        scored = {"confusion": 1 + self.labels**2, "auc": 1 + 2 * self.bins}
        return ({"count": 2, "mean": 4} | scored).get(self.kind, _BESIDE + self.bin_count)

    @property
    def sensitivity(self) -> float:
        """The largest L2 norm of what one sample adds to the sums."""
        return UNIT * (math.sqrt(3) if self.kind == "mean" else 1.0)


def check(question: DataQuestion) -> None:
    """Raise ConfigError for a question that makes no sense."""
    check_keys(question, "the question")
    if not -math.inf < question.low < question.high < math.inf:
        raise ConfigError(f"bounds: {question.low:g} and {question.high:g} are no range of numbers")
    if not math.isfinite(question.high - question.low):
        raise ConfigError("bounds: the range is too large for a number")
    if edges := question.edges:
        ends = (question.low, question.high)
        if not 2 <= len(edges) <= MOST_BINS + 1 or (edges[0], edges[-1]) != ends:
            raise ConfigError("edges: they are those of 1 to 65536 bins between the bounds")
        if not all(one < other for one, other in pairwise(edges)):
            raise ConfigError("edges: each is greater than the one before")
    if question.kind in ("mean", "histogram") and not question.column:
        raise ConfigError(f"column: a {question.kind} is of the values of a column")

# SPDX-License-Identifier: Apache-2.0
"""Pure: questions about samples, and the sums of whole numbers that answer them.

The asker gives all bounds: none is taken from the data, so that a bound tells nothing of it. A sample adds to
the sums by its one value of a column; those of an answer are

| kind      | sums                                                                                       |
|-----------|--------------------------------------------------------------------------------------------|
| count     | samples with a value, and without                                                          |
| mean      | samples with a value, and without; values of the range 0 to 1, and their squares: in UNITs |
| histogram | samples without a value, below ``low``, above ``high``, and in each bin                    |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from millpond.base.errors import ConfigError
from millpond.base.keys import Key, check_keys

Kind = Literal["count", "mean", "histogram"]
KINDS: tuple[Kind, ...] = get_args(Kind)
UNIT = 1 << 20
"""The whole number that stands for 1 in the sums of a mean."""
MOST_BINS = 1 << 16
MOST_SAMPLES = 1 << 32
"""The most samples of one device: the sums of 1024 devices are within 2**62."""
_BESIDE = 3  # the sums before those of bins


@dataclass(frozen=True, slots=True)
class DataQuestion:
    """A question about the values of a ``column``, "" for the samples themselves. Values are clipped to
    ``low`` and ``high``; a histogram divides that range into ``bins`` of equal width. ``classes`` are the
    names of labels in order, where labels have names.
    """

    kind: Kind
    column: str = ""
    low: float = 0.0
    high: float = 1.0
    bins: Annotated[int, Key(least=1, most=MOST_BINS)] = 1
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "count":
            return f"count of '{self.column}'" if self.column else "count"
        bins = f", {self.bins} bins" if self.kind == "histogram" else ""
        return f"{self.kind} of '{self.column}' from {self.low:g} to {self.high:g}{bins}"

    @property
    def words(self) -> int:
        """The number of sums."""
        return {"count": 2, "mean": 4}.get(self.kind, _BESIDE + self.bins)

    @property
    def sensitivity(self) -> float:
        """The largest L2 norm of what one sample adds to the sums."""
        return math.sqrt(3) * UNIT if self.kind == "mean" else 1.0

    @property
    def unit(self) -> int:
        """The whole number by which a sample is counted once."""
        return UNIT if self.kind == "mean" else 1


def check(question: DataQuestion) -> None:
    """Raise ConfigError for a question that makes no sense."""
    check_keys(question, "the question")
    if not -math.inf < question.low < question.high < math.inf:
        raise ConfigError(f"bounds: {question.low:g} and {question.high:g} are no range of numbers")
    if not math.isfinite(question.high - question.low):
        raise ConfigError("bounds: the range is too large for a number")
    if question.kind != "count" and not question.column:
        raise ConfigError(f"column: a {question.kind} is of the values of a column")

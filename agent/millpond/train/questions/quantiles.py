# SPDX-License-Identifier: Apache-2.0
"""Pure: quantiles by histograms: each has more bins where a quantile lies, by the sums of the one before.

The bounds of the next histogram follow from sums over all devices alone. With noise in these a quantile may
be sought in the wrong bin; the counts of all other bins stay in each histogram, so that no step takes the
one before for true.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from millpond.base.errors import ConfigError
from millpond.train.questions.answers import samples
from millpond.train.questions.question import MOST_BINS, UNIT, DataQuestion
from millpond.train.questions.sums import edges

_ROUNDING = UNIT * 1e-6  # a share such as 0.7 of 10 values must not be more than 7


@dataclass(frozen=True, slots=True)
class Quantile:
    """The least ``value`` that a ``share`` of all values do not exceed: it lies in ``low`` to ``high``, and
    ``value`` is the middle of these.
    """

    share: float
    value: float
    low: float
    high: float


def check_shares(shares: Sequence[float], bins: int) -> None:
    """Raise ConfigError for shares that are none, or too many for histograms of these ``bins``."""
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ConfigError("quantiles: they are shares of the values, 0 to 1")
    if bins < 2 or (len(shares) + 1) * bins + 1 > MOST_BINS:
        raise ConfigError(f"bins: {bins} are none, or too many, for {len(shares)} quantiles")


def quantiles(question: DataQuestion, words: Sequence[int], shares: Sequence[float]) -> list[Quantile]:
    """Return the quantiles by the sums of a histogram; none if there are no values. Those of values beyond
    the bounds are at the bounds.
    """
    _, below, above, *counts = words
    ends = edges(question)
    cumulated = below + np.cumsum(np.maximum(np.array(counts, np.int64), 0))
    total = int(cumulated[-1]) + above
    if samples(total) <= 0:
        return []
    found = []
    for share in shares:
        wanted = max(share * total - _ROUNDING, 1)
        place = int(np.searchsorted(cumulated, wanted))
        if below >= wanted:
            low = high = question.low
        elif place == len(counts):
            low = high = question.high
        else:
            low, high = float(ends[place]), float(ends[place + 1])
        found.append(Quantile(share, low + (high - low) / 2, low, high))
    return found


def refined(question: DataQuestion, found: Sequence[Quantile]) -> DataQuestion:
    """Return the histogram with bins within the bins of these quantiles, and one bin between each two of
    them.
    """
    ends = {question.low, question.high}
    for each in found:
        ends.update(np.linspace(each.low, each.high, question.bins + 1).tolist())
    return replace(question, edges=tuple(sorted(end for end in ends if math.isfinite(end))))

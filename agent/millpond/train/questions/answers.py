# SPDX-License-Identifier: Apache-2.0
"""Pure: the figures that the sums of a question tell, with or without noise in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millpond.train.questions.question import UNIT, DataQuestion
from millpond.train.questions.sums import edges


@dataclass(frozen=True, slots=True)
class Bin:
    """The samples of a bin from ``low`` to ``high``; a sum with noise may be less than none."""

    low: float
    high: float
    count: int


def figures(question: DataQuestion, words: Sequence[int]) -> dict[str, Any]:
    """Return the figures of an answer by name, None for one that sums of no samples do not tell."""
    if question.kind == "mean":
        return _mean(question, words)
    if question.kind == "count":
        return {"count": words[0], "missing": words[1]}
    missing, below, above, *counts = words
    ends = edges(question).tolist()
    bins = [Bin(*each) for each in zip(ends, ends[1:], counts, strict=False)]
    return {"count": sum(words) - missing, "missing": missing, "below": below, "above": above, "bins": bins}


def _mean(question: DataQuestion, words: Sequence[int]) -> dict[str, Any]:
    count, missing, total, squares = (word / UNIT for word in words)
    found: dict[str, Any] = {
        "count": round(count),
        "missing": round(missing),
        "mean": None,
        "deviation": None,
    }
    if count > 0:
        width, mean = question.high - question.low, total / count
        found["mean"] = question.low + width * mean
        found["deviation"] = width * math.sqrt(max(squares / count - mean * mean, 0.0))
    return found

# SPDX-License-Identifier: Apache-2.0
"""Pure: the figures that the sums of a question tell, with or without noise in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millpond.train.questions.question import SCORING, UNIT, DataQuestion
from millpond.train.questions.scores import auc, confusion
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
        return {"count": samples(words[0]), "missing": samples(words[1])}
    if question.kind in SCORING:
        told = confusion if question.kind == "confusion" else auc
        return told(question, [samples(word) for word in words])
    missing, below, above, *counts = map(samples, words)
    ends = edges(question).tolist()
    bins = [Bin(*each) for each in zip(ends, ends[1:], counts, strict=False)]
    count = below + above + sum(counts)
    return {"count": count, "missing": missing, "below": below, "above": above, "bins": bins}


def samples(word: int) -> int:
    """Return the number of samples that a sum counts, to the nearest one."""
    return (word + UNIT // 2) // UNIT


def _mean(question: DataQuestion, words: Sequence[int]) -> dict[str, Any]:
    count, missing, total, squares = words
    found: dict[str, Any] = {"count": samples(count), "missing": samples(missing)}
    found |= {"mean": None, "deviation": None}
    if count > 0:
        width, mean = question.high - question.low, total / count
        found["mean"] = question.low + width * mean
        found["deviation"] = width * math.sqrt(max(squares / count - mean * mean, 0.0))
    return found

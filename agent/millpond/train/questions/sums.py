# SPDX-License-Identifier: Apache-2.0
"""Pure: the sums of a question over samples, and whether sums can be such."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.train.questions.question import MOST_SAMPLES, UNIT, DataQuestion

Words = NDArray[np.int64]
Values = NDArray[np.float64]


def edges(question: DataQuestion) -> Values:
    """Return the edges of the bins of a histogram; the last bin has its upper edge, too."""
    if question.edges:
        return np.array(question.edges, np.float64)
    return np.linspace(question.low, question.high, question.bins + 1)


def sums(question: DataQuestion, values: Values) -> Words:
    """Return the sums over samples with these ``values``, NaN for those without one."""
    known = values[~np.isnan(values)]
    missing = len(values) - len(known)
    if question.kind == "count":
        return np.array([len(known), missing], np.int64) * UNIT
    if question.kind == "mean":
        part = (np.clip(known, question.low, question.high) - question.low) / (question.high - question.low)
        scaled = np.rint(part * UNIT).astype(np.int64)
        squares = np.rint(part * part * UNIT).astype(np.int64)
        return np.array([len(known) * UNIT, missing * UNIT, scaled.sum(), squares.sum()], np.int64)
    beside = missing, int((known < question.low).sum()), int((known > question.high).sum())
    counted = np.histogram(known[np.isfinite(known)], edges(question))[0]
    return np.concatenate([np.array(beside), counted]).astype(np.int64) * UNIT


def fault(question: DataQuestion, words: Words, samples: int) -> str:
    """Return why sums are none of so many samples, "" if they may be."""
    if len(words) != question.words:
        return f"an answer of {len(words)} sums, not {question.words}"
    if not 0 <= samples <= MOST_SAMPLES:
        return f"{samples} samples"
    counted = words[:2] if question.kind == "mean" else words
    if (words < 0).any() or (words > samples * UNIT).any():
        return "a sum that is beyond its bound"
    return "" if sum(counted.tolist()) == samples * UNIT else "sums that are not of its samples"

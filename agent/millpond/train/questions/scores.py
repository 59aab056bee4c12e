# SPDX-License-Identifier: Apache-2.0
"""Pure: what a model's predictions add to the sums of a question, and what these sums tell of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millpond.train.questions.question import UNIT, DataQuestion
from millpond.train.questions.sums import Values, Words


def score_sums(question: DataQuestion, labels: Values, outputs: Values) -> Words:
    """Return the sums over samples with these ``labels`` [N] and ``outputs`` of a model [N, C], logits; those
    of one output are of label 1.
    """
    if outputs.shape[1] == 1:
        outputs = np.concatenate([np.zeros_like(outputs), outputs], axis=1)
    found = _confused if question.kind == "confusion" else _scored
    return np.bincount(found(question, labels, outputs), minlength=question.words).astype(np.int64) * UNIT


def _confused(question: DataQuestion, labels: Values, outputs: Values) -> Words:
    """Return the place among the sums of each sample."""
    predicted, most = outputs.argmax(axis=1), question.labels
    known = (labels >= 0) & (labels < most) & (labels % 1 == 0) & (predicted < most)
    known &= np.isfinite(outputs).all(axis=1)
    return np.where(known, 1 + np.where(known, labels, 0).astype(np.int64) * most + predicted, 0)


def _scored(question: DataQuestion, labels: Values, outputs: Values) -> Words:
    if question.positive >= outputs.shape[1]:
        return np.zeros(len(labels), np.int64)
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    scores = powers[:, question.positive] / powers.sum(axis=1)
    known = np.isfinite(scores) & ~np.isnan(labels)
    bins = np.minimum(np.where(known, scores, 0) * question.bins, question.bins - 1).astype(np.int64)
    return np.where(known, 1 + bins + question.bins * (labels == question.positive), 0)


def confusion(question: DataQuestion, counts: Sequence[int]) -> dict[str, Any]:
    """Return the matrix [label][predicted], the accuracy, and recall and precision by label, None where there
    are no samples.
    """
    table = np.array(counts[1:], np.float64).reshape(question.labels, question.labels)
    right = table.diagonal()
    return {
        "count": int(table.sum()),
        "other": counts[0],
        "accuracy": _ratio(right.sum(), table.sum()),
        "matrix": table.astype(np.int64).tolist(),
        "recall": [_ratio(*pair) for pair in zip(right, table.sum(axis=1), strict=True)],
        "precision": [_ratio(*pair) for pair in zip(right, table.sum(axis=0), strict=True)],
    }


def auc(question: DataQuestion, counts: Sequence[int]) -> dict[str, Any]:
    """Return the area under the ROC curve (the share of pairs of a positive sample and another one in which
    the positive one has the greater score), between the ``low`` and ``high`` that it can be: of pairs in one
    bin half counts. None without such pairs.
    """
    negatives, positives = np.array(counts[1:], np.float64).reshape(2, question.bins)
    below = np.cumsum(negatives) - negatives
    pairs, within = positives.sum() * negatives.sum(), (positives * negatives).sum()
    lower = (positives * below).sum()
    return {
        "positive": int(positives.sum()),
        "negative": int(negatives.sum()),
        "missing": counts[0],
        "auc": _ratio(lower + within / 2, pairs),
        "low": _ratio(lower, pairs),
        "high": _ratio(lower + within, pairs),
    }


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole > 0 else None

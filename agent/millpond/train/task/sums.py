# SPDX-License-Identifier: Apache-2.0
"""Pure: metrics as sums and counts, which add up exactly over batches and machines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from millpond.base.errors import LocalError
from millpond.train import error_texts

Sums = dict[str, tuple[float, float]]
"""For each metric its sum and its count: their ratio is the mean, F1 (2 tp over 2 tp + fp + fn) or IoU."""

LOSS = "loss"
MOST_METRICS = 32
"""The most metrics of a task; their names are identifiers of at most 32 letters."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


def checked(found: object) -> Sums:
    """Return a task's metrics as pairs of floats. Raises LocalError for what is none."""
    if not isinstance(found, Mapping):
        raise LocalError(error_texts.NO_METRICS())
    sums: Sums = {}
    for name, pair in found.items():
        try:
            total, count = pair
            sums[name] = float(total), float(count)
        except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several values
            raise LocalError(error_texts.NO_SUM()) from None
    if not is_declared(sums):
        raise LocalError(error_texts.UNNAMED_METRICS(MOST_METRICS))
    return sums


def is_declared(sums: Mapping[str, object]) -> bool:
    """Return whether names are such that may leave a device: few and short identifiers."""
    return len(sums) <= MOST_METRICS and all(isinstance(name, str) and _NAME.fullmatch(name) for name in sums)


def add(total: Sums, more: Mapping[str, tuple[float, float]]) -> None:
    """Add sums and counts to ``total``."""
    for name, (value, count) in more.items():
        before = total.get(name, (0.0, 0.0))
        total[name] = before[0] + value, before[1] + count


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return each sum over its count, NaN where nothing was counted."""
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}

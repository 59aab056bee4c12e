# SPDX-License-Identifier: Apache-2.0
"""Pure: the rows that every benchmark writes, and the aggregation of repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: median and range of repeats; None where it could not be taken, and ``what`` says why."""

    figure: str
    what: str
    value: float | None
    low: float | None
    high: float | None
    unit: str
    peer: str | None
    repeats: int
    emulation: str | None


def summary(
    figure: str, what: str, values: Sequence[float], unit: str, *, peer: str | None, emulation: str | None
) -> Row:
    """The row of ``values``, one per repeat."""
    if not values:
        return Row(figure, what, None, None, None, unit, peer, 0, emulation)
    low, middle, high = (_rounded(value) for value in (min(values), statistics.median(values), max(values)))
    return Row(figure, what, middle, low, high, unit, peer, len(values), emulation)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

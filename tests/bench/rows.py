# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the rows that every benchmark writes, and the aggregation of repeats."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


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
    figure: str,
    what: str,
    values: Sequence[float],
    unit: str,
    *,
    peer: str | None = None,
    emulation: str | None = None,
) -> Row:
    """The row of ``values``, one per repeat."""
    if not values:
        return Row(figure, what, None, None, None, unit, peer, 0, emulation)
    low, middle, high = (_rounded(value) for value in (min(values), statistics.median(values), max(values)))
    return Row(figure, what, middle, low, high, unit, peer, len(values), emulation)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs, repeat by repeat."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def write(rows: Iterable[Row], path: Path) -> None:
    """Write the file of a benchmark, whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    fresh.rename(path)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

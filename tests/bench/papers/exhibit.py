# SPDX-License-Identifier: Apache-2.0
"""Pure: defines an exhibit: a table or figure of a paper, with the paper's values beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.experiment import HeatMap, Panel, Run

DIGITS = 4


@dataclass(frozen=True, slots=True)
class Value:
    """One number of the paper beside ours: a row of an exhibit.

    ``paper`` is as printed, None where the paper has no number. ``ours`` is the median of ``repeats``; None
    where there is none, and ``what`` says why. ``low`` and ``high`` are the range of the repeats.
    """

    what: str
    unit: str
    paper: float | str | None
    ours: float | str | None
    low: float | None = None
    high: float | None = None
    repeats: int = 1


def measured(what: str, unit: str, paper: float | str | None, values: Sequence[float]) -> Value:
    """Return the row of the values of all repeats; of none, a row without a value of ours."""
    if not values:
        return Value(what, unit, paper, None, repeats=0)
    low, middle, high = (rounded(value) for value in (min(values), statistics.median(values), max(values)))
    return Value(what, unit, paper, middle, low, high, len(values))


def computed(what: str, unit: str, paper: float | str | None, ours: float | str | None) -> Value:
    """Return the row of a value that is computed, not measured: it has no range."""
    return Value(what, unit, paper, rounded(ours) if isinstance(ours, float) else ours)


def rounded(value: float) -> float:
    """Return a number with as many digits as pages show."""
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True, slots=True)
class Shown:
    """What an exhibit shows: its rows; what is emulated and how, "" for nothing; one sentence why ours
    differs from the paper, "" where it does not; and panels in the paper's own axes.
    """

    rows: tuple[Value, ...]
    emulation: str
    difference: str
    panels: tuple[Panel | HeatMap, ...] = ()


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A table or figure of a paper: ``name`` is ``fig-6``, ``title`` begins with the paper's own name for it.

    ``measure`` makes it, within ``seconds``; a quick run has a limit of its own.
    """

    name: str
    title: str
    measure: Callable[[Run], Shown]
    seconds: float = 900


@dataclass(frozen=True, slots=True)
class Paper:
    """All exhibits of a paper, in its order; ``name`` is also that of its page in docs/papers."""

    name: str
    title: str
    exhibits: tuple[Exhibit, ...]


def choose(papers: Sequence[Paper], only: Sequence[str]) -> list[tuple[Paper, Exhibit]]:
    """Return the exhibits that are named as ``PAPER`` or ``PAPER/EXHIBIT``, with commas between names; all
    without names. Raises ValueError for a name that none has.
    """
    every = [(paper, exhibit) for paper in papers for exhibit in paper.exhibits]
    wanted = [name for text in only for name in text.split(",") if name]
    known = {paper.name for paper in papers} | {key(paper, exhibit) for paper, exhibit in every}
    for name in wanted:
        if name not in known:
            names = ", ".join(sorted(known))
            raise ValueError(f"no paper or exhibit is called {name!r}: it is one of {names}")
    return [pair for pair in every if not wanted or {pair[0].name, key(*pair)} & set(wanted)]


def key(paper: Paper, exhibit: Exhibit) -> str:
    """Return the name of an exhibit among those of all papers."""
    return f"{paper.name}/{exhibit.name}"

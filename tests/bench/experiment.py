# SPDX-License-Identifier: Apache-2.0
"""Pure: defines an experiment by its results: rows, and panels of one picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench.rows import Row

Role = Literal["millpond", "paper", "stannis", "untuned", "peer", "limit"]
"""Whose figures a line shows; it decides on the colour."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points of a panel, joined unless ``marks``. ``faint`` is for the same under other circumstances."""

    role: Role
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    marks: bool = False
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram; ``event`` is an x at which something happened, and what."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    event: tuple[float, str] | None = None
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A diagram of ``values`` by row and column, whose names are ``ys`` and ``xs``; ``unit`` is theirs. Cells
    at (row, column) that are ``marked`` have a text below their value.
    """

    title: str
    x: str
    y: str
    unit: str
    xs: Sequence[object]
    ys: Sequence[object]
    values: Sequence[Sequence[float]]
    marked: Mapping[tuple[int, int], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Findings:
    """The rows of an experiment, and panels of the picture, if it has any."""

    rows: tuple[Row, ...]
    panels: tuple[Panel | HeatMap, ...] = ()


class Unmeasured(Exception):
    """The text says why this machine, or what is installed on it, cannot be measured on."""

    def __init__(self, why: str, *figures: str) -> None:
        super().__init__(why)
        self.figures = figures
        """The figures that have no value then; none for those of the experiment."""


@dataclass(frozen=True, slots=True)
class Run:
    """How an experiment is done: ``quick`` is short and coarse; ``say`` tells a person how far it is;
    ``repeats`` are those of each measurement, where an experiment has no number of its own.
    """

    quick: bool
    say: Callable[[str], None]
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Experiment:
    """``name`` is what it is chosen by, ``title`` heads its table; ``measure`` does it. ``seconds`` limits a
    whole one that takes longer than others. ``figures`` have no value where it cannot be measured, the one
    that is called as the experiment if there are none.
    """

    name: str
    title: str
    measure: Callable[[Run], Findings | Sequence[Row]]
    seconds: float | None = None
    figures: tuple[str, ...] = ()


def choose(experiments: Sequence[Experiment], only: Sequence[str]) -> list[Experiment]:
    """Those that are named, all without names; a name may be a list with commas. Raises ValueError."""
    wanted = [name for text in only for name in text.split(",") if name]
    known = [experiment.name for experiment in experiments]
    for name in wanted:
        if name not in known:
            raise ValueError(f"no experiment is called {name!r}: it is one of {', '.join(known)}")
    return [experiment for experiment in experiments if not wanted or experiment.name in wanted]

# SPDX-License-Identifier: Apache-2.0
"""Edge: ``millpond simulate`` with a table ``[tiers]``: mini-epochs over a slow and a fast tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.table import Table

from millpond.base import toml
from millpond.base.errors import ConfigError
from millpond.base.keys import Key
from millpond.data.tier.tier_model import TieredSystem, TieredTraining, predicted, simulated
from millpond.host.terminal import tables

MOST_MINI_EPOCHS = 1_000_000


@dataclass(frozen=True, slots=True)
class AdaptiveRepeats:
    """Repetitions that differ by mini-epoch, drawn from a gamma distribution."""

    name: str
    mean: Annotated[float, Key(above=0, most=1e30)]
    deviation: Annotated[float, Key(above=0, most=1e30)]


@dataclass(frozen=True, slots=True)
class TiersSpec:
    """A data set of ``samples`` in ``mini_epochs`` over two tiers, see ``TieredSystem``; each of ``repeats``
    is simulated.
    """

    peak: Annotated[float, Key(above=0, most=1e30)]
    sample_bytes: Annotated[float, Key(above=0, most=1e30)]
    slow: Annotated[float, Key(above=0, most=1e30)]
    fast: Annotated[float, Key(above=0, most=1e30)]
    samples: int
    mini_epochs: int
    repeats: tuple[float, ...] = (1, 2, 4, 8, 16)
    adaptive: tuple[AdaptiveRepeats, ...] = ()
    seed: int = 1


@dataclass(frozen=True, slots=True)
class TiersSimulation:
    """The file of a simulation of tiers."""

    tiers: TiersSpec = field()


@dataclass(frozen=True, slots=True)
class TiersResult:
    """The outcome for some ``repeats``, by the formula and by events."""

    repeats: str
    predicted: TieredTraining
    simulated: TieredTraining


def read(path: Path) -> TiersSpec:
    """Read a simulation's file. Raises ConfigError."""
    found = toml.read(TiersSimulation, path).tiers
    if not 0 < (least := min(found.repeats, default=1.0)) < 1e30:
        raise ConfigError(f"{path.name}: tiers: repeats: {least} is not greater than 0")
    if not 1 < found.mini_epochs <= min(found.samples, MOST_MINI_EPOCHS):
        most = min(found.samples, MOST_MINI_EPOCHS)
        raise ConfigError(f"{path.name}: tiers: mini_epochs: {found.mini_epochs} is not between 2 and {most}")
    return found


def run(spec: TiersSpec) -> list[TiersResult]:
    """Compute each outcome twice."""
    system = TieredSystem(spec.peak, spec.sample_bytes, spec.slow, spec.fast)
    size, rng = spec.samples // spec.mini_epochs, np.random.default_rng(spec.seed)
    wanted = {f"{times:g}": np.full(spec.mini_epochs, times) for times in spec.repeats}
    for each in spec.adaptive:
        shape = (each.mean / each.deviation) ** 2
        drawn = rng.gamma(shape, each.mean / shape, spec.mini_epochs)
        wanted[f"{each.name}, {each.mean:g} on average"] = np.maximum(np.rint(drawn), 1.0)
    return [
        TiersResult(name, predicted(system, times.tolist()), simulated(system, times.tolist(), size))
        for name, times in wanted.items()
    ]


def show(results: list[TiersResult]) -> Table:
    """Return the results as a table: by the formula, and by events."""
    headings = ["repeats", "samples/s", "by events", "read GB/s", "by events", "waiting", "by events"]
    table = tables.figures(*headings)
    for row in results:
        one, other = row.predicted, row.simulated
        table.add_row(
            row.repeats,
            f"{one.throughput:.0f}",
            f"{other.throughput:.0f}",
            f"{one.read / 1e9:.1f}",
            f"{other.read / 1e9:.1f}",
            f"{one.stall:.1%}",
            f"{other.stall:.1%}",
        )
    return table

# SPDX-License-Identifier: Apache-2.0
"""Edge: ``millpond simulate`` with a table ``[roofline]``: what networks reach where reading is the limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table

from millpond.base import toml
from millpond.base.errors import ConfigError
from millpond.base.keys import Key
from millpond.data.tier.roofline import NetworkPoint, Roofline, point
from millpond.host.terminal import tables

_Positive = Annotated[float, Key(least=1e-30, most=1e30)]


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """A network that takes ``operations`` to train on one sample of ``sample_bytes``."""

    name: str
    operations: _Positive
    sample_bytes: _Positive


@dataclass(frozen=True, slots=True)
class RooflineSpec:
    """Processors of ``peak`` operations per second together, a ``bandwidth`` in bytes per second, and the
    ``networks`` that are trained.
    """

    peak: _Positive
    bandwidth: _Positive
    networks: tuple[NetworkSpec, ...]


@dataclass(frozen=True, slots=True)
class RooflineFile:
    """The file of a roofline."""

    roofline: RooflineSpec


@dataclass(frozen=True, slots=True)
class RooflineResult:
    """A network by its name, and where it lies."""

    network: str
    point: NetworkPoint


def read(path: Path) -> RooflineSpec:
    """Read a roofline's file. Raises ConfigError."""
    found = toml.read(RooflineFile, path).roofline
    if not found.networks:
        raise ConfigError(f"{path.name}: roofline: networks: there are none")
    return found


def run(spec: RooflineSpec) -> list[RooflineResult]:
    """Compute where each network lies, those that need the most bandwidth first."""
    system = Roofline(spec.peak, spec.bandwidth)
    found = [
        RooflineResult(each.name, point(system, each.operations, each.sample_bytes)) for each in spec.networks
    ]
    return sorted(found, key=lambda result: -result.point.needed)


def show(results: list[RooflineResult]) -> Table:
    """Return the results as a table."""
    headings = ["network", "operations/byte", "needs GB/s", "reaches of peak", "samples/s", "limit"]
    table = tables.figures(*headings)
    for row in results:
        own = row.point
        table.add_row(
            row.network,
            f"{own.intensity:,.0f}",
            f"{own.needed / 1e9:,.1f}",
            f"{own.share:.1%}",
            f"{own.samples:,.0f}",
            "reading" if own.share < 1 else "computing",
        )
    return table

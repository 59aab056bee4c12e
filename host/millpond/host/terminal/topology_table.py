# SPDX-License-Identifier: Apache-2.0
"""Pure: what 'millpond topology' prints."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from millpond.host.api.topology import TopologyInfo


def show(found: TopologyInfo, size: int) -> Group:
    """Return the links and the reductions as tables."""
    between = "LAN" if found.lan else "other devices, through the host"
    links = Table("device", f"to the {between}", "a hop", "to the host", "a hop", box=None)
    for name, link in found.links.items():
        links.add_row(
            name,
            _rate(link.rate),
            _milliseconds(link.latency),
            _rate(link.uplink_rate),
            _milliseconds(link.uplink_latency),
        )
    best = min((row.measured for row in found.reductions if row.measured is not None), default=None)
    rows = Table("topology", "predicted", "measured", "over the best", box=None)
    for row in found.reductions:
        over = "" if best is None or row.measured is None else f"{row.measured / best:.2f}"
        measured = "-" if row.measured is None else f"{row.measured:.4f} s"
        rows.add_row(row.name, f"{row.predicted:.4f} s", measured, over)
    shared = "" if found.shared is None else f"; all links together carry {_rate(found.shared)}"
    heading = f"mean of {size} float32 values of each device, and the way back{shared}"
    return Group(links, Text(""), Text(heading), rows)


def _rate(value: float) -> str:
    return f"{value * 8e-6:.0f} Mbit/s"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"

# SPDX-License-Identifier: Apache-2.0
"""Pure: prints a run's rows as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from bench.table import aligned
from bench.tunnel.figures import relay
from bench.tunnel.record import Record

_COLUMNS = (
    ("gbps", "Gbit/s", "{:.2f}"),
    ("cpu_per_gb", "CPU s/GB", "{:.2f}"),
    ("cpu_per_gb_all", "+ends", "{:.2f}"),
    ("sleeps_per_gb", "wakes/GB", "{:.0f}"),
    ("rtt_p50", "p50 us", "{:.1f}"),
    ("rtt_p99", "p99 us", "{:.1f}"),
    ("pps", "UDP/s", "{:.0f}"),
    ("idle_cpu_percent", "idle %", "{:.3f}"),
)
EXPLANATION = (
    "Medians; for throughput also range, and median over the better C relay's in the same repeat. TCP: 4",
    "streams, each direction in turn. CPU: of the processes that carry the bytes; +ends: with the two",
    "programs that send and receive. wakes: times that a carrier slept. p50, p99: 64-byte TCP round trip.",
    "UDP/s: 64-byte datagrams delivered, 256 under way at most. idle: both ends, percent of a core.",
)


def routes_table(record: Record, labels: Mapping[str, str]) -> list[str]:
    """One line per route, and one for each that is missing."""
    columns = [column for column in _COLUMNS if any(record.values(column[0], route) for route in labels)]
    lines = [["", "x relay", "range", *(title for _, title, _ in columns)]]
    for route, label in labels.items():
        cells = [_cell(record.values(quantity, route), form) for quantity, _, form in columns]
        if any(cells):
            over = _cell(record.ratios("gbps", route, relay(record, "gbps")), "{:.2f}")
            lines.append([label, over, _range(record.values("gbps", route)), *cells])
    missing = [f"{labels[route]}: {reason}" for route, reason in record.missing.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [*(aligned(line, widths, left=1) for line in lines), *missing]


def _cell(values: Sequence[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else ""


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f}-{max(values):.1f}" if values else ""

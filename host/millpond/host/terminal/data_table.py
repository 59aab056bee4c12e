# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): what 'millpond data explain' prints."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from millpond.host.records.data_explanation import DataExplanation, MiniEpochChoice, WorkerData
from millpond.host.terminal.printing import size
from millpond.train.protocol import StreamTiming


def show(found: DataExplanation) -> Group:
    """Return the workers as a table, and tables of those that have mini-epochs or streams."""
    rounds = f"{found.unit} {found.first}"
    if found.last != found.first:
        rounds = f"{found.unit}s {found.first} to {found.last}"
    passes = f"{found.passes} epochs each, " if found.passes > 1 else ""
    heading = f"job {found.id} {found.name}, {rounds}: {passes}prefetch = {found.prefetch}"
    parts: list[Text | Table] = [Text(heading), _workers(found)]
    mini_epochs = {name: own.mini_epochs for name, own in found.workers.items() if own.mini_epochs}
    if mini_epochs:
        parts += [Text(""), _mini_epochs(mini_epochs)]
    streams = {name: own.stream for name, own in found.workers.items() if own.stream}
    if streams:
        parts += [Text(""), _streams(streams)]
    return Group(*parts)


def _workers(found: DataExplanation) -> Table:
    headings = ["worker", "a sample", "read in", "at", "trained on in", "waits for", "predicted", "measured"]
    whole = any(own.mini_epochs for own in found.workers.values())
    table = _table(*headings, *(["with batches"] if whole else []))
    for name, own in found.workers.items():
        cells = [
            name,
            size(own.bytes),
            duration(own.reading),
            "-" if own.rate is None else f"{size(own.rate)}/s",
            duration(own.training),
            _awaited(own),
            percent(own.predicted),
            percent(own.waited),
        ]
        table.add_row(*cells, *([percent(own.all_waits)] if whole else []))
    return table


def _awaited(own: WorkerData) -> str:
    return "the stream" if own.stream else "mini-epochs" if own.mini_epochs else "batches"


def _mini_epochs(found: dict[str, MiniEpochChoice]) -> Table:
    table = _table("worker", "mini-epochs", "samples", "[tier] fast holds", "repeats", "hidden by")
    for name, own in found.items():
        table.add_row(
            name,
            f"{own.count:.3g}",
            f"{own.size:.0f}",
            f"2 x {own.fitting}",
            f"{own.repeats:.3g}",
            f"{own.hiding:.2g} repeats",
        )
    return table


def _streams(found: dict[str, StreamTiming]) -> Table:
    table = _table("worker", "chunk", "window", "bandwidth", "round trip", "trained on in")
    for name, own in found.items():
        table.add_row(
            name,
            f"{own.chunk} samples",
            size(own.window),
            f"{size(own.bandwidth)}/s",
            duration(own.latency),
            duration(own.step),
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(Text(heading), justify="left" if heading == "worker" else "right", no_wrap=True)
    return table


def percent(share: float) -> str:
    """Format a share of time: 43 %."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Format seconds: 1.2 s, 4.0 ms, 12 us."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.2f} us"

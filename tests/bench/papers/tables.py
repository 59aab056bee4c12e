# SPDX-License-Identifier: Apache-2.0
"""Pure: the result of an exhibit as lines for a terminal, and as Markdown for its paper's page."""

from __future__ import annotations

import textwrap

from bench.papers.exhibit import Value
from bench.papers.results import Result
from bench.table import aligned

HEADINGS = ("", "paper", "ours", "range", "values", "unit")
_WIDTH = 118


def lines(result: Result) -> list[str]:
    """Return a table with a line for each row, then what is emulated and why ours differs."""
    cells = [HEADINGS, *map(row_cells, result.rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    notes = [f"emulation: {result.emulation or 'none'}", f"difference: {result.difference or 'none'}"]
    wrapped = [line for note in notes for line in textwrap.wrap(note, _WIDTH, subsequent_indent="    ")]
    return [result.title, *(aligned(line, widths, left=1) for line in cells), *wrapped]


def row_cells(value: Value) -> tuple[str, ...]:
    """Return the cells of a row: the paper's value, ours, the range and number of its values, the unit."""
    span = f"{number(value.low)} to {number(value.high)}" if value.repeats > 1 else ""
    repeats = str(value.repeats) if value.repeats > 1 else ""
    return value.what, number(value.paper), number(value.ours), span, repeats, value.unit


def number(value: float | str | None) -> str:
    """Return a number in groups of three digits without an exponent, a text as it is, "" for none."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.10f}".rstrip("0")

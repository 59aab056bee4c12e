# SPDX-License-Identifier: Apache-2.0
"""Pure: prints an experiment's rows as a table."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from bench.rows import Row

_WIDTH = 118
_HEADING = ("figure", "median", "low", "high", "n", "unit", "")


def table(title: str, rows: Sequence[Row]) -> list[str]:
    """One line per figure: median, range, repeats, of what; then what it stands against, what is emulated."""
    lines = [_HEADING, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADING))]
    out = [title, *(aligned(line, widths) for line in lines)]
    out += _peers(rows)
    for note in dict.fromkeys(row.emulation for row in rows if row.emulation):
        out += _wrapped(f"emulation: {note}")
    return out


def _peers(rows: Sequence[Row]) -> list[str]:
    """Who stands against what; the peer of most comes last, without their names."""
    count = Counter(row.peer for row in rows if row.peer)
    usual = count.most_common(1)[0][0] if count else None
    out = []
    for peer in sorted(count, key=lambda peer: peer == usual):
        figures = "the others" if peer == usual and len(count) > 1 else "all"
        if peer != usual:
            figures = ", ".join(row.figure for row in rows if row.peer == peer)
        out += _wrapped(f"{figures}: against {peer}")
    return out


def _cells(row: Row) -> tuple[str, ...]:
    numbers = ("-" if value is None else f"{value:.4g}" for value in (row.value, row.low, row.high))
    return (row.figure, *numbers, str(row.repeats), row.unit, row.what)


def aligned(line: Sequence[str], widths: Sequence[int], left: int = 2) -> str:
    """Return a line with cells of these widths; the first one and so many last ones begin at the left."""
    cells = [
        text.rjust(width) if 0 < column < len(line) - left else text.ljust(width)
        for column, (text, width) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)

# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): tables that fit: columns of less need go, and texts wrap, so that nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

WRAPPED = 24
"""Characters to which a text may be wrapped before a column goes."""
GAP = 2
"""Characters between two columns."""
Cell = str | Text


def fitted(
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    dropped: Sequence[str],
    wrapped: Sequence[str] = (),
) -> Table:
    """Return a table of rows in so many characters: the columns that are ``dropped`` go, the first of them
    first, until the others fit; the text in those that are ``wrapped`` takes several lines.
    """
    kept = list(headings)
    for heading in dropped:
        if sum(_needed(headings, rows, each, wrapped) for each in kept) + GAP * (len(kept) - 1) <= width:
            break
        if heading in kept:
            kept.remove(heading)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in kept:
        table.add_column(heading, no_wrap=heading not in wrapped, overflow="fold")
    places = [headings.index(heading) for heading in kept]
    for row in rows:
        table.add_row(*(row[place] for place in places))
    return table


def _needed(
    headings: Sequence[str], rows: Sequence[Sequence[Cell]], heading: str, wrapped: Sequence[str]
) -> int:
    place = headings.index(heading)
    longest = max([cell_len(heading), *(cell_len(str(row[place])) for row in rows)])
    return min(longest, max(WRAPPED, cell_len(heading))) if heading in wrapped else longest

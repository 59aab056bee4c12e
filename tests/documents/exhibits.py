# SPDX-License-Identifier: Apache-2.0
"""Pure: exhibits of papers in pages: what is emulated, a table of the paper's values beside ours, the reason
for a difference, and the picture.

A page has an exhibit between two comments, which no reader sees, and ``make reference`` writes it there:

    <!--exhibit stannis/fig-6-->
    <!--/exhibit-->
"""

from __future__ import annotations

import re

from bench.papers.results import Result, Results
from bench.papers.tables import HEADINGS, row_cells
from documents.blocks import in_prose
from documents.figures import NoFigureError
from documents.markdown import table

_EXHIBIT = re.compile(r"<!--exhibit ([^>]*?)-->(.*?)<!--/exhibit-->", re.DOTALL)


def with_exhibits(text: str, results: Results) -> str:
    """Return a page with its exhibits as docs/papers has their results. Raises NoFigureError."""

    def fill(match: re.Match[str]) -> str:
        return f"<!--exhibit {match[1]}-->\n\n{_exhibit(match[1].strip(), results)}\n\n<!--/exhibit-->"

    return in_prose(text, lambda part: _EXHIBIT.sub(fill, part))


def names(text: str) -> list[str]:
    """Return the names of the exhibits that a page has."""
    return [match[1].strip() for match in _EXHIBIT.finditer(text)]


def _exhibit(name: str, results: Results) -> str:
    if name not in results:
        raise NoFigureError(f"docs/papers has no result of '{name}': 'make papers' measures and publishes it")
    result = results[name]
    parts = [f"### {result.title}"]
    parts += [_table(result)] if result.rows else []
    parts += [f"![{result.title}]({result.picture})"] if result.picture else []
    return "\n\n".join([*parts, *_notes(result)])


def _table(result: Result) -> str:
    rows = [list(row_cells(value)) for value in result.rows]
    if _values(result):  # a note says it once for all rows
        for cells in rows:
            cells[HEADINGS.index("values")] = ""
    return table(HEADINGS, rows)


def _values(result: Result) -> int:
    """Return how many values all rows with a range have, 0 if they differ or there are none."""
    counts = {value.repeats for value in result.rows if value.repeats > 1}
    return counts.pop() if len(counts) == 1 else 0


def _notes(result: Result) -> list[str]:
    notes = [f"*Values*: {_values(result)} for each median."] if _values(result) else []
    notes += [f"*Emulated*: {result.emulation or 'nothing'}."]
    notes += [f"*Difference*: {result.difference}"] if result.difference else []
    notes += ["*A short and coarse run.*"] if result.quick else []
    return notes

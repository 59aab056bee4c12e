# SPDX-License-Identifier: Apache-2.0
"""Pure: figures and tables of committed benchmark files, in pages that GitHub shows as they are.

A page has a figure between two comments, which no reader sees, and ``make reference`` writes it there:

    <!--figure train lines value-->1.02<!--/figure-->
    <!--table train exchange.*-->
    <!--/table-->

The words are the file in docs/bench, the figure, and what of it: ``value``, ``low``, ``high``, ``range``,
``unit`` or ``all``, each with ``.N`` for N significant digits. With ``?`` behind it, a figure that no file
has yet is "not measured". A table has all figures that the pattern matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from bench.rows import Row
from documents.blocks import in_prose
from documents.markdown import table

Files = Mapping[str, Sequence[Row]]
"""The rows of the benchmark files, by the name of the file."""
_FIGURE = re.compile(r"<!--figure ([^>]*?)-->(.*?)<!--/figure-->", re.DOTALL)
_TABLE = re.compile(r"<!--table ([^>]*?)-->(.*?)<!--/table-->", re.DOTALL)
_HEADINGS = ("what", "median", "range", "repeats", "beside", "emulated")


class NoFigureError(Exception):
    """A page asks for a figure that no benchmark file has."""


def filled(text: str, files: Files) -> str:
    """Return a page with its figures and tables as the benchmark files have them. Raises NoFigureError."""

    def fill(pattern: re.Pattern[str], name: str, made: Callable[[list[str]], str], text: str) -> str:
        return pattern.sub(lambda m: f"<!--{name} {m[1]}-->{made(m[1].split())}<!--/{name}-->", text)

    def fill_all(text: str) -> str:
        text = fill(_FIGURE, "figure", lambda words: _figure(words, files), text)
        return fill(_TABLE, "table", lambda words: f"\n\n{_table(words, files)}\n\n", text)

    return in_prose(text, fill_all)


def _rows(name: str, files: Files) -> Sequence[Row]:
    if name not in files:
        raise NoFigureError(f"docs/bench has no file {name}.json; it has {', '.join(files) or 'none'}")
    return files[name]


def _figure(words: list[str], files: Files) -> str:
    if len(words) not in (2, 3):
        raise NoFigureError(
            f"'{' '.join(words)}' is not: FILE FIGURE [value|low|high|range|unit|all][.DIGITS]"
        )
    name, figure, form = (*words, "value")[:3]
    if form.endswith("?"):
        awaited = not any(row.figure == figure and row.value is not None for row in files.get(name, ()))
        return "not measured" if awaited else _figure([name, figure, form.removesuffix("?")], files)
    found = [row for row in _rows(name, files) if row.figure == figure]
    if not found:
        raise NoFigureError(f"docs/bench/{name}.json has no figure '{figure}'")
    field, _, digits = form.partition(".")
    return _shown(found[0], field, int(digits or 4), f"docs/bench/{name}.json: {figure}")


def _shown(row: Row, field: str, digits: int, where: str) -> str:
    if field == "unit":
        return row.unit
    value, low, high = (_number(number, digits) for number in (row.value, row.low, row.high))
    forms = {"value": value, "low": low, "high": high, "range": f"{low} to {high}"}
    forms["all"] = f"{value} {row.unit}".strip() + f" ({low} to {high})" * (row.repeats > 1)
    if field not in forms:
        raise NoFigureError(f"{where}: '{field}' is none of {', '.join([*forms, 'unit'])}")
    if row.value is None:
        raise NoFigureError(f"{where}: it has no value: {row.what}")
    return forms[field]


def _table(words: list[str], files: Files) -> str:
    if len(words) != 2:
        raise NoFigureError(f"'{' '.join(words)}' is not: FILE PATTERN")
    name, pattern = words
    found = [row for row in _rows(name, files) if fnmatchcase(row.figure, pattern)]
    if not found:
        raise NoFigureError(f"docs/bench/{name}.json has no figure like '{pattern}'")
    return table(_HEADINGS, [_cells(row) for row in found])


def _cells(row: Row) -> tuple[str, ...]:
    median = "not measured" if row.value is None else f"{_number(row.value, 4)} {row.unit}".strip()
    span = f"{_number(row.low, 4)} to {_number(row.high, 4)}" if row.repeats > 1 else ""
    return row.what, median, span, str(row.repeats), row.peer or "", row.emulation or ""


def _number(value: float | None, digits: int) -> str:
    """Return a number without an exponent, in groups of three digits."""
    if value is None:
        return ""
    rounded = float(f"{value:.{digits}g}")
    if rounded.is_integer():
        return f"{int(rounded):,}"
    return f"{rounded:,.10f}".rstrip("0")

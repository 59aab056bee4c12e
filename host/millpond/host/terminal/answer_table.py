# SPDX-License-Identifier: Apache-2.0
"""Pure: what 'millpond ask' prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from millpond.base.text import counted
from millpond.host.records.failures import listed
from millpond.host.records.questions import AnsweredQuestion

_BINS, _QUANTILES, _MATRIX = "bins", "quantiles", "matrix"
_BAR = 40


def show(found: AnsweredQuestion) -> Group:
    """Return the figures of an answer, a line for each device too if it was not masked, and the bins."""
    names = [name for name, value in found.figures.items() if not isinstance(value, list)]
    table = Table("devices", *names, box=None)
    for name, each in found.by_device.items():
        table.add_row(name, *_cells(each, names))
    of_all = counted(len(found.devices), "device")
    table.add_row(f"{of_all}, masked" if found.masked else of_all, *_cells(found.figures, names))
    shown: list[Table | Text] = [table]
    if _BINS in found.figures:
        shown += [Text(""), _bins(found.figures[_BINS])]
    if _QUANTILES in found.figures:
        shown += [Text(""), _quantiles(found.figures[_QUANTILES])]
    if _MATRIX in found.figures:
        shown += [Text(""), _matrix(found.figures)]
    if found.noise:
        shown.append(Text(f"each count has noise of standard deviation {found.noise:.3g}"))
    if found.left_out:
        shown.append(Text(f"left out: {listed(found.left_out.items())}"))
    return Group(*shown)


def _cells(figures: Mapping[str, Any], names: list[str]) -> list[str]:
    return ["-" if figures[name] is None else f"{figures[name]:.6g}" for name in names]


def _quantiles(quantiles: Any) -> Table:
    table = Table("share", "value", "from", "to", box=None)
    for each in quantiles:
        table.add_row(f"{each.share:g}", *(f"{value:.6g}" for value in (each.value, each.low, each.high)))
    return table


def _matrix(figures: Mapping[str, Any]) -> Table:
    """Return the predictions by label, a line for each label."""
    labels = range(len(figures[_MATRIX]))
    table = Table("label", *(f"as {each}" for each in labels), "recall", "precision", box=None)
    for label in labels:
        ratios = (figures[name][label] for name in ("recall", "precision"))
        told = ("-" if each is None else f"{each:.3f}" for each in ratios)
        table.add_row(f"{label}", *map(str, figures[_MATRIX][label]), *told)
    return table


def _bins(bins: Any) -> Table:
    table, most = Table("from", "to", "count", "", box=None), max(1, *(each.count for each in bins))
    for each in bins:
        bar = "#" * round(_BAR * max(0, each.count) / most)
        table.add_row(f"{each.low:.6g}", f"{each.high:.6g}", f"{each.count}", bar)
    return table

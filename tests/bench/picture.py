# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the picture beside the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.experiment import Line, Panel, Role

_COLORS: dict[Role, str] = {
    "millpond": "#12766f",
    "stannis": "#c8553d",
    "untuned": "#9aa0a8",
    "peer": "#6a5acd",
    "limit": "#30343b",
}
_COLUMNS = 2


def draw(panels: Sequence[Panel], note: str, path: Path) -> None:
    """All panels, two in a row; no picture if there are none."""
    if not panels:
        return
    import matplotlib as mpl  # slow to import

    mpl.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(panels) // _COLUMNS)
    size = (6.5 * _COLUMNS, 3.9 * lines + 0.3)
    figure, grid = pyplot.subplots(lines, _COLUMNS, figsize=size, squeeze=False, layout="constrained")
    for number, axes in enumerate(grid.flat):
        if number < len(panels):
            _draw(axes, panels[number])
        else:
            axes.set_axis_off()
    figure.supxlabel(note, fontsize=8, color="#666666")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        _line(axes, line)
    if panel.event:
        axes.axvline(panel.event[0], color="#b4b8bf", linewidth=1, linestyle=":")
        place = (panel.event[0], 0)
        axes.annotate(panel.event[1], place, (3, 3), textcoords="offset points", fontsize=8, color="#666666")
    if panel.logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel(panel.x, fontsize=9)
    axes.set_ylabel(panel.y, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)


def _line(axes: Any, line: Line) -> None:
    style = "none" if line.marks else "--" if line.role == "limit" else "-"
    axes.plot(
        line.xs,
        line.ys,
        linestyle=style,
        marker="x" if line.marks else "o" if line.role != "limit" else None,
        markersize=7 if line.marks else 3,
        color=_COLORS[line.role],
        alpha=0.5 if line.faint else 1.0,
        linewidth=1.4,
        label=line.label,
    )

# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the pictures beside the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.experiment import HeatMap, Line, Panel, Role
from bench.rows import Row

_COLORS: dict[Role, str] = {
    "millpond": "#12766f",
    "paper": "#b07d1a",
    "stannis": "#c8553d",
    "untuned": "#9aa0a8",
    "peer": "#6a5acd",
    "limit": "#30343b",
}
_COLUMNS = 2
_LIGHT = 1.5
_OURS, _BEHIND, _RANGE = "#12766f", "#c8553d", "#30343b"


def draw(panels: Sequence[Panel | HeatMap], note: str, path: Path) -> None:
    """All panels, two in a row; no picture if there are none."""
    if not panels:
        return
    import matplotlib as mpl  # slow to import

    mpl.use("Agg")
    # A small file, and the same one each time.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": path.stem})
    from matplotlib import pyplot

    lines = -(-len(panels) // _COLUMNS)
    size = (6.5 * _COLUMNS, 3.9 * lines + 0.3)
    figure, grid = pyplot.subplots(lines, _COLUMNS, figsize=size, squeeze=False, layout="constrained")
    for number, axes in enumerate(grid.flat):
        if number == len(panels):
            axes.set_axis_off()
        elif isinstance(panel := panels[number], HeatMap):
            _draw_map(axes, panel)
        else:
            _draw(axes, panel)
    figure.supxlabel(note, fontsize=8, color="#666666")
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
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


def _draw_map(axes: Any, panel: HeatMap) -> None:
    most = _LIGHT * max(max(values) for values in panel.values)  # so that texts stand out
    picture = axes.imshow(panel.values, aspect="auto", cmap="YlOrBr", vmin=0, vmax=most)
    axes.figure.colorbar(picture, ax=axes, label=panel.unit)
    for row, values in enumerate(panel.values):
        for column, value in enumerate(values):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
    for (row, column), text in panel.marked.items():
        axes.text(column, row + 0.3, text, ha="center", va="center", fontsize=7, color=_OURS)
    axes.set_xticks(range(len(panel.xs)), [str(each) for each in panel.xs])
    axes.set_yticks(range(len(panel.ys)), [str(each) for each in panel.ys])
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel(panel.x, fontsize=9)
    axes.set_ylabel(panel.y, fontsize=9)


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


def draw_ratios(rows: Sequence[Row], note: str, path: Path) -> None:
    """A line for each ratio that was measured, on a logarithmic axis; no picture if there is none."""
    ratios = [row for row in rows if row.unit == "x" and row.value]
    if not ratios:
        return
    import matplotlib as mpl  # slow to import

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.5, 1.4 + 0.34 * len(ratios)), layout="constrained")
    for place, row in enumerate(ratios):
        assert row.value and row.low and row.high
        axes.plot([row.low, row.high], [place, place], color=_RANGE, linewidth=1.4)
        axes.plot(row.value, place, "o", color=_OURS if row.value >= 1 else _BEHIND, markersize=8)
        axes.annotate(
            f"{row.value:.3g}", (row.high, place), (8, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.axvline(1, color="#b4b8bf", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(ratios)), [row.figure for row in ratios], fontsize=9)
    axes.set_ylim(len(ratios) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)
    axes.set_title("millpond over its peer, median and range", fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.supxlabel(note, fontsize=8, color="#666666")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the picture beside the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.rows import Row

_OURS, _BEHIND, _RANGE = "#12766f", "#c8553d", "#30343b"


def draw(rows: Sequence[Row], note: str, path: Path) -> None:
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
    axes.set_title("millpond's speed over its peer's, median and range", fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.supxlabel(note, fontsize=8, color="#666666")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

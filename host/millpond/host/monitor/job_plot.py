# SPDX-License-Identifier: Apache-2.0
"""Edge (matplotlib, plotille): draws curves of jobs: into a figure, or as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millpond.base.errors import LocalError
from millpond.base.text import printable
from millpond.host.monitor.job_view import Axis, JobCourse, Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TICKS: Final = 19
"""The characters that the labels of both axes take in a line."""
_AXES: Final = 4
_TICK: Final = 10
"""The characters from one label of the lower axis to the next."""
_STEPS: Final = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
AXIS_LABELS: Mapping[Axis, str] = {
    Axis.ROUNDS: "round",
    Axis.SECONDS: "seconds of training",
    Axis.BYTES: "bytes over all tunnels",
    Axis.JOULES: "joules, as far as known",
}


def curves(courses: Sequence[JobCourse], axis: Axis = Axis.ROUNDS, metric: str = "") -> dict[str, Points]:
    """Return curves of scores by label: of one job all its scores, of several that which decides in each; or
    those of one ``metric`` by its name. Raises LocalError where a job has none, or no known
    joules to draw over.
    """
    found: dict[str, Points] = {}
    for course in courses:
        scores = course.scores(axis)
        if axis is Axis.JOULES and not any(x for points in scores.values() for x, _ in points):
            raise LocalError(f"job {course.info.id} has no known joules to draw over")
        chosen = {key: points for key, points in scores.items() if not metric or key[1] == metric}
        if metric and not chosen:
            known = ", ".join(dict.fromkeys(name for _, name in scores)) or "none"
            raise LocalError(f"job {course.info.id} has no score '{printable(metric)}'; it has {known}")
        if len(courses) > 1:
            chosen = dict(list(chosen.items())[:1])
        before = f"{course.info.id} {course.info.name}: " if len(courses) > 1 else ""
        for (place, name), points in chosen.items():
            found[printable(f"{before}{name} ({place})")] = points
    return found


def figure(drawn: Mapping[str, Points], title: str, axis_label: str) -> Figure:
    """Return a figure of curves by label. Raises LocalError without matplotlib."""
    try:
        from matplotlib import pyplot  # with which a notebook shows figures
    except ImportError:
        raise LocalError("a plot needs matplotlib: pip install matplotlib") from None
    found, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    pyplot.close(found)  # else a notebook shows it twice
    for label, points in drawn.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=_plain(label))
    axes.set(xlabel=axis_label)
    axes.set_title(_plain(title), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if drawn:
        axes.legend(frameon=False)
    return found


def _plain(text: str) -> str:
    """Return a text that matplotlib does not take for mathematics, nor a label for none."""
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def save(drawn: Mapping[str, Points], title: str, axis_label: str, path: Path) -> None:
    """Draw curves into a file, whose suffix says of what kind it is. Raises LocalError."""
    try:
        import matplotlib as mpl  # slow to import
    except ImportError:
        raise LocalError("a plot in a file needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    try:
        figure(drawn, title, axis_label).savefig(path, dpi=130)
    except ValueError as error:  # a suffix that it does not know
        raise LocalError(f"{path}: {error}") from None


def text(drawn: Mapping[str, Points], width: int, height: int, axis_label: str) -> str:
    """Return curves as at most ``height`` lines of ``width`` characters without colours, each curve with a
    mark of its own. Raises ModuleNotFoundError without plotille.
    """
    import plotille

    canvas = plotille.Figure()
    canvas.with_colors, canvas.origin = False, False
    canvas.x_label, canvas.y_label = axis_label, "score"
    points = [point for curve in drawn.values() for point in curve] or [(0.0, 0.0)]
    is_whole = all(x.is_integer() for x, _ in points)
    canvas.x_ticks_fkt = lambda low, _high: "" if is_whole and round(low, 6) % 1 else f"{low:.4g}"
    canvas.y_ticks_fkt = lambda low, _high: f"{low:.4g}"
    canvas.width = max(10, width - _TICKS - len(axis_label))
    canvas.height = max(2, height - _AXES - len(drawn))
    canvas.set_x_limits(*_limits([x for x, _ in points], canvas.width, _TICK, is_whole))
    canvas.set_y_limits(*_limits([y for _, y in points], canvas.height))
    for (label, curve), marker in zip(drawn.items(), cycle(_marks(len(drawn))), strict=False):
        xs, ys = zip(*(curve if len(curve) > 1 else curve * 2), strict=True)
        canvas.plot(xs, ys, marker=marker, label=label)
    names = [f"{mark or ' '} {label}" for label, mark in zip(drawn, cycle(_marks(len(drawn))), strict=False)]
    lines = [*names, *str(canvas.show()).splitlines()]
    return "\n".join(line.rstrip()[:width] for line in lines if line.strip())


def _limits(
    values: Sequence[float], cells: int, tick: int = 1, is_whole: bool = False
) -> tuple[float, float]:
    """Return the limits of an axis of so many characters, on which all values have their place, and each
    ``tick`` characters are a round number, or if it ``is_whole`` a multiple or a part of 1.
    """
    low, high, count = min(values), max(values), cells / tick
    if high <= low:
        return low, low + 1
    size = 10.0 ** math.floor(math.log10((high - low) / count))
    for step in (each * factor * size for factor in (1, 10) for each in _STEPS):
        if is_whole and min(step, 1 / step) < 1 and (max(step, 1 / step) + 1e-9) % 1 > 1e-6:
            continue
        first = math.floor(low / step + 1e-9) * step
        if first + step * count * (1 - 1 / cells) >= high:
            return first, first + step * count
    return low, high


def _marks(count: int) -> Sequence[str | None]:
    """Return the marks of curves; None stands for fine dots."""
    return [None] if count == 1 else list("*o+x#@%&")

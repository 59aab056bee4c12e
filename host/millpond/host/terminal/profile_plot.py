# SPDX-License-Identifier: Apache-2.0
"""Edge (files): plots the measured curves of workers: speed and memory over the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millpond.train.balance.curve import Curve, Floats, Ints
from millpond.train.balance.profiling import Profile

_COLORS = ("#12766f", "#c8553d", "#4464ad", "#b8860b", "#7a4988", "#30343b", "#5b8c2a", "#a0527a")
_ONE_BY_ONE = len(_COLORS)
"""Up to this many workers, each has a color; beyond, each kind has one."""
_FAR_APART = 4
"""Ratio of the fastest to the slowest worker from which on the axis of speeds is logarithmic."""


def draw(profiles: Sequence[Profile], chosen: Mapping[str, int], title: str, path: Path) -> None:
    """Write a PNG with a line for each profiled worker; ``chosen`` are batches by worker, 0 or no entry for
    workers without one. Writes no file if no worker was profiled.
    """
    import matplotlib as mpl  # slow to import

    mpl.use("Agg")
    from matplotlib import pyplot

    measured = [profile for profile in profiles if profile.points]
    if not measured:
        return
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for profile, (color, label) in zip(measured, _styles(measured), strict=True):
        _lines(panels, profile, chosen.get(profile.worker, 0), color, label)
    _scales(panels, measured)
    if any(chosen.get(profile.worker) for profile in measured):
        panels[0].plot([], [], "o", color="#666666", markersize=9, label="chosen batch")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _styles(profiles: Sequence[Profile]) -> list[tuple[str, str | None]]:
    """Return the color of each profile, and the legend's text for the first of each color."""
    if len(profiles) <= _ONE_BY_ONE:
        labels = [f"{profile.worker} ({profile.kind})" for profile in profiles]
        return list(zip(_COLORS, labels, strict=False))
    names = [profile.kind for profile in profiles]
    kinds = {kind: _COLORS[number % len(_COLORS)] for number, kind in enumerate(dict.fromkeys(names))}
    firsts = [names.index(name) == place for place, name in enumerate(names)]
    return [
        (kinds[name], f"{names.count(name)} x {name}" if first else None)
        for name, first in zip(names, firsts, strict=True)
    ]


def _lines(panels: Sequence[Any], profile: Profile, chosen: int, color: str, label: str | None) -> None:
    """Plot dots at the measured batches, and between them the interpolation that plans use."""
    measured = np.array([point.batch for point in profile.points])
    for axes, values in zip(panels, (_speed, _memory), strict=True):
        every = np.arange(measured[0], measured[-1] + 1)
        axes.plot(every, values(profile, every), linewidth=1.4, color=color, label=label)
        axes.plot(measured, values(profile, measured), "o", markersize=3, color=color)
        if chosen:
            height = values(profile, np.array([chosen]))
            axes.plot([chosen], height, "o", markersize=9, color=color, markeredgecolor="white")


def _speed(profile: Profile, batches: Ints) -> Floats:
    curve = Curve.fit((point.batch, point.seconds) for point in profile.points)
    return batches / curve.time(batches)


def _memory(profile: Profile, batches: Ints) -> Floats:
    marks = [point.peak_bytes / 2**20 for point in profile.points]
    return np.interp(batches, [point.batch for point in profile.points], marks)


def _scales(panels: Sequence[Any], profiles: Sequence[Profile]) -> None:
    from matplotlib import ticker

    best = [max(point.batch / point.seconds for point in profile.points) for profile in profiles]
    if max(best) > _FAR_APART * min(best):
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panels[0].yaxis.set_major_formatter("{x:g}")
        panels[0].yaxis.set_minor_locator(ticker.NullLocator())
    else:
        panels[0].set_ylim(bottom=0)
    panels[1].set_ylim(bottom=0)
    for axes, title in zip(panels, ("speed, img/s", "memory at its highest, MiB"), strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("batch")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%d"))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e8eb", linewidth=0.8)
        axes.set_axisbelow(True)

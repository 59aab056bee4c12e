# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the picture beside the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tunnel.plan import GROUPS
from bench.tunnel.record import Record

_BARS = (("gbps", "TCP throughput, Gbit/s", "{:.1f}"), ("rtt_p50", "64-byte round trip (p50), µs", "{:.0f}"))
_DOTS = ("cpu_per_gb", "processor time of the carriers, s/GB (log)", "{:.2f}")
_OURS, _LIMIT, _PEER = "#12766f", "#30343b", "#b4b8bf"


def draw(record: Record, labels: Mapping[str, str], note: str, path: Path) -> None:
    """Three panels with a line for each route; no picture if none was measured."""
    import matplotlib as mpl  # slow to import

    mpl.use("Agg")
    from matplotlib import pyplot

    places = _places([route for route in labels if record.values("rtt_p50", route)])
    if not places:
        return
    height = 1.6 + 0.3 * (max(places.values()) + 1)
    figure, panels = pyplot.subplots(1, 3, figsize=(13.5, height), sharey=True, layout="constrained")
    for axes, (quantity, title, form) in zip((panels[0], panels[2]), _BARS, strict=True):
        _bars(axes, record, places, quantity, form)
        axes.set_title(title, fontsize=10, loc="left")
    _dots(panels[1], record, places)
    panels[0].set_yticks(list(places.values()), [labels[route] for route in places])
    panels[0].set_ylim(max(places.values()) + 0.7, -0.7)
    for axes in panels:
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    _legend(figure)
    figure.supxlabel(note, fontsize=8, color="#666666")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _places(routes: Sequence[str]) -> dict[str, float]:
    """Where each route is drawn: from the top, with a gap between one group and the next."""
    places: dict[str, float] = {}
    for group in GROUPS:
        start = max(places.values()) + 1.7 if places else 0
        places |= {route: start + line for line, route in enumerate(name for name in group if name in routes)}
    return places


def _values(
    record: Record, places: Mapping[str, float], quantity: str
) -> list[tuple[str, float, list[float]]]:
    found = [(route, place, list(record.values(quantity, route))) for route, place in places.items()]
    return [entry for entry in found if any(entry[2])]


def _bars(axes: Any, record: Record, places: Mapping[str, float], quantity: str, form: str) -> None:
    for route, place, values in _values(record, places, quantity):
        axes.barh(place, statistics.median(values), color=_color(route), height=0.72)
        axes.plot([min(values), max(values)], [place, place], color="#c8553d", linewidth=1.4)
        _annotate(axes, place, values, form)
    axes.margins(x=0.12)


def _dots(axes: Any, record: Record, places: Mapping[str, float]) -> None:
    """On a logarithmic axis a bar would have no length."""
    quantity, title, form = _DOTS
    for route, place, values in _values(record, places, quantity):
        axes.plot([min(values), max(values)], [place, place], color="#c8553d", linewidth=1.4)
        axes.plot(statistics.median(values), place, "o", color=_color(route), markersize=9)
        _annotate(axes, place, values, form)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.2)


def _annotate(axes: Any, place: float, values: Sequence[float], form: str) -> None:
    text = form.format(statistics.median(values))
    axes.annotate(text, (max(values), place), (7, 0), textcoords="offset points", va="center", fontsize=8)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = ((_OURS, "millpond"), (_LIMIT, "C relay: the limit of TUN"), (_PEER, "peers"))
    handles: list[Any] = [Patch(color=color, label=text) for color, text in kinds]
    handles.append(Line2D([], [], color="#c8553d", linewidth=1.4, label="range"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)


def _color(route: str) -> str:
    if route.split("_")[0] in ("c", "python"):
        return _OURS
    return _LIMIT if route.startswith("relay") else _PEER

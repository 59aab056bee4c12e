# SPDX-License-Identifier: Apache-2.0
"""Pure: the curves of the pages, as the browser's chart library takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from millpond.base.text import printable
from millpond.host.monitor.fleet_history import DeviceSample
from millpond.host.monitor.job_view import Axis, JobCourse, Points
from millpond.wire.audit_log import Answered, Entry

T = TypeVar("T")
MOST_POINTS: Final = 400
"""Points of a curve: a chart is about as many pixels wide."""
MOST_KINDS: Final = 12
"""Kinds of a device's answers: a device may invent more than there are."""
_SPEED: Final = "samples_per_second"
"""The training metric with a chart of its own: thousands beside a loss make that a flat line."""
UNITS: Final[Mapping[Axis, str]] = {
    Axis.ROUNDS: "rounds",
    Axis.SECONDS: "seconds",
    Axis.BYTES: "bytes through the tunnels",
    Axis.JOULES: "joules",
}


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves by name over ``across``, a unit, or over the time of day if ``is_time``. ``unit`` is that of the
    values; "bytes" has them shortened.
    """

    curves: Mapping[str, Points]
    across: str
    unit: str = ""
    is_time: bool = False

    def document(self) -> dict[str, Any]:
        """Return what the browser gets: the names of the curves, and tables whose first column is the place:
        one of all curves where these have the same places, else one of each curve.
        """
        columns = [list(map(list, zip(*points, strict=True))) for points in self.curves.values()]
        alike = columns and all(each[0] == columns[0][0] for each in columns)
        return {
            "names": [printable(name, 60) for name in self.curves],
            "tables": [[columns[0][0], *(each[1] for each in columns)]] if alike else columns,
            "across": self.across,
            "unit": self.unit,
            "time": self.is_time,
        }


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` values at even distances, the last one among them."""
    if len(values) <= most:
        return list(values)
    last = len(values) - 1
    return [values[round(number * last / (most - 1))] for number in range(most)]


def _filled(curves: Mapping[str, Points], most: int = MOST_POINTS) -> dict[str, Points]:
    return {name: tuple(thinned(points, most)) for name, points in curves.items() if points}


def of_device(samples: Iterable[DeviceSample]) -> dict[str, Chart]:
    """Return the charts of a device's resources over time."""
    found = tuple(samples)

    def curves(**attributes: str) -> dict[str, Points]:
        return _filled(
            {
                name.replace("_", " "): tuple(
                    (each.at, value) for each in found if (value := getattr(each, attribute)) is not None
                )
                for name, attribute in attributes.items()
            }
        )

    return {
        "chart_cpu": Chart(curves(cpu="cpu"), "", "share", True),
        "chart_memory": Chart(curves(memory="memory", flash="flash"), "", "bytes", True),
        "chart_tunnel": Chart(curves(to_the_device="to", from_the_device="back"), "", "bytes/s", True),
        "chart_heat": Chart(curves(temperature="temperature", power="watts"), "", "°C, W", True),
    }


def of_answers(entries: Iterable[Entry]) -> Chart:
    """Return the chart of the bytes that a device has sent in answers, by kind, summed over time."""
    curves, totals = dict[str, list[tuple[float, float]]](), Counter[str]()
    for entry in entries:
        if isinstance(entry.event, Answered):
            for kind, count in entry.event.sent.items():
                totals[kind] += count
                curves.setdefault(kind, []).append((entry.time, totals[kind]))
    most = sorted(kind for kind, _ in totals.most_common(MOST_KINDS))
    return Chart(_filled({kind: tuple(curves[kind]) for kind in most}), "", "bytes", True)


def of_job(course: JobCourse) -> dict[str, Chart]:
    """Return the charts of a job: its scores, its training metrics, one of these by worker, its speed, and
    the shares of the workers in the samples.
    """
    few = replace(course, rounds=course.detailed)
    metric, unit = training_metric(course), course.info.unit
    left_out = f"{unit} (one of {course.stride})" if course.stride > 1 else unit
    training = course.metrics()
    speed = {name: training.pop(name) for name in (_SPEED,) if name in training}
    scores = {f"{name} ({place})": points for (place, name), points in course.scores().items()}
    shares: dict[str, list[tuple[float, float]]] = {}
    for number, parts in few.plan:
        for worker, share in parts.items():
            shares.setdefault(worker, []).append((float(number), share))
    return {
        "chart_scores": Chart(_filled(scores), unit),
        "chart_training": Chart(_filled(training), unit),
        **({"chart_speed": Chart(_filled(speed), unit, "samples a second")} if speed else {}),
        "chart_workers": Chart(few.by_worker(metric) if metric else {}, left_out, metric),
        "chart_shares": Chart(
            {name: tuple(shares[name]) for name in sorted(shares)}, left_out, "share of the samples"
        ),
    }


def training_metric(course: JobCourse) -> str:
    """Return the training metric that is shown by worker: the loss, or the first one; "" without any."""
    names = course.rounds[-1].metrics if course.rounds else {}
    return "loss" if "loss" in names else next(iter(names), "")


def of_comparison(courses: Iterable[JobCourse], axis: Axis) -> dict[str, Chart]:
    """Return the chart of several jobs: the deciding metric of each."""
    curves = {f"{each.info.id}: {each.info.name}, {each.info.metric}": each.curve(axis) for each in courses}
    return {"chart_comparison": Chart(_filled(curves), UNITS[axis])}

# SPDX-License-Identifier: Apache-2.0
"""Edge (the daemon's socket): the pages of the dashboard: what each shows of a snapshot of the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from millpond.fs.client.metrics import MountStats, answered_here
from millpond.host.monitor.dashboard import charts
from millpond.host.monitor.dashboard.charts import Chart
from millpond.host.monitor.dashboard.sources import Sources
from millpond.host.monitor.fleet_snapshot import FleetSnapshot
from millpond.host.monitor.job_view import Axis, JobCourse, has_ended
from millpond.host.records.audit import summary
from millpond.host.records.comparison import differences, settings

MOST_EVENTS: Final = 50
MOST_ROUNDS: Final = 50
"""Rounds in the table of a job's page."""
MOST_COMPARED: Final = 8
MOST_ANSWERED: Final = 50
"""Jobs, launches and services in the table of a device's answers."""


class PageView(Protocol):
    """A page: its ``template``, its path with the query, and the ``jobs`` whose courses it shows."""

    template: ClassVar[str]

    @property
    def path(self) -> str:
        """The path with the query."""

    @property
    def jobs(self) -> tuple[int, ...]:
        """The numbers of the jobs whose courses the page shows."""

    def values(self, snapshot: FleetSnapshot) -> dict[str, Any]:
        """Return the values of the template. Raises MillpondError."""

    def charts(self, snapshot: FleetSnapshot, /) -> dict[str, Chart]:
        """Return the charts by the ids of their places."""


@dataclass(frozen=True)
class FleetPage:
    """The fleet: devices, jobs, and what has happened."""

    template: ClassVar[str] = "fleet.html"
    path: str = "/"
    jobs: tuple[int, ...] = ()

    def values(self, snapshot: FleetSnapshot) -> dict[str, Any]:
        history = snapshot.fleet
        return {
            "devices": [(info, history.last(info.name)) for info in history.devices],
            "states": Counter(info.state for info in history.devices),
            "warnings": history.warnings,
            "listed": snapshot.jobs[::-1],
            "events": history.events[-MOST_EVENTS:][::-1],
        }

    def charts(self, _snapshot: FleetSnapshot, /) -> dict[str, Chart]:
        return {}


@dataclass(frozen=True)
class DevicePage:
    """A device: resources over time, tunnel, volume, the ledger of what has left it, log."""

    sources: Sources
    name: str
    template: ClassVar[str] = "device.html"
    jobs: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        return f"/devices/{self.name}"

    def values(self, snapshot: FleetSnapshot) -> dict[str, Any]:
        history = snapshot.fleet
        detail = self.sources.device(self.name)
        answered = summary(detail.entries)
        return {
            "name": self.name,
            "info": history.device(self.name),
            "sample": history.last(self.name),
            "detail": detail,
            "ledger": detail.ledger,
            "mounts": [_mount(each) for each in detail.mounts],
            "policy": answered.policies[-1] if answered.policies else None,
            "answered": answered.rows[-MOST_ANSWERED:][::-1],
            "events": [each for each in history.events if each.device == self.name][-MOST_EVENTS:][::-1],
        }

    def charts(self, snapshot: FleetSnapshot, /) -> dict[str, Chart]:
        entries = self.sources.device(self.name).entries
        found = charts.of_device(snapshot.fleet.samples.get(self.name, ()))
        return found | {"chart_answers": charts.of_answers(entries)}


def _mount(found: MountStats) -> dict[str, Any]:
    kept = [f"{name} {here} of {asked}" for name, (here, asked) in answered_here(found).items() if asked]
    return {
        "found": found,
        "operations": sum(map(sum, found.operations.values())),
        "failed": sum(sum(each.values()) for each in found.errors.values()),
        "kept": ", ".join(kept),
    }


@dataclass(frozen=True)
class JobPage:
    """A job: curves, plan and shares, links, waiting, events, log and file."""

    sources: Sources
    number: int
    template: ClassVar[str] = "job.html"

    @property
    def path(self) -> str:
        return f"/jobs/{self.number}"

    @property
    def jobs(self) -> tuple[int, ...]:
        return (self.number,)

    def values(self, snapshot: FleetSnapshot) -> dict[str, Any]:
        course = snapshot.followed.get(self.number)
        info = snapshot.job(self.number)
        if course and info and info.state == course.info.state:
            info = course.info  # which comes with each round, the list of jobs once a second
        links = course.links if course else {}
        definition = self.sources.definition(self.number)
        return {
            "number": self.number,
            "info": info,
            "has_ended": info is not None and has_ended(info),
            "course": course,
            "recent": course.rounds[-MOST_ROUNDS:][::-1] if course else (),
            "links": links,
            "most": max((max(pair) for pair in links.values()), default=0) or 1,
            "events": course.events[-MOST_EVENTS:][::-1] if course else (),
            "refusal": snapshot.refused.get(self.number, ""),
            "job": definition.job,
            "settings": settings(definition.job),
        }

    def charts(self, snapshot: FleetSnapshot, /) -> dict[str, Chart]:
        course = snapshot.followed.get(self.number)
        return charts.of_job(course) if course else {}


@dataclass(frozen=True)
class ComparePage:
    """Jobs side by side: results, curves over an axis, and the keys in which their files differ."""

    sources: Sources
    jobs: tuple[int, ...]
    axis: Axis
    template: ClassVar[str] = "compare.html"

    @property
    def path(self) -> str:
        return "/compare?" + "&".join([*(f"job={number}" for number in self.jobs), f"over={self.axis}"])

    def values(self, snapshot: FleetSnapshot) -> dict[str, Any]:
        definitions = [self.sources.definition(number) for number in self.jobs]
        return {
            "numbers": self.jobs,
            "axis": self.axis,
            "axes": tuple(Axis),
            "listed": snapshot.jobs[::-1],
            "outcomes": [course.outcome for course in self._courses(snapshot.followed)],
            "differences": differences([(each.job, each.code) for each in definitions]),
        }

    def charts(self, snapshot: FleetSnapshot, /) -> dict[str, Chart]:
        return charts.of_comparison(self._courses(snapshot.followed), self.axis)

    def _courses(self, followed: Mapping[int, JobCourse]) -> Iterable[JobCourse]:
        return [followed[number] for number in self.jobs if number in followed]

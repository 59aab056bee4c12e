# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): the texts of the live view: cells, lines about devices and jobs, and changes.

All that a device or a job's author says is one line without control characters here.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from millpond.base.text import counted, duration, printable
from millpond.host.api.daemon import DeviceInfo, JobInfo
from millpond.host.monitor.fleet_history import DeviceSample, described
from millpond.host.monitor.fleet_snapshot import FleetSnapshot
from millpond.host.monitor.job_view import JobCourse, WorkerPart, has_ended
from millpond.host.records.data_costs import waiting_for_data
from millpond.host.terminal.printing import size

REST: Final = 200
"""The characters of a last column: more than a terminal has left."""
DEVICE_COLUMNS: Final[Mapping[str, int]] = {
    "device": 10,
    "state": 12,
    "cpu": 5,
    "memory": 7,
    "flash": 6,
    "temp": 5,
    "to": 11,
    "from": 11,
    "jobs": REST,
}
JOB_COLUMNS: Final[Mapping[str, int]] = {
    "id": 5,
    "job": 18,
    "state": 10,
    "round": 10,
    "left": 10,
    "score": 17,
    "": REST,
}
WORKER_COLUMNS: Final[Mapping[str, int]] = {"worker": 14, "samples": 9, "share": 7, "waiting": 9, "": REST}
"""The columns of the tables, and the characters of each."""


def device_cells(info: DeviceInfo, sample: DeviceSample | None) -> tuple[str, ...]:
    """Return the cells of a device below DEVICE_COLUMNS; "-" for a figure that is not known."""
    welcome, found = info.welcome, sample or DeviceSample(0.0)
    said = info.reason or ", ".join(info.load.jobs if info.load else ())
    return (
        printable(info.name),
        info.state,
        "-" if found.cpu is None else f"{found.cpu:.0%}",
        _part(found.memory, welcome.memory if welcome else 0),
        _part(found.flash, welcome.flash if welcome else 0),
        "-" if found.temperature is None else f"{found.temperature:.0f} C",
        _rate(found.to),
        _rate(found.back),
        printable(said),
    )


def job_cells(info: JobInfo, course: JobCourse | None) -> tuple[str, ...]:
    """Return the cells of a job below JOB_COLUMNS."""
    return (
        str(info.id),
        printable(info.name),
        info.state,
        f"{info.round}/{info.rounds}",
        remaining(course),
        score(info) or "-",
        printable("; ".join(filter(None, (stage(info), *_told(info))))),
    )


def worker_cells(part: WorkerPart) -> tuple[str, ...]:
    """Return the cells of a worker below WORKER_COLUMNS."""
    missing = f"missing: {part.missing}" if part.missing else ""
    shares = (f"{part.share:.1%}", f"{part.waits:.0%}")
    return printable(part.worker), str(part.samples), *shares, printable(missing)


def _part(used: int | None, whole: int) -> str:
    return "-" if used is None or not whole else f"{used / whole:.0%}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{size(rate)}/s"


def score(info: JobInfo) -> str:
    """Return the last score of a job, "" before the first."""
    return "" if info.score is None else f"{printable(info.metric)} {info.score:.4f}"


def stage(info: JobInfo) -> str:
    """Return what a running job does now, and how far that is: "training 40%"; "" for another job."""
    return f"{info.stage} {info.done:.0%}" if info.stage and info.done else info.stage


def _told(info: JobInfo) -> tuple[str, str]:
    """Return a job's error or what it waits for, and the waiting of its workers for data."""
    return info.error or info.reason, waiting_for_data(info.waits)


def remaining(course: JobCourse | None) -> str:
    """Return the time until a job's last round, "" where it is not known."""
    seconds = course.remaining if course else None
    return "" if seconds is None else duration(seconds)


def summary(name: str, now: FleetSnapshot) -> str:
    """Return the first line: the fleet, its devices and jobs by state; before it the daemon's fault."""
    states = Counter(info.state for info in now.fleet.devices)
    jobs = Counter(info.state for info in now.jobs if not has_ended(info))
    told = [f"fleet {printable(name)}", counted(len(now.fleet.devices), "device")]
    told += [f"{count} {state}" for state, count in states.items()]
    told += [f"{counted(count, 'job')} {state}" for state, count in jobs.items()]
    return f"{f'NO ANSWER: {printable(now.fault)}; ' if now.fault else ''}{', '.join(told)}"


def about_device(info: DeviceInfo, sample: DeviceSample | None) -> str:
    """Return a line about a device: state, reason, load, rates, agent, power and jobs."""
    parts = [f"{info.name}: {described(info)}"]
    if sample and sample.cpu is not None:
        names = ("cpu", "memory", "flash", "temperature", "to", "from")
        cells = device_cells(info, sample)[2:8]
        parts += [f"{name} {cell}" for name, cell in zip(names, cells, strict=True) if cell != "-"]
        parts += [] if sample.watts is None else [f"{sample.watts:.1f} W"]
    if info.welcome:
        about = info.welcome
        parts.append(f"agent {about.software} on {about.machine}, {counted(about.cores, 'core')}")
    if info.load and info.load.drive.warning:
        parts.append(f"its drive warns: {info.load.drive.warning}")
    if info.load and info.load.jobs:
        parts.append(f"jobs {', '.join(info.load.jobs)}")
    return printable(", ".join(parts))


def about_job(info: JobInfo, course: JobCourse | None = None) -> str:
    """Return a line about a job: state, rounds, remaining time, score, and what it waits for or failed of."""
    parts = [f"job {info.id} {info.name}: {info.state}", f"{info.unit} {info.round} of {info.rounds}"]
    parts += [stage(info)] if info.stage else []
    left = remaining(course)
    parts += [f"about {left} left"] if left else []
    parts += [score(info)] if info.score is not None else []
    parts += [f"best {info.best:.4f} in {info.unit} {info.best_round}"] if info.best is not None else []
    parts += filter(None, _told(info))
    return printable(", ".join(parts))


def changes(before: FleetSnapshot, now: FleetSnapshot, *, rounds: bool) -> Iterator[str]:
    """Yield a line for each change between two snapshots: the daemon's answers, events of devices, states of
    jobs, with ``rounds`` also their new rounds, and the events of followed jobs.
    """
    if before.fault != now.fault:
        yield printable(f"no answer: {now.fault}" if now.fault else "the host daemon answers again")
    yield from (
        f"{clock(event.at)} {printable(f'{event.device} {event.text}')}"
        for event in now.fleet.events
        if event.at > before.at
    )
    known = {info.id: info for info in before.jobs}
    for info in now.jobs if before.at else ():
        old, course = known.get(info.id), now.followed.get(info.id)
        moved = rounds and old is not None and old.round != info.round
        if old is None or old.state != info.state or old.reason != info.reason or moved:
            yield f"{clock(now.at)} {about_job(info, course)}"
    for number, course in now.followed.items():
        yield from _job_events(number, course, before.followed.get(number))


def _job_events(number: int, course: JobCourse, before: JobCourse | None) -> Iterator[str]:
    seen = before.info.round if before else course.info.round
    for each, event in course.events:
        if each > seen:
            who = f"{event.worker} " if event.worker else ""
            yield f"{clock(event.at)} {printable(f'job {number}: {who}{event.kind}: {event.text}')}"


def clock(at: float) -> str:
    """Return a time in Unix seconds as the wall's clock has it here."""
    return f"{datetime.datetime.fromtimestamp(at).astimezone():%H:%M:%S}"

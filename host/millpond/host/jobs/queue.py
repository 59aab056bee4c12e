# SPDX-License-Identifier: Apache-2.0
"""Pure: which queued jobs begin, and which others they wait for.

A job begins when no job before it has or wants one of its devices: those that run, then those of higher
priority, then older ones. A job that waits keeps its devices from all behind it, so that none waits for ever;
jobs that share no device run beside each other, and nothing interrupts a job that runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from millpond.base.errors import Refused
from millpond.host.records.jobs import ACTIVE, JobRow, JobState


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that has not begun: its number, and what decides about its beginning."""

    id: int
    priority: int
    devices: frozenset[str]


@dataclass(frozen=True, slots=True)
class QueueDecision:
    """The jobs that begin now, in order, and by job the others that it waits for."""

    begin: tuple[int, ...]
    waits: dict[int, tuple[int, ...]]


def decide(running: Mapping[int, Set[str]], queued: Iterable[QueuedJob]) -> QueueDecision:
    """Return what becomes of the queued jobs beside the running ones, whose devices are given by job."""
    last = {device: job for job, devices in running.items() for device in devices}
    begin: list[int] = []
    waits: dict[int, tuple[int, ...]] = {}
    for job in sorted(queued, key=lambda job: (-job.priority, job.id)):
        before = {last[device] for device in job.devices if device in last}
        if before:
            waits[job.id] = tuple(sorted(before))
        else:
            begin.append(job.id)
        last |= dict.fromkeys(job.devices, job.id)
    return QueueDecision(tuple(begin), waits)


def describe(waits: tuple[int, ...]) -> str:
    """Describe the jobs that a queued job waits for; "" for none."""
    if not waits:
        return ""
    return f"waits for job{'s' if len(waits) > 1 else ''} {', '.join(map(str, waits))}"


def check_unused(device: str, jobs: Iterable[JobRow]) -> None:
    """Raise Refused while a job runs with a device of the fleet, or waits for one that it names."""
    users = [job.id for job in jobs if job.state in ACTIVE and _uses(job, device)]
    if users:
        numbers = f"job{'s' if len(users) > 1 else ''} {', '.join(map(str, users))}"
        raise Refused("", "state", f"{device} is used by {numbers}")


def _uses(job: JobRow, device: str) -> bool:
    return device in job.job.devices or (job.state is JobState.RUNNING and not job.job.devices)

# SPDX-License-Identifier: Apache-2.0
"""Pure: the parts of the daemon that a job uses, and the two ways in which a job ends before its model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from millpond.base.errors import LocalError

if TYPE_CHECKING:
    from millpond.host.fleet.device import Device
    from millpond.host.fleet.directory import Fleet
    from millpond.host.jobs.energy import Readings
    from millpond.host.jobs.outer.mailbox import OuterMailbox
    from millpond.host.store.store import Store
    from millpond.linux.zygote.client import Zygote
    from millpond.train.job.file_cache import FileCache
    from millpond.train.job.overlays import Overlays

T = TypeVar("T")
Traffic = dict[str, tuple[int, int]]


class JobFailed(LocalError):
    """The job cannot go on; the text says why."""


class JobStopped(LocalError):
    """A user or the end of the daemon stopped the job."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """The parts of the daemon that a job uses. ``mount`` returns the folder of a device's volume on the host,
    ``traffic`` the bytes (to, from) that crossed each device's tunnel, ``energy`` the meters' readings;
    ``changed`` is to be called when the job has made progress. Workers on the host are forks of ``zygote``.
    ``files`` has the contents of jobs' files, ``overlays`` their unpacked wheels. ``between`` lets devices
    reach each other by their tunnels. A resident job has its orders from ``outer``.
    """

    fleet: Fleet
    store: Store
    devices: Mapping[str, Device]
    mount: Callable[[str], Path]
    traffic: Callable[[], Traffic]
    energy: Callable[[], Readings]
    changed: Callable[[], None]
    zygote: Zygote
    files: FileCache
    overlays: Overlays
    between: Callable[[Sequence[str]], AbstractContextManager[object]]
    outer: OuterMailbox | None = None


def limited(context: JobContext, names: Collection[str]) -> JobContext:
    """Return the context of a job that takes part with the named devices alone."""
    others = context.devices.keys() - set(names)

    def energy() -> Readings:
        found = context.energy()
        return replace(found, by_worker=_without(found.by_worker, others))

    return replace(
        context,
        devices=_without(context.devices, others),
        traffic=lambda: _without(context.traffic(), others),
        energy=energy,
    )


def _without(by_name: Mapping[str, T], others: Collection[str]) -> dict[str, T]:
    return {name: value for name, value in by_name.items() if name not in others}


def since(before: Traffic, now: Traffic) -> Traffic:
    """Return the bytes (to, from) that crossed each device's tunnel between two counts."""
    zero = (0, 0)
    return {
        name: (to - before.get(name, zero)[0], back - before.get(name, zero)[1])
        for name, (to, back) in now.items()
    }

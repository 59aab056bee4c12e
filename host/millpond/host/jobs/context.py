# SPDX-License-Identifier: Apache-2.0
"""Pure: the parts of the daemon that a job uses, and the two ways in which a job ends before its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.base.errors import LocalError

if TYPE_CHECKING:
    from millpond.host.fleet.device import Device
    from millpond.host.fleet.directory import Fleet
    from millpond.host.jobs.energy import Readings
    from millpond.host.store.store import Store
    from millpond.linux.zygote.client import Zygote
    from millpond.train.job.file_cache import FileCache
    from millpond.train.job.overlays import Overlays

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
    ``files`` has the contents of jobs' files, ``overlays`` their unpacked wheels.
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


def since(before: Traffic, now: Traffic) -> Traffic:
    """Return the bytes (to, from) that crossed each device's tunnel between two counts."""
    zero = (0, 0)
    return {
        name: (to - before.get(name, zero)[0], back - before.get(name, zero)[1])
        for name, (to, back) in now.items()
    }

# SPDX-License-Identifier: Apache-2.0
"""Pure: a fleet with its jobs at one time, as all views of it show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millpond.host.api.daemon import JobInfo
from millpond.host.monitor.fleet_history import FleetHistory
from millpond.host.monitor.job_view import JobCourse


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The fleet as the daemon has told it last. ``version`` is greater in each later snapshot. ``fault`` says
    why the daemon does not answer now, "" if it does; all else is of its last answer, ``at`` a time (Unix
    seconds). ``jobs`` are the newest ones, oldest first; ``followed`` has the courses of the followed jobs
    by number, ``refused`` the reasons why some cannot be followed.
    """

    version: int = 0
    fault: str = ""
    fleet: FleetHistory = field(default_factory=FleetHistory)
    jobs: tuple[JobInfo, ...] = ()
    followed: Mapping[int, JobCourse] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def at(self) -> float:
        """The time of the daemon's last answer in Unix seconds, 0 before the first."""
        return self.fleet.at

    def job(self, number: int) -> JobInfo | None:
        """Return a job that is listed or followed, None for another one."""
        listed = next((info for info in self.jobs if info.id == number), None)
        course = self.followed.get(number)
        return listed or (course.info if course else None)

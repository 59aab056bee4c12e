# SPDX-License-Identifier: Apache-2.0
"""Edge: asks the host daemon for the figures of a scrape.

Devices and jobs are asked for at each scrape. A thread follows each job that is shown, and another one reads
what takes longer: ledgers, tunnels and volumes, at most once a period and only as long as somebody scrapes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.fs.mount.stats_socket import read_stats
from millpond.fs.proto.status import GetStatus, StatusIs
from millpond.host.api.daemon import JobInfo
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.monitor.exporter.samples import FleetDetails, FleetReading
from millpond.host.records.job_totals import JobTotals
from millpond.host.records.jobs import JobState
from millpond.wire.control_messages import Ledger

log = logging.getLogger(__name__)
SHOWN: Final = 10
"""Jobs that are shown one by one."""
PERIOD: Final = 30.0
"""Seconds from one reading of the details to the next, at least."""
ANSWER_SECONDS: Final = 5.0
_POLL: Final = 1.0


def shown(jobs: Sequence[JobInfo], most: int) -> list[JobInfo]:
    """Return the jobs of which a scrape shows all figures: those that run, then the newest."""
    return sorted(jobs, key=lambda job: (job.state == JobState.RUNNING, job.id), reverse=True)[:most]


class FleetSource:
    """The figures of the fleet in a directory. Thread-safe."""

    def __init__(self, directory: Path, *, shown: int = SHOWN, period: float = PERIOD) -> None:
        self._directory, self._most, self._period = directory, shown, period
        self._lock, self._reading, self._scraped = threading.Lock(), threading.Lock(), threading.Event()
        self._details: FleetDetails | None = None
        self._followed: dict[int, _FollowedJob] = {}
        self._told = ""

    def read_once(self) -> None:
        """Read the details, and wait until the rounds of all jobs that are shown have come; for a process
        that shows the figures once.
        """
        with contextlib.suppress(MillpondError, OSError):  # the daemon is down
            self.read_details()
        self.read()
        end = time.monotonic() + ANSWER_SECONDS
        with self._lock:
            followed = list(self._followed.values())
        for each in followed:
            each.caught_up.wait(max(0.0, end - time.monotonic()))

    def start(self) -> None:
        """Read the details behind each scrape in a thread, and once now."""
        self._scraped.set()
        threading.Thread(target=self._read_behind_scrapes, name="details", daemon=True).start()

    def read(self) -> FleetReading | None:
        """Return the figures now, None if the daemon does not answer. Scrapes wait for one another: anybody
        may scrape, and the daemon has few places.
        """
        with self._reading:
            return self._read()

    def _read(self) -> FleetReading | None:
        begun = time.monotonic()
        try:
            with DaemonClient(self._directory, seconds=ANSWER_SECONDS) as client:
                fleet, jobs = client.overview(), client.jobs()
        except (MillpondError, OSError) as error:
            self._tell(str(error))
            return None
        self._tell("")
        seconds = time.monotonic() - begun
        self._scraped.set()
        with self._lock:
            totals = self._follow(shown(jobs, self._most))
            return FleetReading(seconds, fleet, jobs, totals, self._details)

    def read_details(self) -> None:
        """Read what takes longer, for the next ``read``. An absent device is left out."""
        with DaemonClient(self._directory) as client:
            begun, devices = time.time(), client.devices()
            tunnels = {}
            for each in devices:
                with contextlib.suppress(MillpondError):  # it has not been started yet
                    tunnels[each.name] = client.tunnel(each.name)
            ready = [each.name for each in devices if each.state == DeviceState.READY]
            volumes = {name: found for name in ready if (found := self._volume(name))}
            ledgers = {name: found for each in ready for name, found in self._ledger(each).items()}
            mounts = read_stats(client.fleet.mount_stats)
        details = FleetDetails(begun, ledgers, tunnels, volumes, mounts)
        with self._lock:
            self._details = details

    def _ledger(self, device: str) -> dict[str, Ledger]:
        """Return the ledger of one device, which costs the others nothing if it does not answer."""
        try:
            with DaemonClient(self._directory, seconds=ANSWER_SECONDS) as client:
                return client.ledgers(device)
        except (MillpondError, OSError):
            return {}

    def _volume(self, device: str) -> StatusIs | None:
        deadline = Deadline.after(ANSWER_SECONDS)
        try:
            with DaemonClient(self._directory) as client, client.volume(device, deadline) as channel:
                return channel.call(GetStatus(), StatusIs, deadline)
        except (MillpondError, OSError):
            return None

    def _read_behind_scrapes(self) -> None:
        while True:
            if not self._scraped.wait(_POLL):
                continue
            self._scraped.clear()
            begun = time.monotonic()
            try:
                self.read_details()
            except (MillpondError, OSError) as error:
                log.debug("no details: %s", error)
            time.sleep(max(0.0, begun + self._period - time.monotonic()))

    def _follow(self, jobs: Sequence[JobInfo]) -> dict[int, JobTotals]:
        """Follow those of the shown jobs that have begun, and return the totals of all."""
        before, self._followed = self._followed, {}
        for job in jobs:
            known = before.get(job.id)
            goes_on = known is None or (known.ended and known.round != job.round)
            if goes_on and job.state != JobState.QUEUED:
                totals = known.totals if known else JobTotals()
                known = _FollowedJob(self._directory, job.id, totals)
            if known:
                self._followed[job.id] = known
        return {job.id: self._totals(job.id) for job in jobs}

    def _totals(self, job: int) -> JobTotals:
        found = self._followed.get(job)
        return found.totals if found else JobTotals()

    def _tell(self, fault: str) -> None:
        if fault and fault != self._told:
            log.warning("%s", fault)
        elif self._told and not fault:
            log.warning("the host daemon answers again")
        self._told = fault


class _FollowedJob:
    """A job that a thread follows until it ends; ``totals`` stay those ``before`` until all rounds have
    come, so that no counter goes back.
    """

    def __init__(self, directory: Path, number: int, before: JobTotals) -> None:
        self._directory, self._number, self.totals = directory, number, before
        self.ended, self.round, self.caught_up = False, 0, threading.Event()
        threading.Thread(target=self._run, name=f"job {number}", daemon=True).start()

    def _run(self) -> None:
        totals = JobTotals()
        try:
            with DaemonClient(self._directory) as client:
                for progress in client.watch(self._number):
                    totals = totals.plus(progress.rounds)
                    if not progress.more:
                        self.totals, self.round = totals, progress.info.round
                        self.caught_up.set()
        except (MillpondError, OSError) as error:
            log.debug("job %d is no longer followed: %s", self._number, error)
        self.ended = True
        self.caught_up.set()

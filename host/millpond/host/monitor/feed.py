# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): asks the daemon for devices and jobs once a period, follows jobs, and gives snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Self, TypeVar

from millpond.base.errors import MillpondError, Refused
from millpond.host.api.daemon import Devices, JobInfo
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.monitor.fleet_snapshot import FleetSnapshot
from millpond.host.monitor.job_view import JobCourse, has_ended

T = TypeVar("T")
PERIOD_SECONDS: Final = 1.0
MOST_JOBS: Final = 50


class Feed:
    """A thread that keeps a snapshot of the fleet in ``directory`` up to date until ``close``, also through
    restarts of the daemon. Each followed job has a thread of its own while it is active. Thread-safe.
    """

    def __init__(
        self, directory: Path, *, period: float = PERIOD_SECONDS, most_jobs: int = MOST_JOBS
    ) -> None:
        """Ask every ``period`` seconds for the devices and the ``most_jobs`` newest jobs."""
        self.directory, self._period, self._most = directory, period, most_jobs
        self._changed = threading.Condition()
        self._snapshot = FleetSnapshot()
        self._wanted: set[int] = set()
        self._watches: dict[int, _JobWatch] = {}
        self._client: DaemonClient | None = None
        self._stop = threading.Event()
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet feed", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ask no more."""
        with self._changed:
            self._stop.set()
            self._now.set()
            self._wanted.clear()
            watches = list(self._watches.values())
            if self._client:
                self._client.close()
            self._changed.notify_all()
        for watch in watches:
            watch.close()
            watch.join()
        self._thread.join()

    @property
    def snapshot(self) -> FleetSnapshot:
        """The last snapshot."""
        return self._snapshot

    def wait(self, version: int, seconds: float) -> FleetSnapshot:
        """Return the first snapshot that is newer than ``version``, or the last one after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot.version > version or self._stop.is_set(), seconds)
            return self._snapshot

    def ask_now(self) -> None:
        """Ask at once, as something has just been done to the fleet."""
        self._now.set()

    def follow(self, number: int) -> None:
        """Have the course of a job in the snapshots from now on. It begins with the job's first round."""
        with self._changed:
            self._wanted.add(number)
        self._now.set()

    def unfollow(self, number: int) -> None:
        """Have the course of a job in the snapshots no longer."""
        with self._changed:
            self._wanted.discard(number)
            watch = self._watches.pop(number, None)
            self._update(
                followed=_without(self._snapshot.followed, number),
                refused=_without(self._snapshot.refused, number),
            )
        if watch:
            watch.close()

    def _update(self, **changes: object) -> None:
        """Make the next snapshot."""
        with self._changed:
            old = self._snapshot
            self._snapshot = replace(old, version=old.version + 1, **changes)  # type: ignore[arg-type]
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self._now.clear()
            try:
                client = self._client or self._connect()
                self._take(client.overview(), client.jobs(self._most))
            except (MillpondError, OSError) as error:
                self._disconnect(str(error))
            self._begin_watches()
            self._now.wait(max(0.0, began + self._period - time.monotonic()))
        self._disconnect("")

    def _connect(self) -> DaemonClient:
        client = DaemonClient(self.directory)
        with self._changed:
            self._client = client
            if self._stop.is_set():
                client.close()
        return client

    def _disconnect(self, fault: str) -> None:
        with self._changed:
            if self._client:
                self._client.close()
            self._client = None
            self._update(fault=fault)

    def _take(self, devices: Devices, jobs: tuple[JobInfo, ...]) -> None:
        self._update(fault="", fleet=self._snapshot.fleet.after(time.time(), devices), jobs=jobs)

    def _begin_watches(self) -> None:
        """Watch the wanted jobs that are not watched, unless they have ended and are known to their end."""
        with self._changed:
            now = self._snapshot
            for number in () if now.fault else self._wanted - self._watches.keys() - now.refused.keys():
                course = now.followed.get(number)
                if course is None or not has_ended(course.info) or _goes_on(course.info, now):
                    self._watches[number] = _JobWatch(self, number)

    def told(self, watch: _JobWatch, course: JobCourse) -> None:
        """Take the course of a job from its watch."""
        with self._changed:
            number = course.info.id
            if self._watches.get(number) is watch:
                self._update(followed={**self._snapshot.followed, number: course})

    def ended(self, watch: _JobWatch, number: int, refusal: str) -> None:
        """Take the end of a watch, with the reason why the job cannot be followed, if that is so."""
        with self._changed:
            if self._watches.get(number) is watch:
                del self._watches[number]
                if refusal:
                    self._update(refused={**self._snapshot.refused, number: refusal})


class _JobWatch:
    """A thread that follows a job until the job has ended, or the daemon is lost."""

    def __init__(self, feed: Feed, number: int) -> None:
        self._feed, self._number = feed, number
        self._closing = threading.Lock()
        self._client: DaemonClient | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"feed of job {number}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Follow the job no longer. The thread ends by itself: it may be amid a thousand rounds."""
        with self._closing:
            self._closed = True
            if self._client:
                self._client.close()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        refusal = ""
        try:
            with DaemonClient(self._feed.directory) as client:
                with self._closing:
                    if self._closed:
                        return
                    self._client = client
                self._watch(client)
        except Refused as error:
            refusal = "" if error.code == "ended" else str(error)
        except (MillpondError, OSError):  # the daemon has ended, which the feed tells
            pass
        finally:
            self._feed.ended(self, self._number, refusal)

    def _watch(self, client: DaemonClient) -> None:
        course: JobCourse | None = None
        for progress in client.watch(self._number):
            course = (course or JobCourse(progress.info)).after(progress)
            if not progress.more:
                self._feed.told(self, course)


def _goes_on(ended: JobInfo, now: FleetSnapshot) -> bool:
    """Return whether a job that had ended is active again."""
    listed = next((info for info in now.jobs if info.id == ended.id), None)
    return listed is not None and not has_ended(listed) and now.at > (ended.ended or 0.0)


def _without(by_number: Mapping[int, T], number: int) -> dict[int, T]:
    return {each: value for each, value in by_number.items() if each != number}

# SPDX-License-Identifier: Apache-2.0
"""Edge (asyncio): keeps open pages up to date by server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Final, TypeVar

from markupsafe import escape
from starlette.concurrency import run_in_threadpool

from millpond.base.errors import MillpondError
from millpond.host.monitor.dashboard.access import Role
from millpond.host.monitor.dashboard.pages import DevicePage, PageView
from millpond.host.monitor.dashboard.rendering import Renderer
from millpond.host.monitor.feed import Feed
from millpond.host.monitor.fleet_snapshot import FleetSnapshot

LEAST_SECONDS: Final = 0.25
"""The time between two events of a page: a job may have a hundred steps a second."""
CHART_SECONDS: Final = 1.0
"""The time between two drawings of the charts, which take a browser longer than text."""
LOOK_SECONDS: Final = 0.04
"""The time between two looks for a newer snapshot."""
MOST_FOLLOWED: Final = 1
"""Jobs that are followed, if not more are on open pages: one of 1,000 rounds of 64 workers takes 60 MiB."""


KIND_THREADS: Final = 4
"""Pages of one kind that are made at once, of the threads that all share."""
T = TypeVar("T")


class Live:
    """The newest snapshot of a feed, for the pages that are open. Used in one event loop."""

    def __init__(self, feed: Feed, renderer: Renderer) -> None:
        self._feed, self._renderer = feed, renderer
        self._open: Counter[int] = Counter()
        self._followed: OrderedDict[int, None] = OrderedDict()
        self._ended = False
        self._makers = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(KIND_THREADS))
        self._of_devices = defaultdict[str, asyncio.Semaphore](asyncio.Semaphore)

    async def run(self, page: PageView, make: Callable[..., T], *arguments: Any) -> T:
        """Call ``make`` in a thread. A device that does not answer holds up one thread, other pages of a kind
        a few, so that these do not wait for each other.
        """
        by_device = isinstance(page, DevicePage)
        async with self._of_devices[page.path] if by_device else self._makers[page.template]:
            return await run_in_threadpool(make, *arguments)

    def end(self) -> None:
        """End the events of all open pages."""
        self._ended = True

    def follow(self, jobs: Collection[int]) -> None:
        """Have the courses of jobs in the snapshots, and end that of the job that was looked at longest ago
        where these become too many.
        """
        for number in jobs:
            self._followed[number] = None
            self._followed.move_to_end(number)
            self._feed.follow(number)
        closed = [each for each in self._followed if not self._open[each] and each not in jobs]
        for number in closed[: max(0, len(self._followed) - MOST_FOLLOWED)]:
            del self._followed[number]
            self._feed.unfollow(number)

    def values(self, page: PageView, snapshot: FleetSnapshot, role: Role) -> dict[str, Any]:
        """Return all values of a page's template. Raises MillpondError."""
        common = {"live": "/live" + page.path, "at": snapshot.at, "fault": snapshot.fault, "role": role}
        return common | page.values(snapshot)

    async def events(self, page: PageView, role: Role) -> AsyncIterator[str]:
        """Yield events with what has changed in a page, at first all of it, until this is closed."""
        sent, drawn = dict[str, str](), -CHART_SECONDS
        self._open.update(page.jobs)
        self.follow(page.jobs)
        try:
            while not self._ended:
                snapshot = self._feed.snapshot
                told = await self.run(page, self._parts, page, snapshot, role)
                if (now := time.monotonic()) - drawn >= CHART_SECONDS:
                    drawn = now
                    told |= await self.run(page, self._charts, page, snapshot)
                changed = {name: text for name, text in told.items() if sent.get(name) != text}
                sent |= changed
                if changed:
                    yield f"data: {{{','.join(f'{json.dumps(n)}:{t}' for n, t in changed.items())}}}\n\n"
                await asyncio.sleep(LEAST_SECONDS)
                while self._feed.snapshot.version == snapshot.version and not self._ended:
                    await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._open.subtract(page.jobs)

    def _parts(self, page: PageView, snapshot: FleetSnapshot, role: Role) -> dict[str, str]:
        """Return the HTML of the parts of a page by their ids, as JSON."""
        try:
            parts = self._renderer.parts(page.template, self.values(page, snapshot, role))
            parts["fault"] = escape(snapshot.fault)
        except MillpondError as error:
            parts = {"fault": escape(str(error))}
        return {name: json.dumps(value) for name, value in parts.items()}

    def _charts(self, page: PageView, snapshot: FleetSnapshot) -> dict[str, str]:
        """Return the charts of a page by the ids of their places, as JSON."""
        return {name: json.dumps(chart.document()) for name, chart in page.charts(snapshot).items()}

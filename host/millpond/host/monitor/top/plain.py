# SPDX-License-Identifier: Apache-2.0
"""Edge (standard output): the live view as lines of text, without colours and movements of the cursor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from millpond.host.monitor.feed import Feed
from millpond.host.monitor.fleet_snapshot import FleetSnapshot
from millpond.host.monitor.job_view import has_ended
from millpond.host.monitor.top import texts

ANSWER_SECONDS: Final = 60.0
MOST_FOLLOWED: Final = 8


def follow_active(feed: Feed, now: FleetSnapshot, shown: int | None = None) -> None:
    """Have the feed follow the newest active jobs, whose remaining time is told, and the ``shown`` one."""
    active = [info.id for info in now.jobs if not has_ended(info)]
    wanted = {*active[-MOST_FOLLOWED:], *([] if shown is None else [shown])}
    for number in now.followed.keys() - wanted:
        feed.unfollow(number)
    for number in wanted - now.followed.keys():
        feed.follow(number)


def lines(feed: Feed, name: str) -> Iterator[str]:
    """Yield the fleet ``name`` as it is, a line for each device and active job, then a line for each change,
    without end.
    """
    now = feed.wait(0, ANSWER_SECONDS)
    yield from _whole(name, now)
    while True:
        before, now = now, feed.wait(now.version, ANSWER_SECONDS)
        follow_active(feed, now)
        yield from texts.changes(before, now, rounds=True)


def _whole(name: str, now: FleetSnapshot) -> Iterator[str]:
    yield texts.summary(name, now)
    for info in now.fleet.devices:
        yield texts.about_device(info, now.fleet.last(info.name))
    yield from now.fleet.warnings
    for job in now.jobs:
        if not has_ended(job):
            yield texts.about_job(job)

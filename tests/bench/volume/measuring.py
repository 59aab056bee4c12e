# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): measures a workload on all routes in alternation, and turns the results into rows."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.experiment import Run
from bench.rows import Row, summary
from bench.tunnel.accounting import usage
from bench.tunnel.namespace import Traffic
from bench.tunnel.record import Record
from bench.volume.route import Mount, Route, RouteFailed
from bench.volume.workload import Done, Workload

_PARTS = {
    "near": "processor time of the mount's processes",
    "reader": "processor time of the program that uses the files",
    "far": "processor time of the tunnel and all else on both its ends",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """``routes``, millpond's first, take turns. ``name`` begins its figures, ``what`` its rows."""

    name: str
    what: str
    workload: Workload
    routes: Sequence[Route]
    repeats: int
    emulation: str


def take_turns(
    trial: Trial, run: Run, record: Record | None = None, repeats: Sequence[int] | None = None
) -> Record:
    """Speeds per second and processor time in us, by route. A peer that fails is left out from then on.
    All repeats, or those named, which are added to the record.

    Raises RouteFailed if millpond's route does.
    """
    record = Record() if record is None else record
    for repeat in range(trial.repeats) if repeats is None else repeats:
        for number in range(len(trial.routes)):
            route = trial.routes[(repeat + number) % len(trial.routes)]
            if route.key not in record.missing:
                _take_turn(trial, route, repeat, record)
        run.say(f"{trial.name}: {repeat + 1} of {trial.repeats}: {_latest(trial, record)}")
    return record


def _take_turn(trial: Trial, route: Route, repeat: int, record: Record) -> None:
    try:
        with _blamed():
            record.add(route.key, **_measure(route, trial.workload, repeat))
    except RouteFailed as error:
        if route is trial.routes[0]:
            raise RouteFailed(f"{trial.name}: {route.label}: {error}") from error
        record.missing[route.key] = " ".join(str(error).split())


@contextlib.contextmanager
def _blamed() -> Iterator[None]:
    """What the system refuses is the route's failure."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise RouteFailed(str(error)) from error


def _latest(trial: Trial, record: Record) -> str:
    values = {route.key: record.values("speed", route.key) for route in trial.routes}
    missing = [f"{key}: {reason}" for key, reason in record.missing.items()]
    return ", ".join([*(f"{key} {found[-1]:.4g}" for key, found in values.items() if found), *missing])


def _measure(route: Route, workload: Workload, repeat: int) -> dict[str, float]:
    with route.opened() as mount:
        workload.prepare(mount, repeat)
        crossed = mount.traffic() if mount.traffic else None
        before = {"near": usage(mount.near), "far": usage(mount.far)}
        done = workload.work(mount, repeat)
        used = {"near": usage(mount.near).since(before["near"]), "far": usage(mount.far).since(before["far"])}
        if crossed:
            _check_crossed(mount, crossed, done)
        workload.check(mount, repeat)
    found = {"speed": done.amount / done.seconds, "reader": 1e6 * done.cpu / done.amount}
    served = {part: pids for part, pids in (("near", mount.near), ("far", mount.far)) if pids}
    return found | {part: 1e6 * used[part].seconds / done.amount for part in served}


def _check_crossed(mount: Mount, before: Traffic, done: Done) -> None:
    assert mount.traffic
    now = mount.traffic()
    fetched, sent = now.received - before.received, now.sent - before.sent
    if fetched < done.fetched or sent < done.sent:
        raise RouteFailed(
            f"{done.fetched} bytes came and {done.sent} went, but the tunnel counted {fetched} and {sent}"
        )


def ratio(figure: str, trial: Trial, record: Record, peer: str, key: str | None = None) -> Row:
    """Millpond's speed over the peer's, repeat by repeat; by its first route, or that of the key."""
    routes = {route.key: route for route in trial.routes}
    ours, other = routes[key] if key else trial.routes[0], routes[peer]
    values = record.ratios("speed", ours.key, peer)
    what = f"{trial.what}{f'; {ours.label}' if key else ''}: speed over that of {other.label}"
    if not values:
        missing = ours if ours.key in record.missing else other
        what = f"not measured: {missing.label}: {record.missing.get(missing.key, 'no repeat')}"
    return summary(figure, what, values, "x", peer=other.label, emulation=trial.emulation)


def details(trial: Trial, record: Record) -> list[Row]:
    """A row for each route's speed, and for each part of its processor time."""
    rows = [_speed(trial, route, record) for route in trial.routes]
    for part, meaning in _PARTS.items():
        for route in trial.routes:
            if values := record.values(part, route.key):
                figure, what = f"{trial.name}_{part}_us.{route.key}", f"{route.label}: {meaning}"
                unit = f"us/{trial.workload.counts}"
                rows.append(summary(figure, what, values, unit, emulation=trial.emulation))
    return rows


def _speed(trial: Trial, route: Route, record: Record) -> Row:
    what, values = f"{trial.what}: {route.label}", record.values("speed", route.key)
    if reason := record.missing.get(route.key):
        what += f"; {'stopped' if values else 'not measured'}: {reason}"
    unit = "MiB/s" if trial.workload.counts == "MiB" else "1/s"
    return summary(f"{trial.name}.{route.key}", what, values, unit, emulation=trial.emulation)

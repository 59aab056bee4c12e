# SPDX-License-Identifier: Apache-2.0
"""Edge (files): synchronous training on up to 278 hosts of 36 devices, simulated: two levels and flat."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.experiment import Experiment, Findings, Line, Panel, Role, Run
from bench.rows import Row, summary
from millpond.host.cli.simulation.fleet import PolicyResult, Simulation, cohort_of, read, run
from millpond.host.cli.simulation.hosts import Exchange, Hosts

_ROOT = Path(__file__).parents[3]
FILE = _ROOT / "agent" / "examples" / "hosts-100.toml"
TUNNEL = _ROOT / "docs" / "bench" / "tunnel.json"
_EXCHANGES: dict[Exchange, tuple[str, Role, str]] = {
    "two-levels": ("two", "millpond", "two levels"),
    "flat-ring": ("ring", "peer", "flat ring, as gloo"),
    "flat-star": ("star", "untuned", "flat star"),
}
_POLICIES = ("millpond", "untuned")


@dataclass(frozen=True, slots=True)
class Point:
    """So many hosts, and the rate of their links in Gbit/s."""

    hosts: int
    gbps: int


POINTS = (Point(1, 25), Point(100, 10), Point(100, 25), Point(100, 100), Point(278, 25))
QUICK = (Point(2, 25),)
_STEPS, _QUICK_STEPS, _REPEATS = 100, 5, 3
Found = dict[tuple[Point, Exchange], dict[str, list[PolicyResult]]]


def measure(run: Run) -> Findings:
    """Rows ``levels_HOSTS_GBPS_EXCHANGE``, of these ``_lost`` and ``_untuned``, and ``levels_gain``."""
    found: Found = {}
    hosts = _measured()
    for point in QUICK if run.quick else POINTS:
        run.say(f"simulation of {point.hosts} hosts, {point.gbps} GbE")
        for exchange in _EXCHANGES:
            found[point, exchange] = _simulate(point, exchange, hosts, quick=run.quick)
    rows = [row for key in found for row in _rows(*key, found, hosts)]
    return Findings((*rows, _gain(found, hosts)), (_panel(found),))


EXPERIMENT = Experiment("levels", "Simulated hosts of 36 devices each, synchronous steps", measure)


def _measured() -> Hosts:
    """Return the example's hosts, with the links of a device as the tunnel's benchmark has measured them."""
    values = {row["figure"]: row["value"] for row in json.loads(TUNNEL.read_text())}
    hosts = read(FILE).hosts
    assert hosts
    return dataclasses.replace(
        hosts,
        device_gbps=values["gbps.c"],
        bus_gbps=values["crowd_gbps.c"],
        device_us=values["rtt_p50.c"] / 2,
    )


def _simulate(
    point: Point, exchange: Exchange, hosts: Hosts, *, quick: bool
) -> dict[str, list[PolicyResult]]:
    found: dict[str, list[PolicyResult]] = {policy: [] for policy in _POLICIES}
    for repeat in range(1 if quick else _REPEATS):
        simulation = _of(point, exchange, hosts, _QUICK_STEPS if quick else _STEPS, repeat)
        for result in run(simulation, cohort_of(simulation, FILE.name), _POLICIES):
            found[result.policy].append(result)
    return found


def _of(point: Point, exchange: Exchange, hosts: Hosts, steps: int, repeat: int) -> Simulation:
    example = read(FILE)
    chosen = dataclasses.replace(hosts, count=point.hosts, link_gbps=float(point.gbps), exchange=exchange)
    return dataclasses.replace(example, hosts=chosen, steps=steps, seed=example.seed + repeat)


def _note(point: Point, hosts: Hosts) -> str:
    return (
        f"simulated: {FILE.name}; nothing runs but the policies; devices' links as docs/bench/tunnel.json has"
        f" them: {hosts.device_gbps:.3g} Gbit/s, {hosts.bus_gbps:.3g} a host's together,"
        f" {hosts.device_us:.2g} us; assumed, not measured: {point.gbps} GbE between hosts,"
        f" {hosts.link_us:g} us"
    )


def _rows(point: Point, exchange: Exchange, found: Found, hosts: Hosts) -> list[Row]:
    suffix, _, label = _EXCHANGES[exchange]
    figure, results = f"levels_{point.hosts}_{point.gbps}_{suffix}", found[point, exchange]
    devices = f"{point.hosts} hosts x 36 devices, {label}"
    speeds = [result.speed for result in results["millpond"]]
    ideal = median(result.speed / result.share for result in results["millpond"])
    lost = [100 * result.communication for result in results["millpond"]]
    note = _note(point, hosts)
    untuned = [result.speed for result in results["untuned"]]
    return [
        summary(figure, f"{devices}; limit {ideal:.0f}", speeds, "img/s", emulation=note),
        summary(f"{figure}_lost", f"{devices}: time lost to the exchange", lost, "%", emulation=note),
        summary(f"{figure}_untuned", f"{devices}, untuned", untuned, "img/s", emulation=note),
    ]


def _gain(found: Found, hosts: Hosts) -> Row:
    """Compare two levels with the ring over all devices, on the most hosts."""
    point = max((point for point, _ in found), key=lambda point: point.hosts)
    pairs = zip(found[point, "two-levels"]["millpond"], found[point, "flat-ring"]["millpond"], strict=True)
    gains = [two.speed / flat.speed for two, flat in pairs]
    what = f"speed in two levels over that of a flat ring, {point.hosts} hosts x 36 devices"
    return summary("levels_gain", what, gains, "x", peer="a flat ring", emulation=_note(point, hosts))


def _panel(found: Found) -> Panel:
    points = [point for point in dict.fromkeys(point for point, _ in found) if point.gbps == POINTS[0].gbps]
    lines = [
        Line(
            role,
            label,
            [36 * point.hosts for point in points],
            [median(result.share for result in found[point, exchange]["millpond"]) for point in points],
        )
        for exchange, (_, role, label) in _EXCHANGES.items()
    ]
    title = f"Simulation: hosts of 36 devices, {POINTS[0].gbps} GbE between them (assumed)"
    return Panel(title, "devices", "share of the ideal", tuple(lines), logarithmic=True)

# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, for the controller): fleets of 36 to 10,000 devices, as ``millpond simulate`` has them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.experiment import Experiment, Findings, Line, Panel, Role, Run
from bench.rows import Row, summary
from millpond.host.cli.simulation.fleet import PolicyResult, Simulation, cohort_of, read, run

FILE = Path(__file__).parents[3] / "agent" / "examples" / "fleet-36.toml"


@dataclass(frozen=True, slots=True)
class Fleet:
    """``devices`` beside the host, for so many steps, with so many random numbers."""

    devices: int
    steps: int
    repeats: int


FULL = (Fleet(36, 2000, 3), Fleet(1000, 1000, 3), Fleet(10_000, 400, 2))
QUICK = (Fleet(36, 20, 1), Fleet(1000, 10, 1), Fleet(10_000, 3, 1))
_SUFFIXES = {"millpond": "", "stannis": "_stannis", "untuned": "_untuned"}
_LABELS: dict[str, tuple[Role, str]] = {
    "millpond": ("millpond", "millpond"),
    "stannis": ("stannis", "the paper's rule"),
    "untuned": ("untuned", "untuned"),
}
_LIMIT = "the ideal, which is the sum of the speeds that are there"
Found = dict[Fleet, dict[str, list[PolicyResult]]]


def measure(run: Run) -> Findings:
    """Rows ``sim_36``, ``sim_1000``, ``sim_10000``, ``sim_bias_percent`` and ``sim_ms``."""
    found: Found = {}
    for fleet in QUICK if run.quick else FULL:
        run.say(f"simulation of {fleet.devices} devices")
        found[fleet] = _simulate(fleet)
    rows = [_share(fleet, policy, found) for fleet in found for policy in _SUFFIXES]
    return Findings((*rows, _bias(found), _milliseconds(found)), (_panel(found),))


EXPERIMENT = Experiment("sim", "Simulated fleets, 10 % of the devices busy, changing", measure)


def _simulate(fleet: Fleet) -> dict[str, list[PolicyResult]]:
    found: dict[str, list[PolicyResult]] = {policy: [] for policy in _SUFFIXES}
    for repeat in range(fleet.repeats):
        simulation = _fleet(fleet, repeat)
        for result in run(simulation, cohort_of(simulation, FILE.name)):
            found[result.policy].append(result)
    return found


def _fleet(fleet: Fleet, repeat: int) -> Simulation:
    """The example with another number of devices, and other random numbers in each repeat."""
    example = read(FILE)
    host, devices = example.kind
    kinds = (host, dataclasses.replace(devices, count=fleet.devices))
    return dataclasses.replace(example, kind=kinds, steps=fleet.steps, seed=example.seed + repeat)


def _note() -> str:
    loads = read(FILE).load
    return (
        f"simulated: {FILE.name} with so many devices; nothing runs but the policies; {loads.busy:.0%} are "
        f"busy, for {loads.lasting:g} steps on average and then {loads.least:g} to {loads.most:g} times as "
        f"slow, and tell of it; steps vary by {loads.noise:.0%}; repeats have other random numbers"
    )


def _share(fleet: Fleet, policy: str, found: Found) -> Row:
    values = [result.share for result in found[fleet][policy]]
    ideal = median(result.speed / result.share for result in found[fleet][policy])
    what = f"{_LABELS[policy][1]}, host + {fleet.devices}, {fleet.steps} steps; limit {ideal:.0f} img/s"
    figure = f"sim_{fleet.devices}{_SUFFIXES[policy]}"
    return summary(figure, what, values, "x", peer=_LIMIT, emulation=_note())


def _bias(found: Found) -> Row:
    bias = {fleet: [100 * result.bias for result in results["millpond"]] for fleet, results in found.items()}
    worst = max(bias, key=lambda fleet: median(bias[fleet]))
    what = f"millpond, {worst.devices} devices: how much less than it should the worst off of them counts"
    return summary("sim_bias_percent", what, bias[worst], "%", emulation=_note())


def _milliseconds(found: Found) -> Row:
    largest = max(found, key=lambda fleet: fleet.devices)
    values = [1e3 * result.controller_seconds for result in found[largest]["millpond"]]
    what = f"millpond, {largest.devices} devices: the controller's time for a step, median of each run"
    return summary("sim_ms", what, values, "ms", emulation=_note())


def _panel(found: Found) -> Panel:
    devices = [fleet.devices for fleet in found]
    lines = [Line("limit", "limit: available speeds", devices, len(devices) * [1.0])]
    for policy, (role, label) in _LABELS.items():
        shares = [median(result.share for result in results[policy]) for results in found.values()]
        lines.append(Line(role, label, devices, shares))
    title = "Simulation: 10 % of the devices busy, changing"
    return Panel(title, "devices", "share of the ideal", tuple(lines), logarithmic=True)

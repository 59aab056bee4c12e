# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): Fig. 7: a host, which is interrupted, with 0 to 36 virtual CSDs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import numpy as np

from bench.balance.csds import ALL, FULL, QUICK, Key, Lengths, Speeds, interrupt
from bench.balance.paper import CURVES, HOST_LEFT, HOST_SPEED, MOBILENET, SHUFFLENET, SPEEDS_36, Server
from bench.balance.team import LABELS, ROLES, emulation
from bench.experiment import Line, Panel, Run
from bench.papers.exhibit import Exhibit, Shown, Value, computed, measured
from millpond.train.balance.equal_time import Cohort, WorkerKind
from millpond.train.balance.policy import PolicyName

POLICIES: tuple[PolicyName, ...] = ("balance", "stannis", "stannis-cpu", "fixed")
_NORMAL, _UNTUNED, _TUNED = SPEEDS_36.values()
_GAIN, _REGAINED = 2.82, 1.45
"""What the paper has of ShuffleNet: host and 36 CSDs over the host, tuned over untuned."""
Found = dict[Key, list[Speeds]]


def _paper(server: Server, count: int, policy: PolicyName | None) -> float | None:
    """Return the paper's speed, ``policy`` None for that without interruption: img/s of MobileNetV2. Its
    tuned one stands beside its rule and beside ours; its other methods have none.
    """
    if server is not MOBILENET or policy == "stannis-cpu":
        return None
    if policy is None:
        return {0: HOST_SPEED, ALL: _NORMAL}.get(count)
    return None if count != ALL else _UNTUNED if policy == "fixed" else _TUNED


def measure(server: Server, run: Run) -> Shown:
    """Run all numbers of CSDs side by side, under each policy."""
    lengths = QUICK if run.quick else FULL
    found = interrupt(
        run, server, [(n, policy) for n in lengths.counts for policy in POLICIES], lengths, tells=True
    )
    scale = 1.0 if server is MOBILENET else 1 / server.host.speed
    unit = "img/s" if server is MOBILENET else "x the host alone"
    rows = [row for count in lengths.counts for row in _rows(server, found, count, scale, unit)]
    rows += _fitted(lengths) if server is MOBILENET else _ratios(found)
    notes = [emulation(lengths.factor, lengths.planned), CURVES]
    notes += [f"6 of the host's 8 cores taken leave it {HOST_LEFT:.3f} of its speed, and it tells of them"]
    if server is SHUFFLENET:
        notes += [
            "the paper has no speed of ShuffleNet: its batches, 300 and 25, take as long as MobileNetV2's"
        ]
    return Shown(
        tuple(rows),
        "; ".join(notes),
        "Virtual workers send no gradients, so that 36 CSDs add all of their speed; by the paper's speeds "
        "its exchange takes a quarter of a step. Its tuned speeds are those of equations 2 and 3.",
        (_panel(server, found, lengths, scale, unit),),
    )


def _rows(server: Server, found: Found, count: int, scale: float, unit: str) -> list[Value]:
    normal = [scale * speeds.normal for speeds in found[count, "balance"]]
    rows = [measured(_machines(count), unit, _paper(server, count, None), normal)]
    for policy in POLICIES:
        speeds = [scale * one.interrupted for one in found[count, policy]]
        what = f"{_machines(count)}, host interrupted: {LABELS[policy]}"
        rows.append(measured(what, unit, _paper(server, count, policy), speeds))
    return rows


def _machines(count: int) -> str:
    return f"host + {count} CSD{'s' if count > 1 else ''}" if count else "host alone"


def _ratios(found: Found) -> list[Value]:
    """Rows of the two ratios that the paper has of ShuffleNet."""
    pairs = zip(found[ALL, "balance"], found[0, "balance"], strict=True)
    rows = [
        measured(
            "host + 36 CSDs over host alone",
            "x",
            _GAIN,
            [both.normal / alone.normal for both, alone in pairs],
        )
    ]
    for policy in POLICIES[:-1]:
        pairs = zip(found[ALL, policy], found[ALL, "fixed"], strict=True)
        ratios = [tuned.interrupted / untuned.interrupted for tuned, untuned in pairs]
        what = f"host + 36 CSDs, host interrupted: {LABELS[policy]} over untuned"
        rows.append(measured(what, "x", None if policy == "stannis-cpu" else _REGAINED, ratios))
    return rows


def _fitted(lengths: Lengths) -> list[Value]:
    """Rows with an exchange of so many seconds for each CSD that host and 36 CSDs make the paper's speed, and
    a slowness of the host that makes its untuned one.
    """
    batches, step = _planned(ALL, 1.0)
    each = (batches / _NORMAL - step) / ALL
    slowness = (batches / _UNTUNED - ALL * each) / step
    rows = []
    for count in lengths.counts:
        batches, step = _planned(count, 1.0)
        what = f"{_machines(count)}, if the exchange takes {each:.4f} s for each CSD (fitted to {_NORMAL})"
        rows.append(computed(what, "img/s", _paper(MOBILENET, count, None), batches / (step + count * each)))
    batches, step = _planned(ALL, slowness)
    what = (
        f"{_machines(ALL)} with that exchange, host interrupted to {1 / slowness:.2f} of its speed "
        f"(fitted to {_UNTUNED}): millpond's plan"
    )
    return [*rows, computed(what, "img/s", _TUNED, batches / (step + ALL * each))]


def _planned(count: int, slowness: float) -> tuple[float, float]:
    """Return the samples and the seconds of a step that the controller plans."""
    machines = (MOBILENET.host, MOBILENET.csd)
    cohort = Cohort([WorkerKind(one.curve, one.most) for one in machines], [0] + count * [1])
    slow = np.ones(count + 1)
    slow[0] = slowness
    seconds = cohort.step_seconds(slow)
    batches = cohort.batches(seconds, slow)
    return float(batches.sum()), float(cohort.times(batches, slow).max())


def _panel(server: Server, found: Found, lengths: Lengths, scale: float, unit: str) -> Panel:
    counts = lengths.counts

    def line(policy: PolicyName) -> Sequence[float]:
        return [scale * median(one.interrupted for one in found[count, policy]) for count in counts]

    normal = [scale * median(one.normal for one in found[count, "balance"]) for count in counts]
    lines = [Line("millpond", "not interrupted", counts, normal, faint=True)]
    lines += [Line(ROLES[one], f"interrupted: {LABELS[one]}", counts, line(one)) for one in POLICIES]
    if server is MOBILENET:
        ys = (HOST_SPEED, _NORMAL, _UNTUNED, _TUNED)
        lines.append(Line("paper", "the paper", (0, ALL, ALL, ALL), ys, marks=True))
    else:
        lines.append(Line("paper", "the paper", (ALL,), (_GAIN,), marks=True))
    return Panel(f"Fig. 7: {server.network}", "CSDs", unit, tuple(lines))


FIG_7A = Exhibit("fig-7a", "Fig. 7a: Speed over the number of CSDs, MobileNetV2", partial(measure, MOBILENET))
FIG_7B = Exhibit("fig-7b", "Fig. 7b: Speed over the number of CSDs, ShuffleNet", partial(measure, SHUFFLENET))

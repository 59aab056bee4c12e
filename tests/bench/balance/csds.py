# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): Stannis B: a host, which is interrupted, and virtual CSDs at the paper's speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from bench.balance.paper import CSD_SPEED, CURVES, HOST_LEFT, HOST_SPEED, LIMIT, MOBILENET, SPEEDS_36, Server
from bench.balance.team import LABELS, POLICIES, ROLES, emulation, side_by_side, speed, team
from bench.experiment import Experiment, Findings, Line, Panel, Run
from bench.rows import Row, summary
from millpond.train.balance.policy import PolicyName

ALL = 36


@dataclass(frozen=True, slots=True)
class Lengths:
    """Repeats; steps until the speed is measured, and measured; after the interruption the steps until it is
    to be dealt with, and measured; seconds of a step as planned; the numbers of CSDs.
    """

    repeats: int
    begin: int
    normal: int
    tuning: int
    measured: int
    planned: float
    counts: tuple[int, ...]

    @property
    def factor(self) -> float:
        """Of time."""
        return self.planned / MOBILENET.host.curve.seconds[-1]


FULL = Lengths(2, 2, 6, 10, 10, 1.0, (0, 1, 2, 4, 8, 16, 24, ALL))
QUICK = Lengths(1, 1, 2, 6, 2, 0.1, (0, 2, ALL))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Images per second before the host is interrupted, and after that has been dealt with."""

    normal: float
    interrupted: float


Key = tuple[int, PolicyName]
Found = Mapping[Key, Sequence[Speeds]]


def measure(run: Run) -> Findings:
    """Row ``b_speedup_36``, and those of each number of CSDs."""
    lengths = QUICK if run.quick else FULL
    found = interrupt(run, MOBILENET, [(n, policy) for n in lengths.counts for policy in POLICIES], lengths)
    note = f"{emulation(lengths.factor, lengths.planned)}; {CURVES}"
    rows = [_speedup(found, note)]
    rows += [_share(found, count, note) for count in lengths.counts]
    rows += [_interrupted(found, key, note) for key in found]
    return Findings((*rows, *_beside_the_paper(found, note)), (_panel(found, lengths),))


EXPERIMENT = Experiment(
    "b",
    "Stannis B: host and virtual CSDs at the paper's speeds, and with 6 of 8 cores of the host taken",
    measure,
)


def interrupt(
    run: Run, server: Server, keys: Sequence[Key], lengths: Lengths, *, tells: bool = False
) -> dict[Key, list[Speeds]]:
    """Run a server with all numbers of CSDs and policies side by side, as often as there are repeats. The
    host ``tells`` of its load or not.
    """
    found: dict[Key, list[Speeds]] = {key: [] for key in keys}
    for repeat in range(lengths.repeats):
        run.say(f"Stannis B: {server.network}, repeat {repeat + 1} of {lengths.repeats}")
        speeds = side_by_side({key: partial(_interrupt, server, key, lengths, tells=tells) for key in keys})
        for key, one in speeds.items():
            found[key].append(one)
    return found


def _interrupt(server: Server, key: Key, lengths: Lengths, *, tells: bool) -> Speeds:
    count, policy = key
    machines = [server.host.scaled(lengths.factor), *count * [server.csd.scaled(lengths.factor)]]
    with team(machines, policy, tells=tells) as made:
        made.run(lengths.begin)
        normal = made.run(lengths.normal)
        made.workers[0].slowness = 1 / server.left
        made.run(lengths.tuning)
        interrupted = made.run(lengths.measured)
    return Speeds(lengths.factor * speed(normal), lengths.factor * speed(interrupted))


def _of(count: int, left: float = 1.0) -> str:
    host, machines = f"{HOST_SPEED}", "host"
    if left != 1:
        host, machines = f"{left:.3f} x {HOST_SPEED}", f"host at {left:.3f}, untold,"
    limit = f"limit {host} + {count} x {CSD_SPEED} = {MOBILENET.limit(count, left):.1f} img/s"
    return f"{machines} + {count} CSD; {limit}"


def _speedup(found: Found, note: str) -> Row:
    pairs = zip(found[ALL, "balance"], found[0, "balance"], strict=True)
    values = [together.normal / alone.normal for together, alone in pairs]
    limit = MOBILENET.limit(ALL) / HOST_SPEED
    what = f"millpond, host + {ALL} CSD that sleep and send nothing; limit {limit:.2f}"
    return summary("b_speedup_36", what, values, "x", peer="the host alone", emulation=note)


def _shares(found: Found, key: Key) -> list[float]:
    """Of the limit, with the host interrupted."""
    return [speeds.interrupted / MOBILENET.limit(key[0], HOST_LEFT) for speeds in found[key]]


def _share(found: Found, count: int, note: str) -> Row:
    values = [speeds.normal / MOBILENET.limit(count) for speeds in found[count, "balance"]]
    return summary(f"b_share.{count}", f"millpond, {_of(count)}", values, "x", peer=LIMIT, emulation=note)


def _interrupted(found: Found, key: Key, note: str) -> Row:
    count, policy = key
    what = f"{LABELS[policy]}, {_of(count, HOST_LEFT)}"
    figure = f"b_interrupted.{count}{POLICIES[policy]}"
    return summary(figure, what, _shares(found, key), "x", peer=LIMIT, emulation=note)


def _beside_the_paper(found: Found, note: str) -> list[Row]:
    """Rows of images per second."""
    ours, untuned = found[ALL, "balance"], found[ALL, "fixed"]
    speeds = {
        "b_img_s_36": [speeds.normal for speeds in ours],
        "b_img_s_36_untuned": [speeds.interrupted for speeds in untuned],
        "b_img_s_36_interrupted": [speeds.interrupted for speeds in ours],
    }
    return [
        summary(figure, circumstances, values, "img/s", peer=f"the paper's {theirs}", emulation=note)
        for (figure, values), (circumstances, theirs) in zip(speeds.items(), SPEEDS_36.items(), strict=True)
    ]


def _panel(found: Found, lengths: Lengths) -> Panel:
    counts = lengths.counts
    normal = [median(speeds.normal for speeds in found[count, "balance"]) for count in counts]
    lines = [
        Line("limit", "limit", counts, [MOBILENET.limit(count) for count in counts], faint=True),
        Line("millpond", "millpond", counts, normal, faint=True),
        Line(
            "limit",
            "limit, host interrupted",
            counts,
            [MOBILENET.limit(count, HOST_LEFT) for count in counts],
        ),
    ]
    for policy in POLICIES:
        speeds = [median(one.interrupted for one in found[count, policy]) for count in counts]
        lines.append(Line(ROLES[policy], f"{LABELS[policy]}, host interrupted", counts, speeds))
    paper = tuple(SPEEDS_36.values())
    lines.append(Line("peer", "the paper's figures", len(paper) * [ALL], paper, marks=True))
    return Panel("B: a host and virtual CSDs at the paper's speeds", "CSDs", "img/s", tuple(lines))

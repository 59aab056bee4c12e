# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): the accuracy of a federation beside one fleet, and what Flower adds to an outer round."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import millpond.flower
from bench.experiment import Run
from bench.hosts.federated_fleets import (
    EMULATION,
    ENVIRONMENT,
    EVERY,
    SEED,
    Federation,
    accuracy,
    check,
    federation,
    fleet_of,
    job_file,
    noted,
)
from bench.rows import Row, summary
from system.support import MILLPOND

CAUSES = {
    "flower_wait_s": "until the SuperNode has the message and its process begins",
    "flower_process_s": "until that process has loaded Flower and the app",
    "flower_ours_s": "millpond's client, socket, scoring and checkpoint, beside the fleet's rounds",
    "flower_back_s": "until the ServerApp has the last reply",
}
_OURS = "flower_ours_s"
FIGURES = ("flower_accuracy", "flower_accuracy_difference", "flower_round_over_fleet_round", *CAUSES)
FIGURES += ("flower_start_s", "flower_own_lines")
ROUNDS = 20


def measure(run: Run) -> list[Row]:
    """Rows of FIGURES: by seed the accuracies after as many local rounds; of an outer round, the time of each
    cause. The first round of a job is apart, as its workers start in it.
    """
    check()
    seeds = range(SEED, SEED + (1 if run.quick else run.repeats))
    alone, theirs = _one_fleet(run, seeds), list[float]()
    rounds = list[dict[str, float]]()
    with federation(run, seeds) as hosts:
        for seed in seeds:
            lines = _federated(run, hosts, seed)
            theirs.append(accuracy(lines))
            rounds += [_causes(line) | {"round": line["round"]} for line in lines if "replies" in line]
    points = [100 * (own - other) for own, other in zip(alone, theirs, strict=True)]

    def row(figure: str, what: str, values: list[float], unit: str, peer: str | None = None) -> Row:
        return summary(figure, what, values, unit, peer=peer, emulation=EMULATION)

    def of(name: str, first: bool = False) -> list[float]:
        return [each[name] for each in rounds if (each["round"] == 1) is first]

    peer = "one fleet of six devices"
    size = sum(len(path.read_text().splitlines()) for path in Path(millpond.flower.__path__[0]).glob("*.py"))
    about = f"{ROUNDS} local rounds, by seeds of data and job"
    return [
        row("flower_accuracy", f"accuracy after {about}", theirs, "", peer),
        row("flower_accuracy_difference", f"one fleet's accuracy less this, {about}", points, "points", peer),
        row("flower_round_over_fleet_round", f"an outer round over its {EVERY} rounds", of("over"), "x"),
        *(row(name, f"of an outer round, {what}", of(name), "s") for name, what in CAUSES.items()),
        row(
            "flower_start_s", "of the first outer round, millpond's part: workers start", of(_OURS, True), "s"
        ),
        summary("flower_own_lines", "lines of millpond.flower, with comments", [float(size)], "lines"),
    ]


def _federated(run: Run, hosts: Federation, seed: int) -> list[dict[str, Any]]:
    """Run the federation of a seed; return what its ServerApp has noted."""
    fleets = [word for each in hosts.fleets for word in ("--fleet", str(each.directory))]
    flower, began = hosts.flowers[seed], time.monotonic()
    words = (*fleets, "--rounds", str(ROUNDS // EVERY), "--flower", str(ENVIRONMENT))
    subprocess.run([*MILLPOND, "federate", "run", str(flower.app), *words], check=True)
    lines = noted(flower)
    run.say(f"seed {seed}: accuracy {accuracy(lines):.4f} after {time.monotonic() - began:.0f} s by Flower")
    return lines


def _one_fleet(run: Run, seeds: Sequence[int]) -> list[float]:
    """Return by seed the accuracy of a fleet that has all six shares."""
    found = []
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-hosts-"))) / "one"
        fleet = fleet_of(stack, base, range(6), seeds)
        for seed in seeds:
            info, _ = fleet.wait_for_end(fleet.submit(job_file(base, ROUNDS, seed)))
            if info.state != "done" or info.score is None:
                raise RuntimeError(f"the job is {info.state}: {info.error}")
            run.say(f"seed {seed}: accuracy {info.score:.4f} of one fleet of six")
            found.append(info.score)
    return found


def _causes(line: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of an outer round by cause, along the fleet whose reply was ready last."""
    last = max(line["replies"], key=lambda reply: reply["ended"])
    fleet = last["fleet-seconds"]
    return {
        "flower_wait_s": last["process-began"] - line["sent"],
        "flower_process_s": last["began"] - last["process-began"],
        "flower_ours_s": last["ended"] - last["began"] - fleet,
        "flower_back_s": line["came"] - last["ended"],
        "over": (line["came"] - line["sent"]) / fleet,
    }

# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): the accuracy of a federation beside one fleet, and what Flower adds to an outer round."""

from __future__ import annotations

import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import millpond.flower
from bench.experiment import Run
from bench.hosts.federated_fleets import (
    EMULATION,
    EVERY,
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
FIGURES = ("flower_accuracy", "flower_accuracy_difference", "flower_round_over_fleet_round", *CAUSES)
FIGURES += ("flower_own_lines",)
ROUNDS = 20


def measure(run: Run) -> list[Row]:
    """Rows of FIGURES: accuracies after as many local rounds; of an outer round, the time of each cause."""
    check()
    theirs, alone = list[float](), list[float]()
    causes: dict[str, list[float]] = {name: [] for name in (*CAUSES, "over")}
    for _ in range(1 if run.quick else min(run.repeats, 3)):
        alone.append(_one_fleet(run))
        with federation(run) as hosts:
            fleets = [word for each in hosts.fleets for word in ("--fleet", str(each.directory))]
            words = (*fleets, "--rounds", str(ROUNDS // EVERY), "--flower", ".flower")
            began = time.monotonic()
            subprocess.run([*MILLPOND, "federate", "run", str(hosts.flower.app), *words], check=True)
            run.say(f"the federation has ended after {time.monotonic() - began:.0f} s")
            lines = noted(hosts.flower)
            theirs.append(accuracy(lines))
            for line in (each for each in lines if "replies" in each):
                for name, value in _causes(line).items():
                    causes[name].append(value)
    peer = "one fleet of six devices"
    less = [100 * (own - other) for own, other in zip(alone, theirs, strict=True)]
    rows = [
        summary("flower_accuracy", f"accuracy after {ROUNDS} local rounds", theirs, "", peer=peer),
        summary("flower_accuracy_difference", "accuracy of one fleet, less this", less, "points", peer=peer),
        summary(
            "flower_round_over_fleet_round", f"an outer round over its {EVERY} rounds", causes["over"], "x"
        ),
        *(summary(name, f"of an outer round, {what}", causes[name], "s") for name, what in CAUSES.items()),
    ]
    size = sum(len(path.read_text().splitlines()) for path in Path(millpond.flower.__path__[0]).glob("*.py"))
    what = "lines of millpond.flower, with comments and docstrings"
    return [replace(row, emulation=EMULATION) for row in rows] + [
        summary("flower_own_lines", what, [float(size)], "lines")
    ]


def _one_fleet(run: Run) -> float:
    """Return the accuracy of a fleet that has all six shares."""
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-hosts-"))) / "one"
        fleet = fleet_of(stack, base, range(6))
        info, _ = fleet.wait_for_end(fleet.submit(job_file(base, ROUNDS)))
        if info.state != "done" or info.score is None:
            raise RuntimeError(f"the job is {info.state}: {info.error}")
        run.say(f"one fleet of six: accuracy {info.score:.4f}")
        return info.score


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

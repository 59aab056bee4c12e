# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): 64 devices, ten jobs of a thousand recorded rounds, and one job that runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.experiment import Run
from bench.fleets import running
from job_files import described, written
from millpond.host.fleet.directory import Fleet
from millpond.host.records.jobs import JobState, Round, Standing
from millpond.host.store.store import Store
from millpond.train.job import file
from system.support import Emulation

_MODEL = """\
import time

from torch import nn


class Paced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images):
        if self.training:
            time.sleep(0.3)
        return self.layers(images)
"""
_JOB = """\
name = "{name}"
devices = [{devices}]
aggregate = "host"

[data]
private = "private/digits"
test = "test"

[model]
factory = "paced:Paced"
files = ["paced.py"]

[train]
batch = 65536

[federated]
rounds = {rounds}
"""


@dataclass(frozen=True, slots=True)
class Watched:
    """A fleet that people look at: its daemon, a job that runs, and one that has ended."""

    emulation: Emulation
    daemon: psutil.Process
    runs: int
    ended: int
    about: str


@contextmanager
def watched_fleet(run: Run) -> Iterator[Watched]:
    """Start the fleet and the job, and end both. Raises Unmeasured where there can be no fleet."""
    devices, jobs, rounds = (6, 2, 100) if run.quick else (64, 10, 1000)
    names = [f"csd{number}" for number in range(devices)]
    about = (
        f"{devices} devices are process trees of one machine, without torch but for the two of the job that "
        f"runs; {jobs} jobs of {rounds} rounds of {devices} workers are made up and stored, one more runs"
    )
    with running(names, searched=False, before=lambda fleet: _record(fleet, jobs, rounds, names)) as fleet:
        run.say(f"{devices} devices are ready")
        number = fleet.submit(_written(fleet.fleet, "running", 100_000, names[:2]))
        fleet.wait_for_rounds(number, 3)
        try:
            yield Watched(fleet, fleet.daemon(), number, ended=1, about=about)
        finally:
            fleet.millpond("stop", str(number))


def _written(fleet: Fleet, name: str, rounds: int, devices: list[str]) -> Path:
    quoted = ", ".join(f'"{device}"' for device in devices)
    text = _JOB.format(name=name, devices=quoted, rounds=rounds)
    return written({"paced.py": _MODEL, f"{name}.toml": text}, fleet.directory.parent) / f"{name}.toml"


def _record(fleet: Fleet, jobs: int, rounds: int, devices: list[str]) -> None:
    """Store jobs that have ended, as a daemon would have."""
    store, files = Store(fleet.database), described({"paced.py": _MODEL})
    for number in range(jobs):
        job, _ = file.read(_written(fleet, f"recorded{number}", rounds, devices))
        stored = store.add_job(job, files)
        store.begin_job(stored)
        for round_number in range(1, rounds + 1):
            made = _round(round_number, devices)
            score = made.scores["host"]["accuracy"]
            store.add_round(stored, made, Standing("accuracy", score, score, round_number))
        store.end_job(stored, JobState.DONE)
    store.close()


def _round(number: int, devices: list[str]) -> Round:
    """Return a round as a job of digits has it."""
    loss = 2.3 * math.exp(-number / 200)
    return Round(
        round=number,
        scores={"host": {"loss": loss, "accuracy": 1 - loss / 2.6}},
        seconds=0.12,
        samples=30 * len(devices),
        workers=dict.fromkeys(devices, 30),
        missing={},
        tunnel=dict.fromkeys(devices, (341_000, 341_300)),
        joules={},
        metrics={"loss": loss},
        by_worker={device: {"loss": loss * (1 + place / 100)} for place, device in enumerate(devices)},
    )

# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): the host's processor time of a round that devices add, over that of its own.

The host's processes are the daemon, the ends of its tunnels and the parameter server. Workers on the devices
train next to nothing, and nothing is scored.
"""

from __future__ import annotations

import re
import time
from statistics import median

import psutil

from bench.experiment import Run
from bench.fleets import IDLE_MODEL, running
from bench.rows import Row, ratios, summary
from job_files import written
from system.support import Emulation

DEVICES = tuple(f"csd{number}" for number in range(10))
TITLE = "the host's processor time, with the aggregator on a device over that without"
ABOUT = "the host's processor seconds of a round that devices add, over those of one that it adds itself"
EMULATION = "10 devices are process trees of one machine, their LAN is a bridge in it; 2,029,642 values"
_ROUNDS, _QUICK_ROUNDS = 60, 12
_FIRST = 5
"""Rounds before those that count: nodes are started, links measured, buffers grow."""
_JOB = """\
name = "offload"
aggregate = "{aggregate}"
topology = "{topology}"

[data]
private = "private/digits"

[model]
factory = "idle:Idle"
files = ["idle.py"]

[train]
batch = 65536
momentum = 0.0

[federated]
rounds = {rounds}
quorum = 1.0

[evaluate]
on = []
"""


def measure(run: Run) -> list[Row]:
    """Alternate jobs that the host adds and jobs that a device adds."""
    seconds: dict[str, list[float]] = {"host": [], "star": [], "tree": []}
    walls: dict[str, list[float]] = {name: [] for name in seconds}
    with running(DEVICES, searched=False, lan=True) as fleet:
        for repeat in range(run.repeats):
            for name in seconds:
                cpu, wall = _round(fleet, name, _QUICK_ROUNDS if run.quick else _ROUNDS)
                seconds[name].append(cpu)
                walls[name].append(wall)
                run.say(f"{repeat + 1}: {name}: {cpu:.4f} s of the host's processors, a round {wall:.3f} s")
    best = min(("star", "tree"), key=lambda name: median(seconds[name]))
    over = ratios(seconds[best], seconds["host"])
    rows = [summary("host_cpu_offloaded", f"{ABOUT} ({best})", over, "x", emulation=EMULATION)]
    for name, found in seconds.items():
        about = f"the host's processor seconds of a round, added by: {name}"
        rows.append(summary(f"host_cpu_{name}", about, found, "s", emulation=EMULATION))
        about = f"seconds of a round, added by: {name}"
        rows.append(summary(f"round_{name}", about, walls[name], "s", emulation=EMULATION))
    return rows


def _round(fleet: Emulation, name: str, rounds: int) -> tuple[float, float]:
    """Return the seconds of the host's processors, and those that pass, of one of a job's ``rounds``."""
    aggregate, topology = ("host", "auto") if name == "host" else (DEVICES[0], name)
    text = _JOB.format(aggregate=aggregate, topology=topology, rounds=rounds)
    folder = written({"idle.py": IDLE_MODEL, "job.toml": text}, fleet.base / "offload")
    job = fleet.submit(folder / "job.toml")
    first = _reach(fleet, job, _FIRST)
    last = _reach(fleet, job, rounds - 1)
    fleet.wait_for_end(job)
    log = (fleet.directory / "jobs" / str(job) / "job.log").read_text()
    if (name == "host") is bool(re.search("devices add the updates", log)) or "cannot add" in log:
        raise RuntimeError(f"not what is to be measured:\n{log}")
    counted = last[0] - first[0]
    return (last[1] - first[1]) / counted, (last[2] - first[2]) / counted


def _reach(fleet: Emulation, job: int, wanted: int) -> tuple[int, float, float]:
    """Return the number of rounds as soon as it is ``wanted`` or more, and the seconds until then."""
    log = fleet.directory / "jobs" / str(job) / "job.log"
    while True:
        count = log.read_text().count("INFO round") if log.exists() else 0
        if count >= wanted:
            return count, _cpu(fleet), time.monotonic()
        time.sleep(0.01)


def _cpu(fleet: Emulation) -> float:
    daemon = fleet.daemon()
    spent = 0.0
    for process in (daemon, *daemon.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent += times.user + times.system
    return spent

# SPDX-License-Identifier: Apache-2.0
"""A schedule of kills: processes of a job die at random moments, and it ends with the right model."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from millpond.base.errors import MillpondError

from ..effort import scaled
from ..waiting import eventually
from .processes import descendants
from .support import SLOW_MODEL, Emulation

pytestmark = [pytest.mark.timeout(600), pytest.mark.expected_log(".")]
KILLS = scaled(4, 12)
DEVICES = ("csd0", "csd1", "csd2")
PACE = (0.5, 3.0)
"""Least and most seconds between two kills."""
MOST_BETWEEN = 90.0
"""Seconds without a new epoch after which a job counts as stuck."""

JOB = """\
name = "{name}"
seed = 3

[data]
private = "private/digits"
public = "public/digits"
test = "{test}"

[model]
factory = "model:build"
files = ["model.py"]

[train]
learning_rate = 0.05
batch = 32

[{mode}]
{length} = 100000
quorum = {quorum}
{more}

[evaluate]
target = 0.12
"""


def job_file(fleet: Emulation, mode: str, quorum: float) -> Path:
    """A job that goes on until it is told to finish."""
    folder = fleet.base / "job-files" / f"kills-{mode}-{quorum}"
    folder.mkdir(parents=True)
    fleet.write_model(folder, SLOW_MODEL)
    length = "rounds" if mode == "federated" else "epochs"
    more = "steps = 10\ncheckpoint = 0.5" if mode == "synchronous" else ""
    test = fleet.base / "test"
    text = JOB.format(name=folder.name, test=test, mode=mode, length=length, quorum=quorum, more=more)
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


def targets(fleet: Emulation) -> list[tuple[str, psutil.Process]]:
    """The processes of a job, each with the sort of it."""
    found = []
    with contextlib.suppress(psutil.Error, StopIteration):
        found.append(("daemon", fleet.daemon()))
        own = descendants(fleet.daemon().pid)
        found += [("host process", p) for p in own if p.name() == "worker.process"]
        found += [("host zygote", p) for p in own if p.name() == "zygote"]
        found += [("host mount", p) for p in own if "millpond.host.remote.mounter" in p.cmdline()]
    for name in DEVICES:
        with contextlib.suppress(psutil.Error, AssertionError, StopIteration):
            agent = fleet.agent(name)
            below = descendants(agent.pid)
            found.append(("agent", agent))
            found += [("device worker", p) for p in below if p.name() == "worker.process"]
            found += [("device zygote", p) for p in below if p.name() == "zygote"]
            found += [("volume server", p) for p in below if "millpond.agent.volume_server" in p.cmdline()]
            found += [("device mount", p) for p in below if "millpond.fs.mount.device" in p.cmdline()]
    return found


def kill_one(fleet: Emulation, chance: random.Random) -> str:
    """Kill one process, every sort with the same chance. Returns its sort."""
    by_sort: dict[str, list[psutil.Process]] = {}
    with contextlib.suppress(psutil.Error):
        for sort, process in targets(fleet):
            by_sort.setdefault(sort, []).append(process)
    if not by_sort:
        return ""
    sort = chance.choice(sorted(by_sort))
    with contextlib.suppress(psutil.Error):
        chance.choice(by_sort[sort]).kill()
    return sort


@pytest.mark.parametrize(
    ("mode", "quorum"),
    [
        ("synchronous", 1.0),
        pytest.param("federated", 0.5, marks=pytest.mark.full),
        pytest.param("federated", 1.0, marks=pytest.mark.full),
        pytest.param("synchronous", 0.5, marks=pytest.mark.full),
    ],
)
def test_a_job_survives_the_death_of_any_of_its_processes(fleet: Emulation, mode: str, quorum: float) -> None:
    chance = random.Random(f"{mode} {quorum}")
    number = fleet.submit(job_file(fleet, mode, quorum))
    killed = Counter[str]()
    with fleet.pace() as pace:
        fleet.wait_for_rounds(number, 1)
        for _ in range(KILLS):
            time.sleep(chance.uniform(*PACE))
            killed[kill_one(fleet, chance)] += 1
        before = rounds(fleet, number)
        eventually(lambda: rounds(fleet, number) > before, "another epoch", MOST_BETWEEN, 0.2)
        pace.finish()
        info, results = fleet.wait_for_end(number)
    print(f"\n{mode}, quorum {quorum}: {dict(killed)}, {len(results)} epochs, {info.metric} {info.score}")
    assert info.state == "done", f"{info.error}; {killed}\n{fleet.logs()}"
    assert [result.round for result in results] == list(range(1, len(results) + 1))
    needed = 3 if quorum == 1.0 else 2
    assert all(sum(name in DEVICES for name in result.workers) >= needed for result in results[-1:])
    if mode == "federated":
        assert all(sum(name in DEVICES for name in result.workers) >= needed for result in results)
    fleet.wait_ready()
    eventually(nothing_left(fleet), "the end of all workers", 60, 0.2)


def rounds(fleet: Emulation, number: int) -> int:
    """The number of epochs so far, also while the daemon is started again."""
    found: list[int] = []

    def asked() -> bool:
        with contextlib.suppress(MillpondError, OSError):
            info, results = fleet.progress(number)
            assert info.state in ("queued", "running"), f"{info.error}\n{fleet.logs()}"
            found.append(len(results))
        return bool(found)

    eventually(asked, "the daemon's answer", 60, 0.2)
    return found[-1]


def nothing_left(fleet: Emulation) -> Callable[[], bool]:
    def check() -> bool:
        return not [sort for sort, _ in targets(fleet) if sort in ("host process", "device worker")]

    return check

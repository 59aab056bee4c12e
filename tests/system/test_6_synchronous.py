# SPDX-License-Identifier: Apache-2.0
"""Synchronous jobs: they learn, repeat, and go on through losses of workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from millpond.host.records.jobs import Round

from ..waiting import eventually
from .launching import name as process_name
from .processes import descendants
from .support import SLOW_MODEL, Emulation, Trained

pytestmark = pytest.mark.timeout(240)
DEVICES = ("csd0", "csd1", "csd2")
SAMPLES = 1437
WORKERS = ("worker.process", "streaming.train")
"""The names of the innermost processes of workers, as far as the kernel keeps them."""

ENDLESS = "epochs = 1000\nsteps = 40\n[evaluate]\ntarget = 0.12"  # until it is told to finish

NAN_MODEL = """\
import os
from torch import nn


class Nan(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images):
        tried = not os.uname().nodename.startswith("csd")  # by the host, before any device is asked
        return self.layers(images) * float(1 if tried else "nan")


def build():
    return Nan()
"""

JOB = """\
name = "{name}"
seed = 3

[data]
private = "{private}"
public = "public/digits"
test = "{test}"

[model]
factory = "{factory}"
files = {files}

[train]
learning_rate = 0.05
batch = 32

[synchronous]
{synchronous}
"""


def job_file(
    fleet: Emulation,
    name: str,
    synchronous: str,
    *,
    slow: bool = False,
    code: str = "",
    private: str = "private/digits",
) -> Path:
    """A job; a slow one takes a tenth of a second for each batch. ``code`` is that of another model."""
    folder = fleet.base / "job-files" / f"sync-{name}"
    folder.mkdir(parents=True)
    fleet.write_model(folder, code or SLOW_MODEL)
    text = JOB.format(
        name=name,
        private=private,
        test=fleet.base / "test",
        factory="model:build" if slow or code else "millpond.train.zoo.models:digits_cnn",
        files='["model.py"]' if slow or code else "[]",
        synchronous=synchronous,
    )
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


def lines(fleet: Emulation, job: int) -> list[str]:
    with fleet.client() as client:
        return list(client.log(str(job), 10_000))


def wait_for_line(fleet: Emulation, job: int, text: str, seconds: float = 120.0, behind: int = 0) -> str:
    """The first line with ``text``, but for the ``behind`` lines that were there before."""

    def found() -> str | None:
        return next((line for line in lines(fleet, job)[behind:] if text in line), None)

    return eventually(found, f"'{text}' in the log of job {job}", seconds, 0.1)


def worker_of(fleet: Emulation, device: str) -> psutil.Process:
    """The process that computes on a device: the innermost of the worker's tree."""

    def found() -> psutil.Process | None:
        workers = [p for p in descendants(fleet.agent(device).pid) if process_name(p) in WORKERS]
        return workers[-1] if workers else None

    return eventually(found, f"the worker of {device}", every=0.1)


def own_workers(fleet: Emulation) -> list[psutil.Process]:
    """The innermost process of each worker on the host: those around it have the zygote's name."""
    return [p for p in descendants(fleet.daemon().pid) if process_name(p) == "worker.process"]


def computing_on_host(fleet: Emulation) -> psutil.Process:
    """The host's worker that computes: it sees the volumes, which the parameter server does not."""
    volume = str(fleet.fleet.mountpoint("csd0"))

    def found() -> psutil.Process | None:
        with contextlib.suppress(OSError):  # one has ended meanwhile
            seeing = (p for p in own_workers(fleet) if volume in Path(f"/proc/{p.pid}/mountinfo").read_text())
            return next(seeing, None)
        return None

    return eventually(found, "the host's worker", every=0.1)


def whole(rounds: list[Round]) -> bool:
    return all(r.samples == SAMPLES and not r.missing for r in rounds)


def test_digits_in_lock_step(digits: Trained) -> None:
    assert "plan: a step of" in digits.result.out
    last = digits.result.out.splitlines()[-1]
    assert float(last.partition("accuracy ")[2].split()[0]) >= 0.96
    assert " epochs; " in last
    assert whole(digits.rounds), digits.rounds
    assert set(digits.rounds[0].workers) == {"host", *DEVICES}
    for name in DEVICES:
        before, after = digits.before[name], digits.after[name]
        assert after.sent["parameters"] - before.sent["parameters"] > 100_000
        assert after.canaries["private"] == before.canaries["private"]


def test_a_fixed_plan_twice_comes_to_the_same_bits(fleet: Emulation) -> None:
    models = []
    for number in range(2):
        path = job_file(
            fleet, f"fixed{number}", 'epochs = 2\npolicy = "fixed"\npatience = 0\nglobal_batch = 48'
        )
        result = fleet.millpond("train", path)
        assert result.code == 0, f"{result}\n{fleet.logs()}"
        models.append(Path(result.out.splitlines()[-1].rpartition("; ")[2]).read_bytes())
    assert models[0][-4096:] == models[1][-4096:]  # behind the header, which names the job


@pytest.mark.full  # test_9_kills and test_6_job_streams lose workers of such a job in a quick run
@pytest.mark.expected_log("csd|host")
@pytest.mark.timeout(480)
def test_workers_come_and_go_and_no_sample_is_lost(fleet: Emulation) -> None:
    """One device comes late; then a device's worker and the host's are killed, one hangs, and a device is
    switched off: the job goes on without each, and with it again.
    """
    agent = fleet.agent("csd2")
    os.kill(agent.pid, signal.SIGSTOP)
    with fleet.pace() as pace:
        try:
            eventually(lambda: fleet.devices()["csd2"].state != "ready", "csd2 away", every=0.1)
            number = fleet.submit(job_file(fleet, "lost", ENDLESS, slow=True))
            plan = wait_for_line(fleet, number, "plan: a step")
            assert "csd1" in plan and "csd2" not in plan
        finally:
            os.kill(agent.pid, signal.SIGCONT)
        wait_for_line(fleet, number, "csd2 joins; plan:")
        unknown = len(fleet.progress(number)[1]) + 1  # until then nobody knew of its samples
        lose(fleet, number, csd1=worker_of(fleet, "csd1").kill, host=computing_on_host(fleet).kill)
        lose(fleet, number, csd2=worker_of(fleet, "csd2").suspend)
        lose(fleet, number, csd0=fleet.pid_one("csd0").kill)
        pace.hurry()
        fleet.wait_for_rounds(number, len(fleet.progress(number)[1]) + 1)
        pace.finish()
        info, rounds = fleet.wait_for_end(number)
    assert info.state == "done", info
    assert sum("csd1 is measured" in line for line in lines(fleet, number)) <= 1  # its curve is known
    check_samples(rounds[unknown:], late="csd2")
    assert whole(rounds[-1:]) and set(rounds[-1].workers) == {"host", *DEVICES}, rounds


def lose(fleet: Emulation, job: int, **workers: Callable[[], None]) -> None:
    """A job loses workers, each in a way, and has them again in the end."""
    behind = len(lines(fleet, job))
    for how in workers.values():
        how()
    for worker in workers:
        wait_for_line(fleet, job, f"it goes on without {worker}", behind=behind)
        wait_for_line(fleet, job, f"{worker} joins; plan:", behind=behind)


def check_samples(rounds: list[Round], late: str = "") -> None:
    """Each sample was used once in each epoch, but for private ones of devices, which nobody else has, and
    public ones of a device that came ``late``, which others do not read.
    """
    assert sum(r.samples for r in rounds) + sum(map(left, rounds)) == len(rounds) * SAMPLES, rounds
    for r in rounds:
        for name, text in r.missing.items():
            parts = {f"private samples of {name} were left", f"public samples of {name} were left"}
            allowed = parts if name == late else {text for text in parts if "private" in text}
            assert {part.partition(" ")[2] for part in text.split(", ")} <= allowed, r


def left(epoch: Round) -> int:
    """Samples that were reported as left."""
    return sum(int(part.split()[0]) for text in epoch.missing.values() for part in text.split(", "))


def test_a_killed_daemon_resumes_in_the_middle_of_an_epoch(fleet: Emulation) -> None:
    with fleet.pace() as pace:
        number = fleet.submit(
            job_file(fleet, "resumed", "epochs = 2\nsteps = 80\ncheckpoint = 0.5", slow=True)
        )
        wait_for_line(fleet, number, "plan: a step")
        eventually(
            lambda: list(fleet.fleet.job_directory(number).glob("step-*.safetensors")),
            "a checkpoint",
            every=0.1,
        )
        fleet.daemon().kill()
        fleet.wait_ready()
        line = wait_for_line(fleet, number, "resumed in epoch 1 after step")
        assert int(line.split()[-1]) > 0
        pace.hurry()
        info, rounds = fleet.wait_for_end(number)
    assert info.state == "done", info
    assert len(rounds) == 2
    check_samples(rounds)


def test_profile_measures_once_and_trains_nothing(fleet: Emulation) -> None:
    code = SLOW_MODEL.replace("0.1", "0.01") + "\n# measured by nobody else\n"
    path = job_file(fleet, "profile", "epochs = 5", code=code)
    picture = fleet.base / "profile.png"
    with fleet.client() as client:
        before = [job.id for job in client.jobs()]
    first = fleet.millpond("profile", path, "--format", "json")
    assert first.code == 0, f"{first}\n{fleet.logs()}"
    found = json.loads(first.out)
    points = {profile["worker"]: profile["points"] for profile in found["profiles"]}
    assert points.keys() == found["batches"].keys() == {"host", *DEVICES}
    for own in points.values():
        assert own[0]["batch"] == 2 and own[-1]["batch"] > 8 and own[0]["peak_bytes"] > 1 << 20

    second = fleet.millpond("profile", path, "--picture", picture)
    assert second.code == 0, second
    for worker, own in points.items():
        assert re.search(rf"^{worker} +\w+ +2 +{own[0]['seconds']:.4f} ", second.out, re.MULTILINE), (
            second.out
        )
    assert len(re.findall(r"B +plan: \d+ *$", second.out, re.MULTILINE)) == len(points)
    assert "is measured" not in second.out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    with fleet.client() as client:
        assert [job.id for job in client.jobs()] == before  # none is left with a model that is not trained


def test_a_model_whose_gradients_are_nan_fails_the_job_in_one_line(fleet: Emulation) -> None:
    result = fleet.millpond("train", job_file(fleet, "nan", "epochs = 2", code=NAN_MODEL))
    assert result.code == 3, result
    (line,) = result.err.splitlines()
    assert "fewer than 2 devices take part" in line
    refused = re.escape("update refused: its loss is not finite (NaN) in step 1")
    assert re.search(rf"csd\d, (csd\d, )?csd\d: {refused}", line), line  # others may be later
    assert "try a lower learning rate" in line


@pytest.mark.parametrize("command", ["train", "profile"])
def test_one_that_the_host_can_tell_fails_it_before_any_device_is_asked(
    fleet: Emulation, command: str
) -> None:
    code = NAN_MODEL.replace('not os.uname().nodename.startswith("csd")', "False")
    result = fleet.millpond(command, job_file(fleet, f"nan-{command}", "epochs = 2", code=code))
    assert result.code == 3, result
    (line,) = result.err.splitlines()
    assert re.search(r"the task's loss is nan over a count of \d+$", line), line


def test_a_device_with_bad_samples_is_out_of_the_job_and_others_learn(fleet: Emulation) -> None:
    path = job_file(fleet, "huge", "epochs = 3\nsteps = 64", private="private/huge")
    info, rounds = fleet.wait_for_end(fleet.submit(path))
    assert info.state == "done", info
    assert "csd1" not in rounds[-1].workers and {"host", "csd0", "csd2"} == set(rounds[-1].workers)
    assert len(rounds) == 3 and all(set(r.missing) == {"csd1"} for r in rounds)
    check_samples(rounds)
    assert (rounds[-1].scores["host"]["accuracy"] or 0.0) > 0.5


def test_a_job_is_stopped_in_the_middle_of_an_epoch(fleet: Emulation) -> None:
    number = fleet.submit(job_file(fleet, "stopped", "epochs = 9\nsteps = 200", slow=True))
    wait_for_line(fleet, number, "plan: a step")
    worker = worker_of(fleet, "csd0")
    result = fleet.millpond("stop", str(number), timeout=60)
    assert (result.code, result.out.strip()) == (0, f"job {number} is stopped")
    info, rounds = fleet.progress(number)
    assert (info.state, info.error, rounds) == ("stopped", "", [])
    eventually(lambda: not worker.is_running() and not own_workers(fleet), "workers that end", every=0.1)
    again = fleet.millpond("stop", str(number))
    assert again.code and f"job {number} is not running" in again.err


def test_a_device_that_is_switched_off_while_it_is_measured_holds_nobody_up(fleet: Emulation) -> None:
    code = SLOW_MODEL + "\n# not measured before\n"
    with fleet.pace() as pace:
        number = fleet.submit(job_file(fleet, "off-early", "epochs = 1\nsteps = 40", code=code))
        wait_for_line(fleet, number, "csd0 is measured")
        fleet.pid_one("csd0").kill()
        line = wait_for_line(fleet, number, "it goes on without csd0", 30)
        assert re.search(r"its agent was silent for [0-9.]+ s$", line) or "connection" in line.lower(), line
        wait_for_line(fleet, number, "plan: a step", 30)
        pace.hurry()
        info, rounds = fleet.wait_for_end(number)
    assert info.state == "done", info
    assert len(rounds) == 1
    check_samples(rounds)


@pytest.mark.expected_log("parameter.server|goes on without")
def test_a_killed_keeper_costs_the_steps_since_the_last_checkpoint(fleet: Emulation) -> None:
    with fleet.pace() as pace:
        path = job_file(fleet, "server", "epochs = 2\nsteps = 80\ncheckpoint = 0.5", slow=True)
        number = fleet.submit(path)
        wait_for_line(fleet, number, "plan: a step")
        eventually(
            lambda: list(fleet.fleet.job_directory(number).glob("step-*.safetensors")),
            "a checkpoint",
            every=0.1,
        )
        computing = computing_on_host(fleet).pid
        server = next(process for process in own_workers(fleet) if process.pid != computing)
        server.kill()
        wait_for_line(fleet, number, "the parameter server was lost")
        wait_for_line(fleet, number, "resumed in epoch 1 after step")
        pace.hurry()
        info, rounds = fleet.wait_for_end(number)
    assert info.state == "done", info
    assert whole(rounds) and len(rounds) == 2, rounds
    assert len(list(fleet.fleet.job_directory(number).glob("*step-*"))) == 1  # to go on from

"""Synchronous jobs on a fleet of their own: they learn, repeat, and go on whatever happens to workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millpond.host.record import Round

from .support import SLOW_MODEL, Emulation, create, descendants, eventually

pytestmark = pytest.mark.timeout(240)
DEVICES = ("csd0", "csd1", "csd2")
SAMPLES = 1437

JOB = """\
name = "{name}"
seed = 3

[data]
private = "private/digits"
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


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    emulation = create(tmp_path_factory.mktemp("synchronous"), DEVICES)
    try:
        emulation.start()
        emulation.wait_ready()
        yield emulation
    finally:
        left = emulation.stop()
    assert not left, f"left behind: {left}"


@pytest.fixture
def fleet(module_fleet: Emulation) -> Emulation:
    module_fleet.wait_ready()
    return module_fleet


def job_file(fleet: Emulation, name: str, synchronous: str, *, slow: bool = False) -> Path:
    """A job; a slow one takes a tenth of a second for each batch."""
    folder = fleet.base / "job-files" / name
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(SLOW_MODEL)
    text = JOB.format(
        name=name,
        test=fleet.base / "test",
        factory="model:build" if slow else "millpond.train.models:digits_cnn",
        files='["model.py"]' if slow else "[]",
        synchronous=synchronous,
    )
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


def lines(fleet: Emulation, job: int) -> list[str]:
    with fleet.client() as client:
        return list(client.log(str(job), 10_000))


def wait_for_line(fleet: Emulation, job: int, text: str, seconds: float = 60.0) -> str:
    def found() -> str | None:
        return next((line for line in lines(fleet, job) if text in line), None)

    return eventually(found, f"'{text}' in the log of job {job}", seconds)


def worker_of(fleet: Emulation, device: str) -> psutil.Process:
    """The process that computes on a device: the innermost of the worker's tree."""

    def found() -> psutil.Process | None:
        tree = descendants(fleet.agent(device).pid)
        workers = [p for p in tree if "millpond.train.worker" in " ".join(p.cmdline())]
        return workers[-1] if workers else None

    return eventually(found, f"the worker of {device}")


def whole(rounds: list[Round]) -> bool:
    return all(r.samples == SAMPLES and not r.missing for r in rounds)


def test_digits_in_lock_step(fleet: Emulation) -> None:
    result = fleet.millpond("train", job_file(fleet, "digits", "epochs = 12\ntarget = 0.96"), timeout=150)
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    assert "plan: a step of" in result.out
    assert float(result.out.splitlines()[-1].partition("accuracy ")[2].split()[0]) >= 0.96
    with fleet.client() as client:
        number = client.jobs()[-1].id
        ledgers = client.ledgers()
    _, rounds = fleet.progress(number)
    assert whole(rounds), rounds
    assert set(rounds[0].workers) == {"host", *DEVICES}
    for name in DEVICES:
        assert ledgers[name].sent["parameters"] > 100_000
        assert ledgers[name].canaries["private"] == 0


def test_a_fixed_plan_twice_comes_to_the_same_bits(fleet: Emulation) -> None:
    models = []
    for number in range(2):
        path = job_file(
            fleet, f"fixed{number}", 'epochs = 2\npolicy = "fixed"\npatience = 0\nglobal_batch = 48'
        )
        result = fleet.millpond("train", path, timeout=120)
        assert result.code == 0, f"{result}\n{fleet.logs()}"
        models.append(Path(result.out.splitlines()[-1].rpartition("; ")[2]).read_bytes())
    assert models[0][-4096:] == models[1][-4096:]  # behind the header, which names the job


@pytest.mark.expected_log("csd1")
def test_a_worker_that_is_killed_comes_back_and_loses_no_samples(fleet: Emulation) -> None:
    with fleet.hurrying() as hurry:
        number = fleet.submit(job_file(fleet, "killed", "epochs = 3\nsteps = 40", slow=True))
        wait_for_line(fleet, number, "plan: a step")
        time.sleep(1.0)
        worker_of(fleet, "csd1").kill()
        wait_for_line(fleet, number, "it goes on without csd1")
        eventually(
            lambda: sum("csd1 is measured" in line for line in lines(fleet, number)) == 1, "no new measure"
        )
        fleet.wait_for_rounds(number, 1, 90)
        hurry()
        info, rounds = fleet.wait_for_end(number, 120)
    assert info.state == "done", info
    assert sum(r.samples for r in rounds) + left(rounds) == 3 * SAMPLES
    assert rounds[-1].workers.get("csd1"), rounds


def left(rounds: list[Round]) -> int:
    """Samples that were reported as left."""
    return sum(int(text.split()[0]) for r in rounds for text in r.missing.values())


def test_a_worker_that_hangs_is_given_up(fleet: Emulation) -> None:
    with fleet.hurrying() as hurry:
        number = fleet.submit(job_file(fleet, "hanging", "epochs = 2\nsteps = 60", slow=True))
        wait_for_line(fleet, number, "plan: a step")
        worker = worker_of(fleet, "csd2")
        os.kill(worker.pid, signal.SIGSTOP)
        wait_for_line(fleet, number, "it goes on without csd2", 20)
        hurry()
        info, rounds = fleet.wait_for_end(number, 120)
    assert info.state == "done", info
    assert sum(r.samples for r in rounds) + left(rounds) == 2 * SAMPLES


def test_a_device_that_is_switched_off_leaves_its_private_samples(fleet: Emulation) -> None:
    with fleet.hurrying() as hurry:
        number = fleet.submit(job_file(fleet, "off", "epochs = 2\nsteps = 60", slow=True))
        wait_for_line(fleet, number, "plan: a step")
        fleet.pid_one("csd0").kill()
        wait_for_line(fleet, number, "it goes on without csd0", 20)
        hurry()
        info, rounds = fleet.wait_for_end(number, 120)
    assert info.state == "done", info
    assert sum(r.samples for r in rounds) + left(rounds) == 2 * SAMPLES
    assert all("private samples of csd0" in text for r in rounds for text in r.missing.values())


def test_a_killed_daemon_resumes_in_the_middle_of_an_epoch(fleet: Emulation) -> None:
    with fleet.hurrying() as hurry:
        number = fleet.submit(
            job_file(fleet, "resumed", "epochs = 2\nsteps = 80\ncheckpoint = 0.5", slow=True)
        )
        wait_for_line(fleet, number, "plan: a step")
        eventually(lambda: list(fleet.fleet.job_directory(number).glob("step-*.safetensors")), "a checkpoint")
        fleet.daemon().kill()
        fleet.wait_ready()
        line = wait_for_line(fleet, number, "resumed in epoch 1 after step")
        assert int(line.split()[-1]) > 0
        hurry()
        info, rounds = fleet.wait_for_end(number, 120)
    assert info.state == "done", info
    assert sum(r.samples for r in rounds) + left(rounds) == 2 * SAMPLES, rounds


@pytest.mark.expected_log("csd2")
def test_a_device_that_comes_later_joins_a_running_job(fleet: Emulation) -> None:
    agent = fleet.agent("csd2")
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        eventually(lambda: fleet.devices()["csd2"].state != "ready", "csd2 away")
        with fleet.hurrying() as hurry:
            path = job_file(fleet, "joined", "epochs = 3\nsteps = 40", slow=True)
            number = fleet.submit(path)
            plan = wait_for_line(fleet, number, "plan: a step", 90)
            assert "csd1" in plan and "csd2" not in plan
            os.kill(agent.pid, signal.SIGCONT)
            wait_for_line(fleet, number, "csd2 joins; plan: a step")
            hurry()
            info, rounds = fleet.wait_for_end(number, 120)
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    assert info.state == "done", info
    assert rounds[-1].workers["csd2"] and whole(rounds[-1:]), rounds

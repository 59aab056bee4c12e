# SPDX-License-Identifier: Apache-2.0
"""The agent's parts are restarted alone where they can be, and not without end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from millpond.agent import supervision
from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.control import AgentService
from millpond.agent.job_files import JobFiles
from millpond.agent.supervision import SelfCheck, SupervisedPart, worker_fault
from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, Refused
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end
from millpond.linux.limits.cgroups import ControlGroups, GroupLimits
from millpond.linux.limits.process_limits import ProcessLimits
from millpond.linux.zygote import client
from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import Folder, MissingFiles, PrepareWorker, Ready
from millpond.train.state.layout import Tensor
from millpond.wire.channel import Channel

from ..audited import unlogged_sessions
from ..waiting import eventually

DIED = pytest.mark.expected_log("died, and is restarted")


def dead() -> bool:
    return False


def test_a_part_that_lives_is_left_alone() -> None:
    started = list[int]()
    SupervisedPart("it", lambda: True, lambda: started.append(1)).ensure(0.0)
    assert not started


def test_a_part_that_cannot_be_restarted_ends_the_agent() -> None:
    with pytest.raises(LocalError, match=r"^it died$"):
        SupervisedPart("it", dead).ensure(0.0)


@DIED
def test_a_part_that_keeps_dying_ends_the_agent() -> None:
    started = list[int]()
    part = SupervisedPart("it", dead, lambda: started.append(1))
    for second in range(5):
        part.ensure(float(second))
    with pytest.raises(LocalError, match=r"^it died$"):
        part.ensure(5.0)
    assert len(started) == 5


@DIED
def test_a_part_that_dies_now_and_then_is_restarted_for_ever() -> None:
    started = list[int]()
    part = SupervisedPart("it", dead, lambda: started.append(1))
    for number in range(50):
        part.ensure(20.0 * number)
    assert len(started) == 50


@DIED
def test_a_restart_that_fails_says_why() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(LocalError, match=r"it died, and cannot be restarted: .*No space left"):
        SupervisedPart("it", dead, fail).ensure(0.0)


@pytest.mark.expected_log("no job can run: no sandbox")
def test_a_fault_is_told_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: an agent whose workers died in their sandbox was ready."""
    monkeypatch.setattr(supervision, "FAULTY_SECONDS", 0.01)
    faults = ["", "no sandbox", "no sandbox"]
    check = SelfCheck(lambda: faults.pop(0) if faults else "")
    try:
        eventually(lambda: len(faults) == 2 and not check.fault, "the first check")
        check.hurry()
        eventually(lambda: not faults and not check.fault, "the recovery")
    finally:
        check.stop()


@pytest.mark.expected_log("no job can run: Too many open files")
def test_a_check_that_fails_itself_is_a_fault() -> None:
    def trial() -> str:
        raise OSError(24, "Too many open files")

    check = SelfCheck(trial)
    eventually(lambda: check.fault == "Too many open files", "the fault")
    check.stop()


@pytest.mark.expected_log("no job can run: can't start new thread")
def test_a_check_that_can_start_no_thread_goes_on() -> None:
    """Before: the thread of the check ended, and what it had said last was said for ever."""
    faults = [RuntimeError("can't start new thread")]

    def trial() -> str:
        if faults:
            raise faults.pop()
        return ""

    check = SelfCheck(trial)
    eventually(lambda: check.fault == "can't start new thread", "the fault")
    check.hurry()
    eventually(lambda: not check.fault, "the recovery")
    check.stop()


def test_a_trial_that_costs_nothing_is_made_whenever_the_fault_is_asked_for() -> None:
    check, faults = SelfCheck(), [""]
    check.looks.append(lambda: faults[0])
    assert check.fault == ""
    faults[0] = "no connection is left"
    assert check.fault == "no connection is left"
    faults[0] = ""
    assert check.fault == ""
    check.stop()


BINDS = (*system_binds(), *python_binds())
OWN = Sandbox(binds=BINDS, own_network=True, own_pids=True)


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    """A zygote of workers, which has not loaded torch."""
    made = Zygote("millpond.train.worker.process", idle=600.0)
    yield made
    made.close()


def test_a_sandbox_in_which_no_process_starts_is_a_fault(zygote: Zygote) -> None:
    assert worker_fault(zygote, OWN, ProcessLimits()) == ""
    missing = Sandbox(binds=(*BINDS, Bind(Path("/there/is/none"), Path("/none"))), own_pids=True)
    found = worker_fault(zygote, missing, ProcessLimits())
    assert found.startswith("no process starts in a sandbox: ") and "'/there/is/none'" in found
    assert zygote.pid is None, "the check has started a zygote, which takes 277 MiB"


@pytest.mark.expected_log("no job can run: No such file or directory")
def test_a_control_group_that_cannot_be_made_is_a_fault(zygote: Zygote) -> None:
    """Before: the check started a program without the limits of workers, and no worker started."""
    none = ControlGroups({"memory": Path("/sys/fs/cgroup/none")}, GroupLimits(1 << 30, 100))
    trial = SelfCheck(lambda: worker_fault(zygote, OWN, ProcessLimits(groups=none)))
    eventually(lambda: trial.fault == "No such file or directory", "the fault")
    trial.stop()


def test_the_zygote_of_workers_is_tried_while_it_has_some(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the check started a program, and the device of a zygote that hangs was ready."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = zygote.start(OWN, ["3"], [theirs.fileno()], 2)
        pid = zygote.pid
        assert zygote.is_busy and pid
        assert worker_fault(zygote, OWN, ProcessLimits()) == ""
        os.kill(pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as brief:
                brief.setattr(client, "ANSWER_SECONDS", 0.5)
                with pytest.raises(TimeoutError, match=r"the zygote of .* does not answer"):
                    worker_fault(zygote, OWN, ProcessLimits())
            assert worker_fault(zygote, OWN, ProcessLimits()) == "", "the next worker has another zygote"
        finally:
            os.kill(pid, signal.SIGKILL)  # and with it its worker
            end(worker)


@pytest.mark.parametrize(("code", "hurried"), [("worker", True), ("model", False)])
def test_a_worker_that_dies_while_it_prepares_is_a_reason_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, hurried: bool
) -> None:
    """Before: only one that could not be started: the next check was up to five minutes away."""
    made, trials = object.__new__(AgentService), list[int]()
    made.config = AgentConfig("csd0", LinkConfig("s", "10.77.0.2/30"), str(tmp_path), state=str(tmp_path))
    made._files = JobFiles(made.config)
    made.audit = SimpleNamespace(session=unlogged_sessions)

    def fails(*_: object) -> None:
        raise Refused("", code, "the worker process died")

    monkeypatch.setattr(made, "_run_worker", fails)
    made._check = SelfCheck(lambda: trials.append(1) or "")
    eventually(lambda: trials, "the first check")
    near, far = socket.socketpair()
    with Channel(near, "csd0") as agent, Channel(far, "host") as host:
        work = WorkSpec("job", ModelSpec("millpond.train.zoo.models:digits_cnn"))
        folder, tensor = Folder("private/digits", "csd0"), Tensor("weight", (8, 64), "float32")
        made._run_job(PrepareWorker(work, "csd0", (folder,), {}, (tensor,)), host)
        agent.expect(MissingFiles, Deadline.after(20))
        with pytest.raises(Refused, match="died"):
            agent.expect(Ready, Deadline.after(20))
    if hurried:
        eventually(lambda: len(trials) == 2, "the check")
    else:
        assert len(trials) == 1 and not made._check._wanted.is_set()
    made._check.stop()


def test_an_agent_ends_with_the_disk_of_its_flash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that lives on keeps the mount of a lost drive busy, and the drive cannot be mounted again."""
    monkeypatch.setattr(supervision, "SYS_BLOCK", tmp_path)
    number = tmp_path.stat().st_dev
    disk = tmp_path / f"{os.major(number)}:{os.minor(number)}"
    assert supervision.disk_of(tmp_path)()  # one without a disk of its own, such as a tmpfs
    disk.touch()
    part = SupervisedPart("the disk of the flash", supervision.disk_of(tmp_path))
    part.ensure(0.0)
    disk.unlink()
    with pytest.raises(LocalError, match="the disk of the flash died"):
        part.ensure(1.0)

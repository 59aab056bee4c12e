# SPDX-License-Identifier: Apache-2.0
"""Processes of jobs that take too much memory, or start too many others: they end alone, and the reason is
told.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millpond.agent.confined_script import expect_exit
from millpond.base.errors import LocalError, Refused
from millpond.launch.process import LaunchedScript
from millpond.linux.confinement.sandbox import Sandbox, python_binds, system_binds
from millpond.linux.limits.cgroups import ControlGroups, GroupLimits, own_groups
from millpond.linux.limits.process_limits import REFUSED, ProcessLimits, Shortage, spare_from_oom
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.launch_messages import Exited, Launch
from millpond.train.worker.start import workers_zygote

from ..privacy.support import Volume, device, model
from ..waiting import eventually

MIB = 1 << 20
CAP_SYS_RESOURCE = 24
TAKE = "held = []\nwhile len(held) < 1000:\n    held.append(b'1' * (8 << 20))\n"
TAKE_SHARED = "with open('/dev/shm/a', 'wb') as file:\n    while True:\n        file.write(bytes(8 << 20))\n"
BOMB = """
import os, time
for _ in range(200):
    if not os.fork():
        time.sleep(600)
"""
WAIT = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"
SANDBOX = Sandbox(binds=(*system_binds(), *python_binds()), own_network=True, own_pids=True, uid=64002)


def script(zygote: Zygote, code: str) -> LaunchedScript:
    launch = Launch("a.py", (), {"a.py": code.encode()}, 0, 1, "127.0.0.1", 40000, "127.0.0.1", 0)
    return LaunchedScript(zygote, SANDBOX, launch, "")


def end_of(zygote: Zygote, code: str) -> tuple[Exited | str, str]:
    """How a script ends, and what it prints."""
    found = script(zygote, code)
    try:
        printed = b"".join(iter(found.read, b""))
        try:
            return expect_exit(found), printed.decode()
        except Refused as error:
            return error.text, printed.decode()
    finally:
        found.stop()


@contextlib.contextmanager
def scripts_within(limits: ProcessLimits) -> Iterator[Zygote]:
    zygote = Zygote("millpond.launch.entry", idle=600.0, limits=limits)
    try:
        yield zygote
    finally:
        zygote.close()


@contextlib.contextmanager
def group_limits(memory: int = 200 * MIB, processes: int = 30) -> Iterator[ProcessLimits]:
    """Limits in groups below that of the tests, which must be gone afterwards."""
    limits = GroupLimits(memory, processes)
    try:
        groups = own_groups(limits, memory)
    except LocalError as error:
        pytest.skip(str(error))
    before = folders()
    yield ProcessLimits(memory, processes, groups)
    eventually(lambda: folders() == before, "the groups are removed")


def folders() -> set[Path]:
    return set(Path("/sys/fs/cgroup").rglob(f"millpond-{os.getpid()}-*"))


def test_a_script_that_takes_too_much_memory_ends_alone_and_the_reason_is_told() -> None:
    """Before: the kernel chose among all of the device's processes, and a launch said 'exit code 137'."""
    with group_limits() as limits, scripts_within(limits) as zygote:
        other = script(zygote, WAIT)
        assert other.read().startswith(b"begun")
        found, _ = end_of(zygote, TAKE)
        text = found.error if isinstance(found, Exited) else found
        assert text == Shortage.MEMORY.text
        assert other.shortage() is Shortage.NONE
        other.stop()


def test_files_in_shared_memory_are_counted_with_the_scripts_own_memory() -> None:
    with group_limits() as limits, scripts_within(limits) as zygote:
        found, _ = end_of(zygote, TAKE_SHARED)
        text = found.error if isinstance(found, Exited) else found
        assert text == Shortage.MEMORY.text


def test_a_script_that_starts_too_many_processes_starts_no_more_and_the_reason_is_told() -> None:
    """Before: the processes of a fork bomb were as many as the whole agent's unit may have, and none was left
    for the agent.
    """
    with group_limits() as limits, scripts_within(limits) as zygote:
        found, printed = end_of(zygote, BOMB)
        assert "BlockingIOError" in printed
        assert isinstance(found, Exited)
        assert found.error == REFUSED


def test_without_control_groups_a_script_has_limits_of_its_own() -> None:
    with scripts_within(ProcessLimits(300 * MIB)) as zygote:
        found, printed = end_of(zygote, TAKE)
        assert found == Exited(1)
        assert "MemoryError" in printed


def test_where_the_memory_of_all_runs_out_the_scripts_process_is_killed_first() -> None:
    """As in a container for a whole emulated fleet: there the worker died three times, "which the log may
    explain", and the log said nothing.
    """
    together = 300 * MIB
    try:
        group = own_groups(GroupLimits(together, 500), together).make()
    except LocalError as error:
        pytest.skip(str(error))
    with scripts_within(ProcessLimits()) as zygote:
        try:
            zygote.warm_up()
            assert zygote.pid
            zygote_process = psutil.Process(zygote.pid)
            for folder in folders():
                (folder / "cgroup.procs").write_text(str(zygote.pid))
            other = script(zygote, WAIT)
            assert other.read().startswith(b"begun")
            found, printed = end_of(zygote, TAKE)
            text = found.error if isinstance(found, Exited) else found
            assert zygote_process.is_running()
            other.stop()
            assert text == Shortage.MACHINE_MEMORY.text, (found, printed)
        finally:
            zygote.close()
            group.remove()


def test_the_limit_of_all_jobs_together_is_not_the_one_of_the_job_that_is_killed() -> None:
    """Before: it was told that it had taken more than it may, and was out of its job for good."""
    own = GroupLimits(2 << 30, 100)
    try:
        together = own_groups(GroupLimits(300 * MIB, 500), 300 * MIB).make()
    except LocalError as error:
        pytest.skip(str(error))
    if "memory" not in together.folders:
        together.remove()
        pytest.skip("with cgroup v2 a group of processes has no children")
    try:
        limits = ProcessLimits(own.memory, own.processes, ControlGroups(together.folders, own))
        with scripts_within(limits) as zygote:
            found, _ = end_of(zygote, TAKE)
            assert (found.error if isinstance(found, Exited) else found) == Shortage.MACHINE_MEMORY.text
    finally:
        together.remove()


def test_processes_of_jobs_are_killed_before_others() -> None:
    """Before: a worker had the score of the agent, and the largest of all was killed."""
    code = "print(open('/proc/self/oom_score_adj').read())"
    with scripts_within(ProcessLimits()) as zygote:
        assert end_of(zygote, code)[1].strip() == "500"


def test_the_agent_is_killed_late_as_far_as_that_is_permitted() -> None:
    status = Path("/proc/self/status").read_text()
    permitted = int(status.partition("CapEff:")[2].split()[0], 16) & 1 << CAP_SYS_RESOURCE
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        spare_from_oom()
        os.write(writer, Path("/proc/self/oom_score_adj").read_bytes())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert int(file.read()) == (-500 if permitted else 0)


def test_files_of_a_sandbox_take_a_quarter_of_the_memory() -> None:
    """Before: half of it for each of /tmp and the root."""
    code = "import os\nfound = os.statvfs('/tmp')\nprint(found.f_blocks * found.f_frsize)"
    with scripts_within(ProcessLimits()) as zygote:
        size = int(end_of(zygote, code)[1])
        assert size <= psutil.virtual_memory().total // 4 + MIB


@pytest.fixture(scope="module")
def limited() -> Iterator[Zygote]:
    """The workers of a device with little memory."""
    with group_limits(700 * MIB, 300) as limits:
        zygote = workers_zygote(3600.0, limits)
        yield zygote
        zygote.close()


TAKING = "held = []\ndef forward(model, images):\n    while True:\n        held.append(b'1' * (8 << 20))\n"
BOMBING = """
import subprocess

def forward(model, images):
    while True:
        held.append(subprocess.Popen(["/bin/sleep", "600"]))

held = []
"""
REFUSAL = """
import errno, os, subprocess

def forward(model, images):
    if request().seed == 0:
        be_refused()
    END

def be_refused():
    held = []
    try:
        while True:
            held.append(subprocess.Popen(["/bin/sleep", "600"]))
    except BlockingIOError as error:
        return error
    finally:
        for process in held:
            process.kill()
            process.wait()
"""
"""A model that is refused a process with the seed 0, kills the others, and goes on."""
HUGE = "def forward(model, images):\n    torch.zeros(1 << 45)\n"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        pytest.param(TAKING, Shortage.MEMORY.text, id="taking"),
        pytest.param(BOMBING, Shortage.PROCESSES.text, id="bombing"),
        pytest.param(HUGE, "RuntimeError at net.py:[0-9]+ in forward: out of memory; its", id="huge"),
    ],
)
def test_a_job_whose_worker_has_too_little_is_told_so(
    tmp_path: Path, limited: Zygote, code: str, told: str
) -> None:
    """Before: 'the worker process died; the job's log on the device may say why', and that was empty; for the
    others an error whose message stays on the device.
    """
    with (
        device(Volume(tmp_path), limited, model(code)) as made,
        made.host() as host,
        pytest.raises(Refused, match=told) as refused,
    ):
        host.ask(((0, 16),))
    assert refused.value.code in ("memory", "processes")


@pytest.mark.parametrize(
    ("end", "told", "code"),
    [
        pytest.param("raise KeyError", "KeyError at net.py:.*; its message.*; HINT$", "model", id="other"),
        pytest.param("os._exit(3)", "the worker process died; .*; HINT$", "worker", id="death"),
        pytest.param("raise OSError from be_refused()", "csd0: VERDICT$", "processes", id="consequence"),
    ],
)
def test_a_refused_process_is_the_reason_only_of_errors_that_it_has_caused(
    tmp_path: Path, limited: Zygote, end: str, told: str, code: str
) -> None:
    """Before: every later error of the worker was told as too many processes, and the job went on without the
    device for good.
    """
    told = told.replace("HINT", REFUSED).replace("VERDICT", Shortage.PROCESSES.text)
    with (
        device(Volume(tmp_path), limited, model(REFUSAL.replace("END", end))) as made,
        made.host() as host,
        pytest.raises(Refused, match=told) as refused,
    ):
        host.ask(((0, 16),))
    assert refused.value.code == code


def test_a_socket_without_data_is_no_refused_process(tmp_path: Path, limited: Zygote) -> None:
    """The error of both is BlockingIOError: it counts where a process was refused in the same exchange."""
    end = "if request().seed:\n        raise BlockingIOError(errno.EAGAIN, 'no data')"
    with device(Volume(tmp_path), limited, model(REFUSAL.replace("END", end))) as made, made.host() as host:
        assert host.ask(((0, 16),)).samples == 16
        with pytest.raises(Refused, match=r"BlockingIOError at net\.py") as refused:
            host.ask(((0, 16),), seed=1)
    assert refused.value.code == "model"

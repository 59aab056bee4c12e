# SPDX-License-Identifier: Apache-2.0
"""Processes in a sandbox: signals, what dies with whom, and what they do not share with their starter."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import (
    Bind,
    Sandbox,
    accept_signals,
    python_binds,
    spawn,
    system_binds,
)
from millpond.linux.confinement.sandbox_exec import confined
from millpond.linux.confinement.sandboxed_process import end, start

from .test_sandbox import NOBODY, SOON, needs_root, wait

OWN_PIDS = Sandbox(own_pids=True)
STOPPABLE = """
    import os, signal, time
    signal.signal(15, lambda *_: os._exit(5))
    print("ready", flush=True)
    while True:  # signal.pause() would miss a signal that arrives just before it
        time.sleep(0.01)
"""


def python(script: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(script)]


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout
    return process.stdout.readline()


@needs_root
def test_the_command_is_the_process_that_is_started(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("seen")
    tmp_path.chmod(0o755)
    binds = (*system_binds(), *python_binds(), Bind(tmp_path, Path("/shown")))
    sandbox = Sandbox(binds=binds, hostname="csd3", own_network=True, own_pids=True, uid=NOBODY)
    script = """
        import os, signal, time
        from pathlib import Path
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        shown = Path("/shown/data").read_text()
        print(os.getpid(), os.getsid(0), pids, os.getuid(), os.uname().nodename, shown, blocked, flush=True)
        time.sleep(1000)
    """
    with start(sandbox, python(script), stdout=subprocess.PIPE) as process:
        try:
            assert first_line(process) == f"1 1 ['1'] {NOBODY} csd3 seen []\n".encode()
            assert psutil.Process(process.pid).children() == []
        finally:
            process.kill()
        assert process.wait(SOON) == -signal.SIGKILL


@needs_root
def test_what_the_thread_starts_afterwards_has_its_own_pids() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with start(OWN_PIDS, ["true"]) as process:
        assert process.wait(SOON) == 0
    done = subprocess.run(["readlink", "/proc/self/ns/pid"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(Path("/proc/self/ns/pid").readlink())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    thread = threading.Thread(target=lambda: None)  # in foreign PIDs none can be started
    thread.start()
    thread.join()


@needs_root
def test_sigterm_reaches_it() -> None:
    with start(OWN_PIDS, python(STOPPABLE), stdout=subprocess.PIPE) as process:
        assert first_line(process) == b"ready\n"
        process.terminate()
        assert process.wait(SOON) == 5


@needs_root
def test_it_dies_with_the_thread_that_starts_it() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def body() -> None:
        started.append(start(OWN_PIDS, python(STOPPABLE), stdout=subprocess.PIPE))
        first_line(started[0])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    with started[0] as process:
        assert process.wait(SOON) == -signal.SIGKILL


STARTS = """
    import sys
    from millpond.linux.confinement.sandbox import Sandbox
    from millpond.linux.confinement.sandboxed_process import start
    print(start(Sandbox(own_pids=True), ["sleep", "1000"]).pid, flush=True)
    sys.stdin.read()
"""


@needs_root
@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.5])
def test_it_dies_with_the_process_that_starts_it_whenever_that_is(seconds: float) -> None:
    with subprocess.Popen(python(STARTS), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        command = os.pidfd_open(int(first_line(starter)))
        time.sleep(seconds)
        assert not select.select([command], [], [], 0)[0]
        starter.kill()
    ended = select.select([command], [], [], SOON)[0]
    if not ended:
        signal.pidfd_send_signal(command, signal.SIGKILL)
    os.close(command)
    assert ended


@needs_root
def test_all_that_it_started_dies_with_it() -> None:
    script = "sleep 1000 & echo ready; exec sleep 1000"
    with start(OWN_PIDS, ["sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert first_line(process) == b"ready\n"
        process.kill()
        assert process.stdout
        assert process.stdout.read() == b""  # nobody holds it any more


@needs_root
def test_a_command_that_does_not_exist_is_one_line() -> None:
    with start(OWN_PIDS, ["/no/such"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert first_line(process) == b"sandbox: [Errno 2] No such file or directory: '/no/such'\n"
        assert process.wait(SOON) == 70


IN_A_USER_NAMESPACE = """
    import subprocess, threading
    from millpond.linux.confinement.sandbox import Sandbox, enter_user_namespace
    from millpond.linux.confinement.sandboxed_process import end, start
    enter_user_namespace(0)
    sandbox = Sandbox(own_pids=True, capabilities=False)
    with start(sandbox, ["sh", "-c", "echo $$; exit 3"], stdout=subprocess.PIPE) as process:
        print(process.communicate()[0], process.returncode)
    thread = threading.Thread(target=print, args=["a thread"])
    thread.start()
    thread.join()
"""


def test_root_of_a_user_namespace_whose_pids_are_not_its_own() -> None:
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=False).returncode:
        pytest.skip("user namespaces are off on this machine")
    command = python(IN_A_USER_NAMESPACE)
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
    assert (done.stdout, done.stderr) == ("b'1\\n' 3\na thread\n", "")


def enter(pids: str) -> None:
    descriptor = os.open(pids, os.O_RDONLY | os.O_CLOEXEC)
    syscalls.enter_namespace(descriptor, syscalls.CLONE_NEWPID)
    os.close(descriptor)


@needs_root
def test_ending_a_process_has_a_limit_of_time() -> None:
    """Its PIDs are not gone before all in them are, here one whose parent, outside, does not bury it. What
    reads from a file system that does not answer lasts as long.
    """
    with start(OWN_PIDS, ["sh", "-c", "echo ready; exec sleep 1000"], stdout=subprocess.PIPE) as process:
        assert first_line(process) == b"ready\n"
        own, theirs = "/proc/thread-self/ns/pid", f"/proc/{process.pid}/ns/pid"
        enter(theirs)
        with subprocess.Popen(["sleep", "1000"]) as lasting:
            enter(own)
            begin = time.monotonic()
            end(process)
            assert process.returncode is None and time.monotonic() - begin < SOON / 2
            assert lasting.wait(SOON) == -signal.SIGKILL
        assert process.wait(SOON) == -signal.SIGKILL


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for each in ends:
        with contextlib.suppress(OSError):
            os.close(each)


@needs_root
@pytest.mark.parametrize("own_pids", [False, True])
def test_sigterm_reaches_the_body(own_pids: bool, pipe: tuple[int, int]) -> None:
    reading, writing = pipe

    def body() -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
        accept_signals()
        os.write(writing, b"ready")
        while True:  # signal.pause() would miss a signal that arrives just before it
            time.sleep(0.01)

    pid = spawn(Sandbox(own_pids=own_pids), body)
    assert os.read(reading, 5) == b"ready"
    os.kill(pid, signal.SIGTERM)
    assert wait(pid) == 9


@needs_root
def test_a_signal_waits_for_the_first_process_to_be_ready(pipe: tuple[int, int]) -> None:
    reading, writing = pipe

    def body() -> int:
        os.write(writing, b"ready")
        time.sleep(0.5)  # the signal comes now, and the kernel would forget it
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
        accept_signals()
        return 0

    pid = spawn(Sandbox(own_pids=True), body)
    assert os.read(reading, 5) == b"ready"
    os.kill(pid, signal.SIGTERM)
    assert wait(pid) == 9


def sleeper(writing: int) -> int:
    """Start a grandchild that would live for ever, say so, and wait."""
    if os.fork() == 0:
        signal.pause()
    os.write(writing, b"ready")
    signal.pause()
    return 0


def assert_all_gone(reading: int) -> None:
    """Assert that the pipe ends: every process in the sandbox held its writing end."""
    assert select.select([reading], [], [], SOON)[0]
    assert os.read(reading, 1) == b""


@needs_root
def test_everything_dies_with_the_outermost_process(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    pid = spawn(Sandbox(own_pids=True), lambda: sleeper(writing))
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert_all_gone(reading)


@needs_root
@pytest.mark.parametrize("uid", [None, NOBODY])
def test_it_dies_with_its_parent(pipe: tuple[int, int], uid: int | None) -> None:
    reading, writing = pipe
    parent = os.fork()
    if parent == 0:
        os.close(reading)
        spawn(Sandbox(own_pids=True, uid=uid), lambda: sleeper(writing))
        signal.pause()
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert_all_gone(reading)


@needs_root
def test_it_dies_with_the_thread_that_made_it() -> None:
    made: list[subprocess.Popen[bytes]] = []

    def make() -> None:
        command = confined(Sandbox(own_pids=True), ["/bin/sh", "-c", "echo ready; exec sleep 1000"])
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert made[0].stdout
        made[0].stdout.readline()  # a thread that ends before the kernel knows of it is not noticed

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    with made[0] as process:
        assert process.wait(SOON) == -signal.SIGKILL


@needs_root
def test_kept_descriptors_survive_exec(pipe: tuple[int, int]) -> None:
    reading, writing = pipe

    def body() -> int:
        os.execv("/bin/sh", ["sh", "-c", f"echo kept >/proc/self/fd/{writing}"])

    pid = spawn(Sandbox(), body, keep=[writing])
    assert wait(pid) == 0
    assert os.read(reading, 10) == b"kept\n"
    assert wait(spawn(Sandbox(), body)) != 0


@needs_root
def test_confined_hands_sigterm_on() -> None:
    script = """if True:
        import signal, time
        signal.signal(15, lambda *_: exit(5))
        print("ready", flush=True)
        while True:  # signal.pause() would miss a signal that arrives just before it
            time.sleep(0.01)
    """
    command = confined(Sandbox(own_pids=True), [sys.executable, "-c", script])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.wait(SOON) == 5


@needs_root
def test_root_without_capabilities_cannot_change_the_kernels_settings() -> None:
    sandbox = Sandbox(
        binds=(*system_binds(), *python_binds()), own_pids=True, own_network=True, capabilities=False
    )
    script = "open('/proc/sys/kernel/core_pattern', 'r+')"
    command = confined(sandbox, [sys.executable, "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
    assert done.returncode == 1
    assert "Read-only file system" in done.stderr


@needs_root
def test_shared_memory_is_not_shared_with_a_sandbox() -> None:
    mine = subprocess.run(["ipcmk", "-M", "64"], capture_output=True, text=True, check=True).stdout
    number = mine.split()[-1]
    try:
        command = confined(Sandbox(binds=system_binds(), own_pids=True), ["ipcs", "-m"])
        done = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
        assert done.returncode == 0
        assert "0x" not in done.stdout
    finally:
        subprocess.run(["ipcrm", "-m", number], check=True)


def test_the_environment_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_SECRET", "x")
    done = subprocess.run(confined(Sandbox(), ["env"]), capture_output=True, text=True, timeout=SOON)
    assert "PATH=" in done.stdout
    assert "MILLPOND_SECRET" not in done.stdout

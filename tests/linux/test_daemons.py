# SPDX-License-Identifier: Apache-2.0
"""What daemons share: their end, their logs, and the service manager."""

from __future__ import annotations

import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.linux.logs import BoundedLog
from millpond.linux.notify import notify, watchdog_interval

from ..waiting import eventually

DAEMON = """
import logging, signal, sys
from millpond.linux.signals import stop_event
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
stop = stop_event()
print("begun", flush=True)
while not stop.wait(0.05):
    sys.stdout.flush()
print("ended in order", flush=True)
"""


def start(stdin: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", DAEMON],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_ends_in_order(number: signal.Signals) -> None:
    with start(subprocess.DEVNULL) as process:
        process.send_signal(number)
        assert process.communicate(timeout=30)[0] == "ended in order\n" and process.returncode == 0


def test_a_daemon_without_a_terminal_goes_on_at_sighup() -> None:
    """It logs nothing: in a signal's handler the lock of the log may be held by the same thread."""
    with start(subprocess.DEVNULL) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)  # it would end, or print, in much less
        process.terminate()
        assert process.communicate(timeout=30)[0] == "ended in order\n"


def test_a_daemon_ends_in_order_with_its_terminal() -> None:
    terminal, end = pty.openpty()
    with start(end) as process:
        os.close(end)
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=30)[0] == "ended in order\n" and process.returncode == 0
    os.close(terminal)


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    name = str(tmp_path / "n") if request.param == "path" else f"@millpond-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(name.replace("@", "\0", 1) if request.param == "abstract" else name)
        server.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield server


@pytest.mark.parametrize("state", ["READY=1", "STATUS=zwei Geräte", "WATCHDOG=1", "STOPPING=1"])
def test_the_manager_hears(manager: socket.socket, state: str) -> None:
    assert notify(state)
    assert manager.recv(100) == state.encode()


def test_no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")


def test_a_manager_that_is_gone_takes_nobody_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("WATCHDOG=1")


@pytest.mark.parametrize(
    ("microseconds", "pid", "seconds"),
    [
        (None, None, None),
        ("30000000", None, 15.0),
        ("30000000", "own", 15.0),
        ("30000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
    ],
)
def test_watchdog(
    monkeypatch: pytest.MonkeyPatch, microseconds: str | None, pid: str | None, seconds: float | None
) -> None:
    pid = str(os.getpid()) if pid == "own" else pid
    for name, value in (("WATCHDOG_USEC", microseconds), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert watchdog_interval() == seconds


def wait_for(folder: Path, text: bytes) -> None:
    eventually(lambda: any(text in path.read_bytes() for path in folder.iterdir()), f"{text!r} is in a log")


def test_keeps_what_a_process_writes(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "jobs" / "a.log")
    subprocess.run(["sh", "-c", "echo out; echo err >&2"], stdout=log.writer, stderr=log.writer, check=True)
    log.close_writer()
    wait_for(tmp_path / "jobs", b"out\nerr\n")
    assert stat.S_IMODE((tmp_path / "jobs" / "a.log").stat().st_mode) == 0o600


def test_is_never_longer_than_two_files(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", most=10_000)
    for number in range(1000):
        os.write(log.writer, b"%0100d\n" % number)
    os.write(log.writer, b"the end\n")
    log.close_writer()
    wait_for(tmp_path, b"the end")
    eventually(lambda: len(list(tmp_path.iterdir())) == 2, "the last rotation is done")
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 10_000 + (1 << 16)


def test_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "a.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        BoundedLog(tmp_path / "a.log")
    assert not (tmp_path / "elsewhere").exists()


def test_a_daemon_that_logs_waits_for_no_reader(tmp_path: Path) -> None:
    program = """
import logging, os, sys
from millpond.linux.logs import UnblockedHandler
logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[UnblockedHandler()])
for number in range(5000):
    logging.info("%d %s", number, "x" * 100)
sys.stdout.write("all logged\\n"); sys.stdout.flush()
if os.fork() == 0:
    logging.info("from a fork")
    os._exit(0)
os.wait()
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout and process.stdout.readline() == b"all logged\n"  # nobody has read the log
        assert process.stdin and process.stderr
        process.stdin.close()
        lines = process.stderr.read().decode().splitlines()
    lines.remove("from a fork")  # wherever it came
    assert lines[0].startswith("0 ")
    told = [line for line in lines if "were lost" in line]  # also before the pipe is full
    assert told and sum(int(line.split()[0]) for line in told) + len(lines) - len(told) == 5000

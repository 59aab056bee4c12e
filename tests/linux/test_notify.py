# SPDX-License-Identifier: Apache-2.0
"""A service's messages to its manager, received on a real socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.linux.notify import notify, watchdog_interval


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

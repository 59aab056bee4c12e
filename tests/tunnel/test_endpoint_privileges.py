# SPDX-License-Identifier: Apache-2.0
"""The privileges of an endpoint's processes: few, and the pumps' fewer still."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from millpond.linux.confinement import seccomp
from millpond.tunnel.datapath.context import DatapathContext
from millpond.tunnel.endpoint.workers import LinkWorkers
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.transports.base import Loop
from millpond.tunnel.transports.ring_connection import RingConnection

from ..waiting import eventually

CAP_NET_ADMIN = 1 << 12

needs_filter = pytest.mark.skipif(
    not seccomp.known(os.uname().machine), reason="no filter for this processor"
)


def fields(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_an_end_keeps_one_capability_and_its_pumps_none(pair: Any) -> None:
    for end in pair.start():
        kept = fields(end.process.pid)
        assert int(kept["CapEff"], 16) == int(kept["CapPrm"], 16) == CAP_NET_ADMIN
        assert kept["NoNewPrivs"] == "1"
        assert len(end.pumps()) == 2
        for pump in end.pumps():
            eventually(lambda pump=pump: fields(pump)["Seccomp"] == "2", "the pump is confined")
            left = fields(pump)
            assert int(left["CapEff"], 16) == int(left["CapPrm"], 16) == 0
            assert left["NoNewPrivs"] == "1"


@dataclass(frozen=True, slots=True)
class Doing:
    """A connection on shared memory, as ``LinkWorkers`` knows it, whose one pump does something and ends."""

    action: Callable[[], object]
    calls: frozenset[str] = RingConnection.calls
    privileged: bool = RingConnection.privileged

    def loops(self, datapath: DatapathContext) -> tuple[Loop]:
        return (self._loop,)

    def _loop(self) -> NoReturn:
        self.action()
        raise LinkViolation("it could")


def verdict(action: Callable[[], object]) -> str:
    """How a pump ends that does this once it is confined."""
    with LinkWorkers(Doing(action), None) as link:  # type: ignore[arg-type]
        assert select.select([link.pumps[0].report], [], [], 30)[0]
        return str(link.pumps[0].verdict())


@needs_filter
@pytest.mark.parametrize(
    "action",
    [
        lambda: os.close(os.open("/dev/null", os.O_RDONLY)),
        lambda: socket.socket().close(),
        lambda: os._exit(0) if os.fork() == 0 else None,
        lambda: os.execv("/bin/true", ["true"]),
        lambda: os.kill(os.getppid(), 0),
        lambda: Path("/proc/self/exe").readlink(),
        lambda: os.pipe(),
        lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()),
    ],
    ids=["open", "socket", "fork", "exec", "kill", "readlink", "pipe", "fcntl"],
)
def test_a_pump_can_neither_open_nor_start_nor_reach_anything(action: Callable[[], object]) -> None:
    assert verdict(action).startswith(f"PermissionError: [Errno {errno.EPERM}]")


@needs_filter
def test_a_pump_can_carry_packets() -> None:
    reader, writer = os.pipe()
    try:
        assert verdict(lambda: os.writev(writer, (b"packet", b"s"))) == "it could"
        assert os.read(reader, 100) == b"packets"
    finally:
        os.close(reader)
        os.close(writer)

# SPDX-License-Identifier: Apache-2.0
"""The privileges of an endpoint's processes: few, and the pumps' fewer still."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import json
import os
import re
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from millpond.linux.confinement import seccomp
from millpond.tunnel.datapath.context import DatapathContext, PumpNeeds
from millpond.tunnel.endpoint.pumps import LinkPumps
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.transports.base import Loop
from millpond.tunnel.transports.nvme.ioctl import IO_REQUEST
from millpond.tunnel.transports.nvme.transport import NvmeConnection

from ..waiting import eventually

CAP_NET_ADMIN = 1 << 12
CLOCK_GETTIME = {"x86_64": 228, "aarch64": 113}.get(os.uname().machine, -1)
TUNSETIFF, ADMIN_REQUEST = 0x400454CA, 0xC0504E47

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
    """A connection on shared memory, as ``LinkPumps`` knows it, whose one pump does something and ends."""

    action: Callable[[], object]
    needs: PumpNeeds = PumpNeeds()  # noqa: RUF009 - it is immutable

    def loops(self, datapath: DatapathContext) -> tuple[Loop]:
        return (self._loop,)

    def _loop(self) -> NoReturn:
        self.action()
        raise LinkViolation("it could")


def verdict(action: Callable[[], object], *descriptors: int, needs: PumpNeeds = PumpNeeds()) -> str:  # noqa: B008
    """How a pump ends that does this once it is confined, with these descriptors and one as its interface."""
    needs = replace(needs, descriptors=frozenset(descriptors))
    context = SimpleNamespace(interface=SimpleNamespace(descriptor=2))
    with LinkPumps(Doing(action, needs), context) as link:  # type: ignore[arg-type]
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
        lambda: fcntl.fcntl(2, fcntl.F_SETOWN, os.getppid()),
        lambda: fcntl.ioctl(2, TUNSETIFF, bytes(40)),
    ],
    ids=["open", "socket", "fork", "exec", "kill", "readlink", "pipe", "fcntl", "ioctl"],
)
def test_a_pump_can_neither_open_nor_start_nor_reach_anything(action: Callable[[], object]) -> None:
    assert verdict(action).startswith(f"PermissionError: [Errno {errno.EPERM}]")


@needs_filter
def test_a_pump_can_carry_packets() -> None:
    reader, writer = os.pipe()
    try:
        assert verdict(lambda: os.writev(writer, (b"packet", b"s")), writer) == "it could"
        assert os.read(reader, 100) == b"packets"
    finally:
        os.close(reader)
        os.close(writer)


@needs_filter
def test_a_pump_can_read_the_clock_where_that_is_a_system_call() -> None:
    """Before: in a guest whose clock is the HPET, which no vDSO reads, pumps with threads died at times by
    ``take_gil: PyCOND_WAIT(gil->cond) failed``: CPython waits until a time that it was refused.
    """
    library, found = ctypes.CDLL(None, use_errno=True), (ctypes.c_int64 * 2)()

    def read_clock() -> None:
        if library.syscall(CLOCK_GETTIME, time.CLOCK_MONOTONIC, found):
            raise OSError(ctypes.get_errno(), "clock_gettime")

    assert verdict(read_clock) == "it could"


def test_a_pump_has_no_other_descriptors() -> None:
    reader, writer = os.pipe()
    try:
        assert verdict(lambda: os.write(writer, b"status")).startswith(f"OSError: [Errno {errno.EBADF}]")
    finally:
        os.close(reader)
        os.close(writer)


def descriptors(pid: int) -> dict[int, str]:
    return {int(entry.name): str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}


def test_pumps_keep_the_descriptors_that_they_use_alone(pair: Any) -> None:
    """Neither the status, by which a pump could tell the daemon anything, nor the region or the counters."""
    for end in pair.start():
        status = descriptors(end.process.pid)[int(end.process.args[-1])]
        errors = descriptors(end.process.pid)[2]
        for pump in end.pumps():
            eventually(lambda pump=pump: fields(pump)["Seccomp"] == "2", "the pump is confined")
            found = descriptors(pump)
            kinds = Counter(re.sub(r":\[\d+\]$", "", path) for path in found.values())
            assert found[2] == errors and status not in found.values()
            assert kinds.pop("anon_inode:[eventpoll]", 0) <= 1
            assert kinds == {"anon_inode:[eventfd]": 6, "/dev/net/tun": 1, "socket": 1, "pipe": 2}


class Device:
    """A controller's open device, as far as ``NvmeConnection`` is asked for its pumps' needs."""

    def __init__(self, descriptor: int) -> None:
        self.descriptors = frozenset((descriptor,))

    def close(self) -> None:
        """Nothing to close: the descriptor is the test's."""


@needs_filter
@pytest.mark.parametrize(
    ("request_", "code"), [(IO_REQUEST, errno.ENOTTY), (ADMIN_REQUEST, errno.EPERM), (TUNSETIFF, errno.EPERM)]
)
def test_a_pump_of_nvme_submits_io_commands_and_makes_no_other_request(request_: int, code: int) -> None:
    reader, writer = os.pipe()
    try:
        with NvmeConnection(Device(reader)) as connection:  # type: ignore[arg-type]
            action = functools.partial(fcntl.ioctl, reader, request_, bytes(80))
            assert f"[Errno {code}]" in verdict(action, reader, needs=connection.needs)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_pump_of_nvme_keeps_one_capability() -> None:
    """The kernel asks for SYS_ADMIN at each vendor command; NET_ADMIN was there too."""
    reader, writer = os.pipe()
    with NvmeConnection(Device(reader)) as connection:  # type: ignore[arg-type]
        doing = Doing(lambda: os.read(reader, 1), connection.needs)
        context = SimpleNamespace(interface=SimpleNamespace(descriptor=2))
        with LinkPumps(doing, context) as link:  # type: ignore[arg-type]
            pid = link.pumps[0].pid
            eventually(lambda: fields(pid)["Seccomp"] == "2", "the pump is confined")
            own = int(fields(os.getpid())["CapPrm"], 16)
            left = fields(pid)
            assert int(left["CapEff"], 16) == int(left["CapPrm"], 16) == own & 1 << 21
    os.close(reader)
    os.close(writer)


UNKNOWN_PROCESSOR = """
import os, sys
from millpond.tunnel.endpoint.cli import parse, run

real = os.uname()
os.uname = lambda: os.uname_result((*real[:4], "riscv64"))
sys.exit(run(parse(sys.argv[1:])))
"""


def run_on_unknown_processor(pair: Any, *options: str) -> Any:
    argv = ["device", "--socket", str(pair.socket), "--interface", "mp-test0", "--address", "10.77.0.2/30"]
    argv = [sys.executable, "-c", UNKNOWN_PROCESSOR, *argv, "--status-fd", "1", *options]
    return pair.device_side.program(*argv)


def test_an_end_whose_pumps_cannot_be_confined_is_refused(pair: Any) -> None:
    end = run_on_unknown_processor(pair)
    assert end.process.wait(30) == 1
    end.close()
    assert (
        "cannot be confined: no system call filter is known for riscv64"
        in json.loads(end.lines[-1])["reason"]
    )


def test_an_end_that_is_told_to_runs_unconfined_and_says_so(pair: Any) -> None:
    end = run_on_unknown_processor(pair, "--confinement", "best-effort")
    assert pair.host_side.end("host", pair.socket).wait_up()["confinement"] == "on"
    eventually(lambda: json.loads(end.lines[-1])["state"] == "up", "the device's end is up")
    assert json.loads(end.lines[-1])["confinement"] == "off: no system call filter is known for riscv64"

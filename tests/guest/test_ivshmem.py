# SPDX-License-Identifier: Apache-2.0
"""The tunnel into a real guest: the device's endpoint on QEMU's ivshmem device, the host's in a namespace."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from millpond.tunnel.ring.layout import SEND

from ..tunnel.conftest import DEVICE_ADDRESS, INTERFACE, End, Namespace, Program, _why_no_tunnel
from ..tunnel.ivshmem_support import start_end, start_server
from ..tunnel.test_endpoints import MB, expected
from .guest import Guest, GuestFailed, GuestProgram
from .machine import Hardware

pytestmark = pytest.mark.timeout(300)

TRAFFIC = "/millpond/tests/tunnel/traffic.py"
PATIENCE = 60.0
"""Seconds for what takes a few in an emulated machine that has the processors for itself."""
PAUSED_PINGPONG = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 7000), 20)
times = []
for _ in range(int(sys.argv[2])):
    time.sleep(0.15)  # longer than the safety timeout of whoever sleeps
    began = time.monotonic()
    sock.sendall(b"x")
    assert sock.recv(1) == b"x"
    times.append(time.monotonic() - began)
print(sorted(times)[len(times) // 2])
"""


class GuestEnd:
    """The device's end."""

    def __init__(self, guest: Guest, *options: str) -> None:
        self._guest = guest
        argv = ["python3", "-W", "error", "-m", "millpond.tunnel", "device", "--ivshmem", "pci"]
        argv += ["--interface", INTERFACE, "--address", f"{DEVICE_ADDRESS}/30", "--name", "csd0"]
        self.program: GuestProgram = guest.start([*argv, *options, "--status-fd", "1"])

    @property
    def statuses(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.program.lines]

    def wait_up(self, after: int = 0) -> dict[str, Any]:
        def up() -> list[dict[str, Any]]:
            return [said for said in self.statuses[-1:] if said.get("generation", 0) > after]

        ended = "the device's end to be up"
        self._guest.wait(lambda: bool(up()) or self.program.code is not None, ended, PATIENCE)
        if not up():
            raise GuestFailed(str(self.program))
        return up()[0]


class Board:
    """A guest with an ivshmem device, its doorbell server, and a namespace for the host's end."""

    def __init__(self, undo: ExitStack, folder: Path) -> None:
        self.socket = folder / "doorbells"
        self.server = start_server(undo, self.socket)
        device = ("-device", "ivshmem-doorbell,chardev=doorbells,vectors=3")
        arguments = ("-chardev", f"socket,id=doorbells,path={self.socket}", *device)
        self.guest = undo.enter_context(Guest(Hardware(arguments=arguments, network=False)))
        self.undo = undo  # what a test starts is undone at its end: a fixture sets another stack

    def start(self, *options: str) -> tuple[Namespace, End, GuestEnd]:
        side, device = Namespace(self.undo), self.device(*options)
        host = self.host(side, *options)
        host.wait_up(seconds=PATIENCE)
        device.wait_up()
        return side, host, device

    def host(self, side: Namespace, *options: str) -> End:
        return start_end(self.undo, side, "host", self.socket, *options)

    def device(self, *options: str) -> GuestEnd:
        end = GuestEnd(self.guest, *options)
        self.undo.callback(end.program.kill)
        return end

    def serve(self, role: str, number: int) -> GuestProgram:
        program = self.guest.start(["python3", TRAFFIC, role, DEVICE_ADDRESS, "7000", str(number)])
        self.undo.callback(program.kill)
        program.says("listening")
        return program

    def counters(self) -> tuple[int, int]:
        """Bytes that the guest's interface received and sent."""
        folder = f"/sys/class/net/{INTERFACE}/statistics"
        read = self.guest.run(["cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes"]).text.split()
        return int(read[0]), int(read[1])

    def interrupts(self) -> list[int]:
        """Per vector of the ivshmem device, how often it came."""
        table = self.guest.run(["cat", "/proc/interrupts"]).text.splitlines()
        return [int(line.split()[1]) for line in table if "vfio-msix" in line]


def _make_board(folder: Path) -> Iterator[Board]:
    if reason := _why_no_tunnel():
        pytest.skip(reason)
    with ExitStack() as undo:
        board = Board(undo, folder)
        yield board


@pytest.fixture(scope="module")
def machine(guest_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    yield from _make_board(tmp_path_factory.mktemp("ivshmem"))


@pytest.fixture(scope="module")
def plain_machine(guest_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """As if its kernel had no vfio."""
    for board in _make_board(tmp_path_factory.mktemp("ivshmem")):
        board.guest.run(["sh", "-c", "find /lib/modules -name 'vfio*.ko' -delete"])
        yield board


@pytest.fixture
def board(machine: Board) -> Iterator[Board]:
    with ExitStack() as undo:
        machine.undo = undo
        yield machine


@pytest.fixture
def plain_board(plain_machine: Board) -> Iterator[Board]:
    with ExitStack() as undo:
        plain_machine.undo = undo
        yield plain_machine


def exchange(board: Board, side: Namespace, total: int, role: str = "serve") -> tuple[GuestProgram, Program]:
    return board.serve(role, total), side.traffic("exchange", DEVICE_ADDRESS, total)


def check(server: GuestProgram, client: Program, total: int) -> None:
    assert client.result(PATIENCE) == expected(total)
    assert server.result() == expected(total)


def engine_works(board: Board, engine: str) -> bool:
    """The C engine was built for this machine, whose C library may be newer than the guest's."""
    code = f"from millpond.tunnel.datapath import native; native.loops({engine!r}, 'device')"
    return board.guest.run(["python3", "-c", code], check=False).code == 0


@pytest.mark.parametrize("engine", ["python", "c"])
def test_tcp_crosses_both_ways_and_the_interfaces_counted_it(board: Board, engine: str) -> None:
    if not engine_works(board, engine):
        pytest.skip("the guest can not load the C engine that is built here")
    side, host, _ = board.start("--engine", engine)
    assert host.status["peer"] == "csd0"
    total = 8 * MB
    check(*exchange(board, side, total), total)
    for received, sent in (side.counters(), board.counters()):
        assert received > total and sent > total


def test_it_is_woken_by_interrupts(board: Board) -> None:
    side, _, _ = board.start()
    board.serve("echo", 0)
    before = board.interrupts()
    client = side.program(sys.executable, "-c", PAUSED_PINGPONG, DEVICE_ADDRESS, "20")
    median = float(client.result(PATIENCE))
    came = [now - then for now, then in zip(board.interrupts(), before, strict=True)]
    assert came[SEND] >= 20, "it was not woken for each packet"
    assert median < 0.05, "one of the ends found the packet only after its safety timeout"


@pytest.mark.parametrize("victim", ["device", "host"])
def test_a_killed_end_comes_back_and_the_same_connection_finishes(board: Board, victim: str) -> None:
    side, host, device = board.start()
    total = 24 * MB
    server, client = exchange(board, side, total, "pause")
    server.says("begun")
    if victim == "device":
        device.program.kill()
        assert client.process.poll() is None and server.code is None, "all was sent before the kill"
        device = board.device()
    else:
        host.kill()
        assert client.process.poll() is None and server.code is None, "all was sent before the kill"
        host = board.host(side)
    server.signal(signal.SIGCONT)
    host.wait_up(after=1, seconds=PATIENCE)
    device.wait_up(after=1)
    check(server, client, total)
    assert host.status["generation"] == device.statuses[-1]["generation"] == 2


def test_the_memory_outlives_many_deaths(board: Board) -> None:
    side, host, device = board.start()
    for generation in range(1, 7):
        host.kill()
        host = board.host(side)
        host.wait_up(after=generation, seconds=PATIENCE)
        device.wait_up(after=generation)
    check(*exchange(board, side, 2 * MB), 2 * MB)


def test_a_second_device_end_waits_for_the_first(board: Board) -> None:
    board.start()
    second = GuestEnd(board.guest, "--interface", "mp-test1")
    with second.program as program:
        assert program.wait(PATIENCE).code == 1
        assert "another process uses /dev/vfio/" in program.errors


def test_without_vfio_it_is_polled(plain_board: Board) -> None:
    side, host, device = plain_board.start()
    assert "it will be polled: the kernel has no vfio-pci" in device.program.errors
    check(*exchange(plain_board, side, 4 * MB), 4 * MB)
    device.program.kill()
    device = plain_board.device()
    host.wait_up(after=1, seconds=PATIENCE)
    device.wait_up(after=1)
    check(*exchange(plain_board, side, 4 * MB), 4 * MB)


def test_a_guest_goes_on_when_the_doorbell_server_dies(plain_board: Board) -> None:
    side, host, device = plain_board.start()
    plain_board.server.process.kill()
    plain_board.server.close()
    check(*exchange(plain_board, side, 2 * MB), 2 * MB)
    device.program.kill()
    device = plain_board.device()
    host.wait_up(after=1, seconds=PATIENCE)
    device.wait_up(after=1)
    check(*exchange(plain_board, side, 2 * MB), 2 * MB)


def test_a_host_end_notices_that_the_guest_is_gone(board: Board) -> None:
    """The last one of that machine."""
    _, host, _ = board.start()
    board.guest.machine.process.kill()
    host.wait_down("the peer left the doorbell server")
    before = _cpu(host)
    time.sleep(1)
    assert _cpu(host) - before < 0.2 * os.sysconf("SC_CLK_TCK")


def _cpu(end: End) -> int:
    fields = Path(f"/proc/{end.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])

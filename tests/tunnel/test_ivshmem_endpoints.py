# SPDX-License-Identifier: Apache-2.0
"""Two real endpoints on one doorbell server, outside of virtual machines: deaths, intruders, hang-ups."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from millpond.tunnel.transports.ivshmem.pairing import DEVICE_HEARTBEAT, DEVICE_WORD, HOST_WORD

from ..effort import scaled
from ..waiting import eventually
from .conftest import End, Namespace
from .ivshmem_support import RawClient, start_end, start_server, start_strange_server
from .processes import cpu_share
from .test_endpoints import MB, check_exchange, start_exchange


class Board:
    """A doorbell server and a namespace for each end; what ``Pair`` is for the other transport."""

    def __init__(self, undo: ExitStack, folder: Path) -> None:
        self._undo = undo
        self.socket = folder / "doorbells"
        self.server = start_server(undo, self.socket)
        self.host_side, self.device_side = Namespace(undo), Namespace(undo)

    def host(self, *options: str) -> End:
        return start_end(self._undo, self.host_side, "host", self.socket, *options)

    def device(self, *options: str) -> End:
        return start_end(self._undo, self.device_side, "device", self.socket, "--name", "csd0", *options)

    def start(self, *options: str) -> tuple[End, End]:
        device, host = self.device(*options), self.host(*options)
        host.wait_up()
        device.wait_up()
        return host, device


@pytest.fixture
def board(undo: ExitStack, tmp_path: Path, tun_works: None) -> Board:
    return Board(undo, tmp_path)


@pytest.mark.parametrize("engine", scaled(["auto"], ["python", "auto"]))
def test_tcp_crosses_both_ways_and_the_interfaces_counted_it(board: Board, engine: str) -> None:
    host, device = board.start("--engine", engine)
    assert host.status["peer"] == "csd0" and device.status["peer"] == "host"
    check_exchange(*start_exchange(board, 16 * MB), 16 * MB)
    for side in (board.host_side, board.device_side):
        received, sent = side.counters()
        assert received > 16 * MB and sent > 16 * MB
    device.process.terminate()
    assert device.process.wait(30) == 0
    host.wait_down("the peer ")


def test_either_end_dies_at_any_moment_and_the_same_connection_finishes(board: Board) -> None:
    ends = dict(zip(("host", "device"), board.start(), strict=True))
    server, client = start_exchange(board, 32 * MB, "pause")
    server.says("begun")
    draw = random.Random(3)
    for victim in ("host", "device", *draw.choices(("host", "device"), k=scaled(4, 10))):
        ends[victim].kill()
        ends[victim] = board.host() if victim == "host" else board.device()
        time.sleep(draw.random() * 0.3)  # from its first instruction to long after the link is up
    assert client.process.poll() is None and server.process.poll() is None, "all was sent before the kills"
    server.process.send_signal(signal.SIGCONT)
    latest = max(end.status.get("generation", 0) for end in ends.values())

    def agree() -> bool:
        host, device = (ends[role].status for role in ("host", "device"))
        return host["state"] == device["state"] == "up" and host["generation"] == device["generation"]

    eventually(agree, f"both up after generation {latest}")
    check_exchange(server, client, 32 * MB)


def test_a_hanging_peer_is_noticed_and_taken_back(board: Board) -> None:
    host, device = board.start()
    stopped = [device.process.pid, *device.pumps()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    host.wait_down("no sign of life")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    host.wait_up(after=1)
    device.wait_up(after=1)
    check_exchange(*start_exchange(board, 4 * MB), 4 * MB)


def test_a_second_end_of_a_role_is_refused_until_the_first_leaves(undo: ExitStack, board: Board) -> None:
    host, device = board.start()
    other_side = Namespace(undo)
    second = start_end(undo, other_side, "host", board.socket)
    second.wait_down("another host is connected to this device")
    eventually(lambda: host.status["state"] == device.status["state"] == "up", "the first goes on")
    host.process.terminate()
    second.wait_up(after=1)


def test_a_link_outlives_the_server_and_moves_to_its_successor(undo: ExitStack, board: Board) -> None:
    host, device = board.start()
    board.server.process.kill()
    board.server.close()
    check_exchange(*start_exchange(board, 4 * MB), 4 * MB)
    os.kill(host.pumps()[0], signal.SIGKILL)
    host.wait_up(after=1)
    device.wait_up(after=1)
    start_server(undo, board.socket)
    for end in (host, device):
        os.kill(end.pumps()[0], signal.SIGKILL)
    host.wait_up(after=2)
    device.wait_up(after=2)
    check_exchange(*start_exchange(board, 4 * MB), 4 * MB)


def test_without_a_server_an_end_waits_at_rest(undo: ExitStack, tmp_path: Path, tun_works: None) -> None:
    host = start_end(undo, Namespace(undo), "host", tmp_path / "nothing")
    host.wait_down("no doorbell server answers")
    assert cpu_share(1.0, host.process.pid) < 0.2
    assert len(host.lines) == 2


def test_memory_that_could_be_truncated_is_refused_without_a_busy_loop(
    undo: ExitStack, tmp_path: Path, tun_works: None
) -> None:
    path = tmp_path / "strange"
    start_strange_server(undo, path, "unsealed")
    host = start_end(undo, Namespace(undo), "host", path)
    host.wait_down("not sealed: it could be truncated")
    assert cpu_share(1.0, host.process.pid) < 0.2
    assert host.process.poll() is None


def test_a_depth_that_does_not_fit_is_said(undo: ExitStack, tmp_path: Path, tun_works: None) -> None:
    socket = tmp_path / "doorbells"
    start_server(undo, socket, "--depth", "2")
    device = start_end(undo, Namespace(undo), "device", socket, "--depth", "64")
    device.wait_down("choose a smaller depth")
    small = start_end(undo, Namespace(undo), "device", socket, "--depth", "2")
    start_end(undo, Namespace(undo), "host", socket).wait_up()
    small.wait_up()


def test_scribbling_over_the_session_costs_links_only(undo: ExitStack, board: Board) -> None:
    """The guest can write the registers of both sides, at any time."""
    host, device = board.start()
    quads, draw = RawClient(undo, board.socket).memory()[: 1 << 17].cast("Q"), random.Random(5)
    for _ in range(scaled(30, 60)):
        place = draw.choice((HOST_WORD, DEVICE_WORD, DEVICE_HEARTBEAT, 0x3008, 0x3000, 0x0, 0x10))
        quads[place // 8] = draw.choice((0, draw.getrandbits(64), draw.getrandbits(20)))
        time.sleep(0.02)
    generation = host.status.get("generation", 0)
    assert host.process.poll() is None and device.process.poll() is None
    eventually(lambda: host.status["state"] == device.status["state"] == "up", f"up again after {generation}")
    check_exchange(*start_exchange(board, 4 * MB), 4 * MB)


def test_a_client_with_jammed_eventfds_stops_nobody(undo: ExitStack, board: Board) -> None:
    """Whoever holds an eventfd decides whether all who write to it may have to wait."""
    client = RawClient(undo, board.socket)
    client.memory()
    for notifier in client.roster.wakes:
        os.eventfd_write(notifier, 2**64 - 2)
        os.set_blocking(notifier, True)
    host, device = board.start()
    for end in (host, device):
        end.process.terminate()
        assert end.process.wait(10) == 0


def test_an_idle_link_costs_next_to_nothing(board: Board) -> None:
    host, device = board.start()
    pids = [end.process.pid for end in (host, device)] + host.pumps() + device.pumps()
    assert cpu_share(1.0, *pids) < 0.1

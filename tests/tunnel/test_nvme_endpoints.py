# SPDX-License-Identifier: Apache-2.0
"""The host's endpoint of the NVMe transport and the target carry TCP, over an initiator in user space."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..waiting import eventually
from .conftest import DEVICE_ADDRESS, HOST_ADDRESS, INTERFACE, End, Namespace, Program, counted_end
from .nvme_initiator import NQN
from .test_endpoints import expected

INITIATOR = Path(__file__).with_name("nvme_initiator.py")
PORT = "4420"
MB = 1 << 20
KERNEL_MTU = f"""
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    print(*struct.unpack("16xi12x", fcntl.ioctl(sock, 0x8921, struct.pack("16s16x", b"{INTERFACE}"))))
"""


class Fabric:
    """A target in one namespace, a host end in another, and the dialler between them."""

    def __init__(self, undo: ExitStack, folder: Path) -> None:
        self._undo, self._folder = undo, folder
        self.host_side, self.device_side = Namespace(undo), Namespace(undo, loopback=True)
        self.backing = folder / "backing"
        self.backing.write_bytes(bytes(MB))
        dialler = self.device_side.program(sys.executable, str(INITIATOR), "dial", str(folder / "dial"), PORT)
        dialler.says("listening")

    def target(self, *options: str) -> End:
        argv = [sys.executable, "-P", "-W", "error", "-m", "nvmet"]
        argv += [
            "--listen",
            f"127.0.0.1:{PORT}",
            "--backing",
            str(self.backing),
            "--nqn",
            NQN,
        ]
        argv += ["--interface", INTERFACE, "--address", f"{DEVICE_ADDRESS}/30", "--name", "csd0", *options]
        end = counted_end(argv, self.device_side.enter)
        self._undo.callback(end.close)
        return end

    def host(self, mtu: int = 65520) -> End:
        argv = [sys.executable, "-W", "error", str(INITIATOR), "host", str(self._folder / "dial")]
        argv += [INTERFACE, f"{HOST_ADDRESS}/30", str(mtu)]
        reader, writer = os.pipe()
        end = End([*argv, str(writer)], self.host_side.enter, reader)
        os.close(writer)
        self._undo.callback(end.close)
        return end

    def start(self, *options: str) -> tuple[End, End]:
        target, host = self.target(*options), self.host()
        host.wait_up()
        target.wait_up()
        return target, host

    def exchange(self, total: int, role: str = "serve") -> tuple[Program, Program]:
        server = self.device_side.traffic(role, DEVICE_ADDRESS, total)
        server.says("listening")
        return server, self.host_side.traffic("exchange", DEVICE_ADDRESS, total)


@pytest.fixture
def fabric(undo: ExitStack, tmp_path: Path, tun_works: None) -> Fabric:
    return Fabric(undo, tmp_path)


def check(server: Program, client: Program, total: int, *ends: End) -> None:
    found = client.result(), server.result()
    assert found == (expected(total), expected(total)), [end.story for end in ends]


def stopped(target: End) -> dict[str, Any]:
    """Its last status."""
    target.process.terminate()
    assert target.process.wait(30) == 0
    return target.wait_down("stopped")


def test_tcp_crosses_both_ways_in_vendor_commands(fabric: Fabric) -> None:
    target, host = fabric.start()
    assert host.status["peer"] == "csd0" and target.status["peer"] == "host"
    total = 16 * MB
    check(*fabric.exchange(total), total)
    for side in (fabric.host_side, fabric.device_side):
        received, sent = side.counters()
        assert received > total and sent > total
    figures = stopped(target)
    assert figures["opcodes"]["81h"] == {
        "commands": figures["in"]["packets"],
        "bytes": figures["in"]["bytes"],
    }
    assert figures["opcodes"]["82h"] == {
        "commands": figures["out"]["packets"],
        "bytes": figures["out"]["bytes"],
    }
    assert figures["in"]["bytes"] > total and figures["out"]["bytes"] > total
    assert figures["resets"] == 0 and figures["in"]["dropped"] == 0


@pytest.mark.parametrize(("target_mtu", "host_mtu"), [(65520, 1500), (1500, 65520)])
def test_the_smaller_mtu_is_set_at_both_ends(fabric: Fabric, target_mtu: int, host_mtu: int) -> None:
    target, host = fabric.target("--mtu", str(target_mtu)), fabric.host(host_mtu)
    assert host.wait_up()["mtu"] == target.wait_up()["mtu"] == 1500
    for side in (fabric.host_side, fabric.device_side):
        assert side.program(sys.executable, "-c", KERNEL_MTU).result() == "1500"
    total = 8 * MB
    check(*fabric.exchange(total), total)
    figures = stopped(target)
    for way in ("in", "out"):
        assert figures[way]["bytes"] > total
        assert figures[way]["packets"] < total // 1500, "no packet was larger than the MTU"


def test_idle_receives_end_empty_and_the_link_stays(fabric: Fabric) -> None:
    target, host = fabric.start("--idle", "0.05")
    time.sleep(0.6)
    check(*fabric.exchange(2 * MB), 2 * MB)
    assert target.status["state"] == host.status["state"] == "up"
    assert target.status["generation"] == host.status["generation"] == 1


@pytest.mark.parametrize("victim", ["target", "host"])
def test_a_killed_end_comes_back_and_the_same_connection_finishes(fabric: Fabric, victim: str) -> None:
    target, host = fabric.start()
    total = 64 * MB
    server, client = fabric.exchange(total, "pause")
    server.says("begun")
    (target if victim == "target" else host).kill()
    assert client.process.poll() is None and server.process.poll() is None, "all was sent before the kill"
    server.process.send_signal(signal.SIGCONT)
    if victim == "target":
        target = fabric.target()
        host.wait_up(after=1)
    else:
        host = fabric.host()
        target.wait_up(after=1)
    check(server, client, total, host, target)
    assert host.status["generation"] == target.status["generation"] >= 2


def test_a_second_target_is_refused_its_port(fabric: Fabric) -> None:
    fabric.start()
    second = fabric.target()
    assert second.process.wait(30) == 1
    assert second.status["reason"].startswith("cannot listen at 127.0.0.1:4420")


def test_a_target_that_is_suspended_is_left_and_found_again(fabric: Fabric) -> None:
    target, host = fabric.start()
    server, client = fabric.exchange(32 * MB)
    server.says("begun")
    os.kill(target.process.pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(target.process.pid, signal.SIGCONT)
    check(server, client, 32 * MB, host, target)
    eventually(lambda: target.status["state"] == host.status["state"] == "up", "up again")

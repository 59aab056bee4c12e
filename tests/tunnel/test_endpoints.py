# SPDX-License-Identifier: Apache-2.0
"""Two real endpoints in two network namespaces carry TCP; what is left when either of them dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from millpond.base.deadline import Deadline
from millpond.linux.confinement.sandbox import Sandbox, exit_code, spawn
from millpond.tunnel.endpoint.handle import spawn_endpoint

from ..waiting import eventually
from .conftest import each_with_each
from .processes import cpu_share, runs

HOST, DEVICE, INTERFACE = "10.77.0.1", "10.77.0.2", "mp-test0"
PEER = "10.77.9.1"
MB = 1 << 20
SEND_THREE = """
import socket
for source, target in (('10.77.0.2', '10.77.9.1'), ('10.77.0.6', '10.77.9.1'), ('10.77.0.2', '10.78.0.1')):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((source, 0))
        sock.sendto(b'x', (target, 9))
print('sent')
"""

every_combination = pytest.mark.parametrize("engines", each_with_each("python-c", "c-python"), indirect=True)
every_combination_if_full = pytest.mark.parametrize("engines", each_with_each(), indirect=True)


def expected(total: int) -> str:
    """What traffic.py prints when ``total`` bytes came as they were sent."""
    return f"{total} intact"


def start_exchange(pair: Any, total: int, role: str = "serve") -> tuple[Any, Any]:
    server = pair.device_side.traffic(role, DEVICE, total)
    server.says("listening")
    return server, pair.host_side.traffic("exchange", DEVICE, total)


def check_exchange(server: Any, client: Any, total: int) -> None:
    assert client.result() == expected(total)
    assert server.result() == expected(total)


@every_combination
def test_tcp_crosses_both_ways_and_the_interfaces_counted_it(pair: Any) -> None:
    host, device = pair.start()
    assert host.status["peer"] == "csd0" and device.status["peer"] == "host"
    assert host.status["mtu"] == device.status["mtu"] == 65520
    total = 16 * MB
    check_exchange(*start_exchange(pair, total), total)
    for side in (pair.host_side, pair.device_side):
        received, sent = side.counters()
        assert received > total and sent > total
    device.process.terminate()
    assert device.process.wait(30) == 0
    figures = host.wait_down("the peer is gone")
    assert figures["out"]["bytes"] > total and figures["in"]["bytes"] > total
    assert figures["in"]["dropped"] == 0 and figures["resets"] == 0


@every_combination_if_full
@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no 'ip' to set the scene with")
def test_with_peers_a_device_speaks_with_their_network_in_its_own_name(pair: Any) -> None:
    """Other addresses of the host stand for the peers; its machine forwards everything by default."""
    prepare = "echo 1 > /proc/sys/net/ipv4/conf/default/forwarding && ip address add 10.77.9.1/32 dev lo"
    pair.host_side.program("sh", "-c", f"ip link set lo up && {prepare}").process.wait(30)
    device = pair.device_side.end("device", pair.socket, "--peers", "10.77.0.0/16")
    host = pair.host_side.end("host", pair.socket, "--peers", "10.77.0.0/16")
    device.wait_up()
    host.wait_up()
    total = 2 * MB
    server = pair.host_side.traffic("serve", PEER, total)
    server.says("listening")
    check_exchange(server, pair.device_side.traffic("exchange", PEER, total), total)
    forwards = pair.host_side.program("cat", f"/proc/sys/net/ipv4/conf/{INTERFACE}/forwarding")
    assert forwards.result() == "0"
    # Of three packets one is in another device's name, one for another network: the host's end drops both.
    send = "ip address add 10.77.0.6/32 dev lo; ip link set lo up; ip route add 10.78.0.0/16 dev mp-test0; "
    send += f'{sys.executable} -c "{SEND_THREE}"'
    assert pair.device_side.program("sh", "-c", send).result() == "sent"
    device.process.terminate()
    assert device.process.wait(30) == 0
    assert host.wait_down("the peer is gone")["in"]["dropped"] == 2


@every_combination_if_full
def test_the_ends_settle_on_the_smaller_mtu_and_depth(pair: Any) -> None:
    device = pair.device_side.end("device", pair.socket, "--depth", "2", "--mtu", "1500")
    host = pair.host_side.end("host", pair.socket, "--depth", "8", "--mtu", "9000")
    assert host.wait_up()["mtu"] == device.wait_up()["mtu"] == 1500
    check_exchange(*start_exchange(pair, 2 * MB), 2 * MB)


def test_pumps_and_interface_go_with_a_killed_end(pair: Any) -> None:
    host, _ = pair.start()
    pumps = host.pumps()
    assert len(pumps) == 2 and INTERFACE in pair.host_side.interfaces()
    host.kill()
    eventually(lambda: not any(map(runs, pumps)), "pumps still run")
    eventually(lambda: INTERFACE not in pair.host_side.interfaces(), "the interface is still there")


def test_sigterm_ends_an_end_cleanly(pair: Any) -> None:
    host, device = pair.start()
    pumps = host.pumps() + device.pumps()
    for end in (host, device):
        end.process.terminate()
        assert end.process.wait(30) == 0
    assert not any(map(runs, pumps))
    assert not pair.socket.exists()


def test_reconnecting_leaks_nothing(pair: Any) -> None:
    host, device = pair.start()

    def held() -> list[int]:
        return [len(list(Path(f"/proc/{end.process.pid}/fd").iterdir())) for end in (host, device)]

    before = held()
    for generation in range(1, 6):
        os.kill(host.pumps()[0], signal.SIGKILL)
        host.wait_up(after=generation)
        device.wait_up(after=generation)
    eventually(lambda: held() == before, f"as many descriptors as before, {before}")
    for end in (host, device):
        regions = Path(f"/proc/{end.process.pid}/maps").read_text().count("millpond-tunnel")
        assert regions == 1


def test_a_second_host_is_refused_until_the_first_leaves(pair: Any) -> None:
    host, device = pair.start()
    second = pair.host_side.end("host", pair.socket, interface="mp-test1")
    second.wait_down("another host is connected")
    assert host.status["state"] == device.status["state"] == "up"
    host.process.terminate()
    second.wait_up()


def test_an_idle_link_costs_next_to_nothing(pair: Any) -> None:
    host, device = pair.start()
    pids = [end.process.pid for end in (host, device)] + host.pumps() + device.pumps()
    assert cpu_share(1.0, *pids) < 0.1


def test_a_deleted_interface_ends_the_end(pair: Any) -> None:
    host, device = pair.start()
    code = "import sys, pyroute2 as p; ip = p.IPRoute(); ip.link('del', ifname=sys.argv[1]); ip.close()"
    pair.host_side.program(sys.executable, "-c", code, INTERFACE).process.wait(30)
    assert host.process.wait(30) == 1
    host.wait_down(f"interface {INTERFACE} was deleted")
    device.wait_down("the peer is gone")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["--mtu", "70000"], "MTU"), (["--depth", "1"], "depth"), (["--address", "nonsense"], "nonsense")],
)
def test_wrong_arguments_are_named(options: list[str], complaint: str) -> None:
    argv = [sys.executable, "-m", "millpond.tunnel", "host", "--socket", "s", "--interface", "i"]
    done = subprocess.run([*argv, "--address", "10.0.0.1/30", *options], capture_output=True, text=True)
    assert done.returncode == 2
    assert complaint in done.stderr.splitlines()[-1]


def test_an_interface_that_exists_is_not_taken_over(pair: Any) -> None:
    host, _ = pair.start()
    other = pair.host_side.end("host", pair.socket)
    assert other.process.wait(30) == 1
    other.wait_down(f"interface {INTERFACE} cannot be made")
    assert host.status["state"] == "up"


def test_spawned_ends_come_up_and_stop(tmp_path: Path, undo: ExitStack, tun_works: None) -> None:
    def body() -> int:
        device = spawn_endpoint("device", tmp_path / "s", "mp-dev", "10.77.0.2/30", name="csd7")
        host = spawn_endpoint("host", tmp_path / "s", "mp-host", "10.77.0.1/30", mtu=9000)
        assert host.wait_up(Deadline.after(30))["peer"] == "csd7"
        assert device.wait_up(Deadline.after(30))["mtu"] == 9000
        host.stop()
        device.stop()
        assert not host.alive and not device.alive
        return 0

    pid = spawn(Sandbox(own_network=True), body)
    assert exit_code(os.waitpid(pid, 0)[1]) == 0


def test_spawned_ends_die_with_whoever_spawned_them(tmp_path: Path, tun_works: None) -> None:
    pids = tmp_path / "pids"

    def body() -> int:
        spawn_endpoint("device", tmp_path / "s", "mp-dev", "10.77.0.2/30")
        spawn_endpoint("host", tmp_path / "s", "mp-host", "10.77.0.1/30").wait_up(Deadline.after(30))
        tasks = Path("/proc/self/task").iterdir()
        pids.write_text(" ".join((task / "children").read_text() for task in tasks))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    os.waitpid(spawn(Sandbox(own_network=True), body), 0)
    ends = [int(pid) for pid in pids.read_text().split()]
    assert len(ends) == 2
    eventually(lambda: not any(map(runs, ends)), "the ends still run")

# SPDX-License-Identifier: Apache-2.0
"""The stock Linux NVMe driver in a guest connects to the target: blocks, and TCP in vendor commands.

QEMU and the target share a network namespace; the guest reaches the target as 10.0.2.2 by QEMU's network.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nvmet.vendor_commands import WINDOW

from ..tunnel.conftest import End, Namespace, Program, _libc, counted_end, eventually
from ..tunnel.test_endpoints import expected
from .guest import Guest, GuestProgram
from .machine import Hardware

pytestmark = pytest.mark.timeout(300)

NQN, PORT, MB = "nqn.2014-08.test:csd0", 4420, 1 << 20
HOST, DEVICE, INTERFACE = "10.77.0.1", "10.77.0.2", "mp-nvme0"
CONNECT = ["nvme", "connect", "-t", "tcp", "-a", "10.0.2.2", "-s", str(PORT), "-n", NQN]
LOOPBACK_UP = "import pyroute2 as p; n = p.IPRoute(); n.link('set', index=1, state='up'); n.close()"
FILL = """
import hashlib, os, sys
data = os.urandom(8 << 20)
with open(sys.argv[1], "wb") as file:
    file.write(data)
    os.fsync(file.fileno())
print(hashlib.md5(data).hexdigest())
"""


@contextmanager
def inside(namespace: Namespace) -> Iterator[None]:
    """What this thread starts meanwhile lives in the namespace."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        namespace.enter()
        yield
        assert _libc.setns(home, 0) == 0
    finally:
        os.close(home)


class Rack:
    """A guest, and the network namespace where its device's target runs."""

    def __init__(self, undo: ExitStack, folder: Path) -> None:
        self._undo = undo
        self.namespace = Namespace(undo)
        assert self.namespace.program(sys.executable, "-c", LOOPBACK_UP).process.wait(10) == 0
        self.backing = folder / "backing"
        self.backing.write_bytes(b"")
        os.truncate(self.backing, 64 * MB)
        with inside(self.namespace):
            self.guest = undo.enter_context(Guest(Hardware(processors=2)))
        self.guest.run(["modprobe", "nvme-tcp"])

    def target(self, *options: str) -> End:
        """A target that listens."""
        argv = [sys.executable, "-P", "-W", "error", "-m", "nvmet"]
        argv += ["--listen", f"127.0.0.1:{PORT}", "--backing", str(self.backing), "--nqn", NQN]
        argv += ["--interface", INTERFACE, "--address", f"{DEVICE}/30", "--name", "csd0", *options]
        end = counted_end(argv, self.namespace.enter)
        self._undo.callback(end.close)
        eventually(lambda: end.statuses, "the target listening", 10)
        return end

    def connect(self) -> None:
        """The guest's driver finds the namespace."""
        self.guest.run([*CONNECT, "--reconnect-delay", "1", "--keep-alive-tmo", "10"])
        self.guest.run(
            ["sh", "-c", "for i in $(seq 100); do test -b /dev/nvme0n1 && exit; sleep 0.1; done; exit 1"]
        )

    def disconnect(self) -> None:
        self.guest.run(["nvme", "disconnect", "-n", NQN], check=False)

    def host(self) -> GuestProgram:
        """The host end, in the guest."""
        argv = ["python3", "-m", "millpond.tunnel", "host", "--nvme", "auto", "--interface", INTERFACE]
        return self.guest.start([*argv, "--address", f"{HOST}/30", "--status-fd", "1"])

    def exchange(self, total: int, role: str = "serve") -> tuple[Program, GuestProgram]:
        """Streams both ways at once."""
        server = self.namespace.traffic(role, DEVICE, total)
        server.says("listening")
        argv = ["python3", "/millpond/tests/tunnel/traffic.py", "exchange", DEVICE, "7000", str(total)]
        return server, self.guest.start(argv)


@pytest.fixture(scope="module")
def rack(guest_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    if os.geteuid():
        pytest.skip("only root may start QEMU in a network namespace that has a TUN interface")
    with ExitStack() as undo:
        yield Rack(undo, tmp_path_factory.mktemp("nvme"))


@pytest.fixture
def connected(rack: Rack) -> Iterator[End]:
    """A target that the guest's driver is connected to."""
    target = rack.target()
    rack.connect()
    yield target
    rack.disconnect()
    target.close()


def check(server: Program, client: GuestProgram, total: int, *ends: End | GuestProgram) -> None:
    found = client.result(120), server.result()
    assert found == (expected(total), expected(total)), [
        end.story if isinstance(end, End) else str(end) for end in ends
    ]


def figures_of(target: End) -> dict[str, Any]:
    """Its last status; this ends it."""
    target.process.terminate()
    assert target.process.wait(10) == 0
    return target.wait_down("stopped")


def test_the_volume_is_a_block_device(rack: Rack, connected: End) -> None:
    shell: Callable[[str], str] = lambda command: rack.guest.run(["sh", "-ec", command]).text  # noqa: E731
    assert shell("cat /sys/class/nvme/nvme0/model").startswith("millpond")
    shell("mke2fs -q -t ext4 /dev/nvme0n1; mkdir -p /tmp/volume; mount /dev/nvme0n1 /tmp/volume")
    digest = rack.guest.python(FILL, "/tmp/volume/file")
    shell("umount /tmp/volume; blockdev --flushbufs /dev/nvme0n1; mount -o ro /dev/nvme0n1 /tmp/volume")
    assert shell("md5sum </tmp/volume/file").split()[0] == digest
    shell("umount /tmp/volume; e2fsck -fn /dev/nvme0n1")
    assert shell("dmesg | grep -i 'nvme.*error' || true") == ""
    counts = figures_of(connected)["opcodes"]
    assert counts["01h"]["bytes"] >= 8 * MB and counts["02h"]["bytes"] >= 8 * MB
    assert counts["00h"]["commands"] > 0 and counts["08h"]["commands"] > 0
    assert counts["81h"]["commands"] == counts["82h"]["commands"] == 0


def test_tcp_runs_through_the_kernels_driver(rack: Rack, connected: End) -> None:
    with rack.host() as host:
        connected.wait_up(seconds=30)
        total = 16 * MB
        check(*rack.exchange(total), total)
        figures = figures_of(connected)
        assert not [line for line in host.errors.splitlines() if "reset" in line or "Traceback" in line]
    for opcode, direction in (("81h", "in"), ("82h", "out")):
        counts, packets = figures["opcodes"][opcode], figures[direction]
        assert counts["bytes"] >= packets["bytes"] > total
        # SENDs wait for one still on its way: while its sender is held up, the others fill the window.
        early = counts["commands"] - packets["packets"]
        assert 0 <= early < (WINDOW if opcode == "81h" else 1)
    assert figures["resets"] == 0 and figures["in"]["dropped"] == 0


def test_idle_receives_do_not_outlast_the_drivers_patience(rack: Rack, connected: End) -> None:
    patience = "/sys/block/nvme0n1/queue/io_timeout"
    rack.guest.run(["sh", "-c", f"echo 3000 >{patience}"])
    with rack.host():
        connected.wait_up(seconds=30)
        time.sleep(8)
        assert connected.status["state"] == "up" and connected.status["generation"] == 1
        assert "timeout" not in rack.guest.run(["dmesg"]).text
        one = ["--opcode=0x82", "--namespace-id=1", "--cdw12=1", "--data-len=69632", "--read"]
        with rack.guest.start(["nvme", "io-passthru", "/dev/ng0n1", *one]):  # waits for 10 s
            connected.wait_up(after=1, seconds=30)
        assert "timeout" in rack.guest.run(["dmesg"]).text


def test_a_stream_outlives_a_controller_reset(rack: Rack, connected: End) -> None:
    with rack.host() as host:
        connected.wait_up(seconds=30)
        server, client = rack.exchange(16 * MB, "pause")
        server.says("begun", 30)
        rack.guest.run(["sh", "-c", "echo 1 >/sys/class/nvme/nvme0/reset_controller"])
        assert client.code is None and server.process.poll() is None, "all was sent before the reset"
        server.process.send_signal(signal.SIGCONT)
        connected.wait_up(after=1, seconds=30)
        check(server, client, 16 * MB, host, connected)


def test_a_stream_outlives_its_target(rack: Rack, connected: End) -> None:
    with rack.host() as host:
        connected.wait_up(seconds=30)
        server, client = rack.exchange(16 * MB, "pause")
        server.says("begun", 30)
        connected.kill()
        assert client.code is None and server.process.poll() is None, "all was sent before the kill"
        server.process.send_signal(signal.SIGCONT)
        second = rack.target()
        second.wait_up(after=1, seconds=30)
        check(server, client, 16 * MB, host, second)
        counts = figures_of(second)["opcodes"]
    assert counts["81h"]["bytes"] > 0 and counts["82h"]["bytes"] > 0


def test_a_stream_outlives_its_host_end(rack: Rack, connected: End) -> None:
    host = rack.host()
    connected.wait_up(seconds=30)
    server, client = rack.exchange(16 * MB, "pause")
    server.says("begun", 30)
    host.kill()
    assert client.code is None and server.process.poll() is None, "all was sent before the kill"
    server.process.send_signal(signal.SIGCONT)
    with rack.host() as second:
        connected.wait_up(after=1, seconds=30)
        check(server, client, 16 * MB, second, connected)


def test_without_a_controller_the_host_end_waits_and_says_so(rack: Rack) -> None:
    with rack.host() as host:
        rack.guest.wait(lambda: "no NVMe controller" in " ".join(host.lines), "a reason", 30)
        target = rack.target()
        rack.connect()
        target.wait_up(seconds=30)
        target.kill()
    rack.disconnect()

# SPDX-License-Identifier: Apache-2.0
"""A device reaches no service of its host, but worker 0 of its launch: two network namespaces and a wire."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.fleet import forwarding, worker_user
from millpond.host.fleet.addresses import PeerLink
from millpond.host.fleet.directory import DeviceConfig, Fleet, FleetConfig, HostConfig
from millpond.host.fleet.firewall import HostFirewall
from millpond.host.fleet.forwarding import Forwarding
from millpond.linux.confinement.sandbox import Sandbox, exit_code, spawn
from millpond.linux.netlink import nftables
from millpond.linux.network import loopback_up
from millpond.linux.syscalls import CLONE_NEWNET, unshare

from ..waiting import eventually

HOST, DEVICE, SECOND = "10.77.0.1", "10.77.0.2", "10.77.0.5"
LOW, HIGH, UNGUARDED = 8000, 40000, "10.99.0.1"
SECONDS = 0.5
_SYN_SENT = "02"
PING = bytes([8, 0, 0xF7, 0xFE, 0, 1, 0, 0])


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)


class Wires:
    """The host's namespace, in which the test runs, and that of the device, in a child that connects when it
    is asked to. The host's end of the tunnel is a veth with the tunnel's name; ``other`` is another network.
    """

    def __init__(self) -> None:
        loopback_up()
        self._ask, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._ask.close()
            _serve_as_device(asked)
        asked.close()
        assert self._ask.recv(10) == b"ready"
        for name, own, there in (("mp-csd0", HOST, DEVICE), ("other", UNGUARDED, "10.99.0.2")):
            run("ip", "link", "add", name, "type", "veth", "peer", "name", f"p{name}"[:15])
            run("ip", "link", "set", f"p{name}"[:15], "netns", str(self.pid))
            run("ip", "addr", "add", f"{own}/30", "dev", name)
            run("ip", "link", "set", name, "up")
            self.ask("wire", f"p{name}"[:15], there)
        run("ip", "addr", "add", f"{SECOND}/30", "dev", "lo")
        self.ask("route", HOST)

    def ask(self, *words: str) -> str:
        """Have the device do something; returns how it went."""
        self.begin(*words)
        return self.end()

    def begin(self, *words: str) -> None:
        self._ask.send(" ".join(words).encode())

    def end(self) -> str:
        return self._ask.recv(1000).decode()

    def is_connecting(self) -> bool:
        """Whether the device waits for an answer to its first packet."""
        states = [line.split()[3] for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()]
        return _SYN_SENT in states

    def reaches(self, address: str, port: int, kind: str = "tcp") -> bool:
        return self.ask(kind, address, str(port)) == "yes"

    def close(self) -> None:
        self._ask.close()
        os.waitpid(self.pid, 0)


def _serve_as_device(asked: socket.socket) -> None:
    code = 1
    try:
        unshare(CLONE_NEWNET)
        loopback_up()
        asked.send(b"ready")
        listener = socket.create_server(("0.0.0.0", 7700))
        while words := asked.recv(1000).decode().split():
            asked.send(_as_device(listener, *words).encode())
        code = 0
    finally:
        os._exit(code)


def _as_device(listener: socket.socket, kind: str, address: str, *more: str) -> str:
    if kind == "wire":
        run("ip", "addr", "add", f"{more[0]}/30", "dev", address)
        run("ip", "link", "set", address, "up")
    elif kind == "route":
        run("ip", "route", "add", "10.77.0.0/16", "via", address)
    elif kind == "tcp":
        with socket.socket() as sock:
            sock.settimeout(float(more[1]) if more[1:] else SECONDS)
            answers = {0: "yes", errno.ECONNREFUSED: "refused"}
            return answers.get(sock.connect_ex((address, int(more[0]))), "no")
    elif kind == "refused":
        udp = socket.SOCK_DGRAM if address == "udp" else socket.SOCK_STREAM
        *_, there, port = (address, *more)
        with socket.socket(socket.AF_INET, udp) as sock:
            sock.settimeout(SECONDS)
            try:
                sock.connect((there, int(port)))
                sock.send(b"x")
                sock.recv(1)
            except ConnectionRefusedError:
                return "refused"
            except OSError as error:
                return repr(error)
    elif kind == "udp":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"x", (address, int(more[0])))
    elif kind == "ping":
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sock:
            sock.settimeout(5)
            sock.sendto(PING, (address, 0))
            return "yes" if sock.recv(100)[20] == 0 else "no"
    elif kind == "accept":
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"hello")
    return "done"


def fleet(tmp_path: Path, firewall: str = "required", devices: Sequence[str] = ("csd0", "csd1")) -> Fleet:
    host = HostConfig(firewall=firewall)  # type: ignore[arg-type]
    return Fleet(tmp_path, FleetConfig("testing", device=tuple(map(DeviceConfig, devices)), host=host))


def in_namespace(body: Callable[[Wires], None]) -> None:
    def inside() -> int:
        wires = Wires()
        try:
            body(wires)
        finally:
            wires.close()
        return 0

    assert exit_code(os.waitpid(spawn(Sandbox(own_network=True), inside), 0)[1]) == 0


@contextmanager
def services() -> Iterator[socket.socket]:
    """TCP at two ports of all the host's addresses; yields a socket of UDP there."""
    with (
        socket.create_server(("0.0.0.0", LOW)),
        socket.create_server(("0.0.0.0", HIGH)),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("0.0.0.0", LOW))
        udp.settimeout(SECONDS)
        yield udp


def flush_ruleset() -> None:
    """Delete all tables of nftables, as ``nft flush ruleset`` does at a reload of the machine's own rules."""
    headers = ((0x10, 1, 10), (10 << 8 | 2, 5, 0), (0x11, 1, 10))  # begin; delete tables, acknowledged; end
    batch = b"".join(
        struct.pack("=IHHIIBBH", 20, *kind, 1, 0, 0, 0, socket.htons(to)) for *kind, to in headers
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as sock:
        sock.settimeout(10)
        sock.sendto(batch, (0, 0))
        assert struct.unpack_from("=i", sock.recv(1000), 16) == (0,)


def gets(udp: socket.socket) -> bool:
    try:
        return udp.recv(10) == b"x"
    except TimeoutError:
        return False


@pytest.fixture(autouse=True)
def interfaces_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for interfaces to go: those of these tests are there before the guard is."""
    monkeypatch.setattr(forwarding, "VANISH_SECONDS", 0.0)


def test_a_device_reaches_no_service_of_the_host(tmp_path: Path) -> None:
    def body(wires: Wires) -> None:
        guard = Forwarding(fleet(tmp_path))
        with services() as udp:
            assert not wires.reaches(HOST, LOW) and not wires.reaches(HOST, HIGH)
            assert not wires.reaches(SECOND, LOW)  # the host's address in the tunnel of another
            wires.ask("udp", HOST, str(LOW))
            assert not gets(udp)
            assert wires.reaches(UNGUARDED, LOW)  # by another network
            wires.ask("udp", UNGUARDED, str(LOW))
            assert gets(udp)
            assert wires.reaches(HOST, 0, "ping")
            guard.close()
            assert wires.reaches(HOST, LOW)

    in_namespace(body)


def test_the_host_reaches_its_device(tmp_path: Path) -> None:
    def body(wires: Wires) -> None:
        Forwarding(fleet(tmp_path))
        with socket.create_connection((DEVICE, 7700), 5) as sock:
            wires.ask("accept", "once")
            assert sock.recv(10) == b"hello"

    in_namespace(body)


def test_a_launch_opens_the_ports_of_its_worker_on_the_host_alone(tmp_path: Path) -> None:
    def body(wires: Wires) -> None:
        guard = Forwarding(fleet(tmp_path))
        with guard.between(["csd0"], host=True) as opened, services():
            assert wires.reaches(HOST, HIGH) and not wires.reaches(HOST, LOW)
            opened.listen([LOW])
            assert wires.reaches(HOST, LOW)
            opened.listen([])
            assert not wires.reaches(HOST, LOW)
            opened.listen([LOW])
        with services():
            assert not wires.reaches(HOST, HIGH) and not wires.reaches(HOST, LOW)
            with guard.between(["csd0"], host=True) as opened:
                assert not wires.reaches(HOST, HIGH)  # another program's
                opened.listen([HIGH])
                assert wires.reaches(HOST, HIGH)
            with guard.between(["csd0"]):
                assert not wires.reaches(HOST, HIGH)
        with guard.between(["csd1"], host=True) as opened, services():
            opened.listen([LOW])
            assert not wires.reaches(HOST, HIGH) and not wires.reaches(HOST, LOW)
        with guard.between(["csd0"], host=True), services():
            assert wires.reaches(HOST, HIGH) and not wires.reaches(HOST, LOW)

    in_namespace(body)


@contextmanager
def listeners() -> Iterator[None]:
    both = socket.create_server(("::", LOW), family=socket.AF_INET6, dualstack_ipv6=True)
    with socket.create_server(("0.0.0.0", HIGH)), both:
        yield


def reached_by(uid: int, address: str, port: int) -> bool:
    """Whether a user of this machine reaches a port."""
    pid = os.fork()
    if not pid:
        os.setresuid(uid, uid, uid)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as sock:
            sock.settimeout(SECONDS)
            os._exit(sock.connect_ex((address, port)) != 0)
    return exit_code(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(not worker_user.is_separate(), reason="only root can be other users")
def test_the_ports_of_a_launch_are_closed_to_other_networks_and_other_users(tmp_path: Path) -> None:
    def body(wires: Wires) -> None:
        guard = Forwarding(fleet(tmp_path))
        with listeners():
            with guard.between(["csd0"], host=True) as opened:
                opened.reserve(HIGH)
                opened.listen([LOW])
                assert wires.reaches(HOST, LOW)
                assert not wires.reaches(UNGUARDED, LOW) and not wires.reaches(UNGUARDED, HIGH)
                for address, port in (("127.0.0.1", HIGH), (HOST, HIGH), ("::1", LOW), ("127.0.0.1", LOW)):
                    assert reached_by(0, address, port) and reached_by(worker_user.UID, address, port)
                    assert not reached_by(4711, address, port)
                opened.listen([])  # the next process may listen there again before this is told
                assert not wires.reaches(UNGUARDED, LOW)
            assert wires.reaches(UNGUARDED, LOW) and reached_by(4711, "127.0.0.1", HIGH)

    in_namespace(body)


def test_devices_of_another_host_reach_the_worker_by_their_link_alone(tmp_path: Path) -> None:
    def body(wires: Wires) -> None:
        guard = HostFirewall(fleet(tmp_path))
        for network, reaches in (("10.99.0.0/30", True), ("10.99.0.4/30", False)):
            networks = (ipaddress.IPv4Network(network),)
            link = PeerLink("other", None, networks, ipaddress.IPv4Address(HOST))
            with guard.open_to(["csd0"], host=True, links=[link]) as opened, services():
                assert wires.reaches(UNGUARDED, LOW) is not reaches  # of the launch, no service of the host
                opened.reserve(HIGH)
                assert wires.reaches(UNGUARDED, HIGH) is reaches
                assert not reaches or wires.reaches(UNGUARDED, 0, "ping")
                assert not reaches or wires.ask("tcp", UNGUARDED, str(LOW), "20") == "refused"
        guard.close()

    in_namespace(body)


def test_devices_of_another_host_reach_no_service_of_a_host_without_a_worker(tmp_path: Path) -> None:
    """Before: they reached each, as other machines of its network do, by the addresses of its fleet."""

    def body(wires: Wires) -> None:
        guard = HostFirewall(fleet(tmp_path))
        link = PeerLink("other", None, (ipaddress.IPv4Network("10.99.0.0/30"),), ipaddress.IPv4Address(HOST))
        with services() as udp:
            with guard.open_to([], host=False, links=[link]):
                assert not wires.reaches(UNGUARDED, LOW) and not wires.reaches(UNGUARDED, HIGH)
                wires.ask("udp", UNGUARDED, str(LOW))
                assert not gets(udp)
                with socket.create_connection(("10.99.0.2", 7700), 5) as sock:
                    wires.ask("accept", "once")
                    assert sock.recv(10) == b"hello"
            assert wires.reaches(UNGUARDED, LOW)
        guard.close()

    in_namespace(body)


def test_a_device_that_is_refused_is_told_so(tmp_path: Path) -> None:
    """Before: what it began was dropped, and it waited for minutes."""

    def body(wires: Wires) -> None:
        guard = Forwarding(fleet(tmp_path))
        with services():
            assert wires.ask("refused", HOST, str(LOW)) == "refused"
            assert wires.ask("refused udp", HOST, str(LOW)) == "refused"
        guard.close()

    in_namespace(body)


def test_a_device_that_connects_before_the_port_is_opened_meets_it_at_its_next_try(tmp_path: Path) -> None:
    """Before: "connection refused", though the worker listened: its ports are told some 10 ms later."""

    def body(wires: Wires) -> None:
        guard = Forwarding(fleet(tmp_path))
        with guard.between(["csd0"], host=True) as opened, services():
            wires.begin("tcp", HOST, str(LOW), "20")
            eventually(wires.is_connecting, "the first packet has been sent")
            opened.listen([LOW])
            assert wires.end() == "yes"
            opened.listen([])
            for _ in range(2):
                assert wires.ask("tcp", HOST, str(LOW), "20") == "refused"  # once it was tried again
        assert wires.ask("tcp", HOST, str(LOW)) == "refused"  # at once
        guard.close()

    in_namespace(body)


def test_the_guard_outlives_a_reload_of_the_machines_rules(tmp_path: Path) -> None:
    def body(wires: Wires) -> None:
        guard = Forwarding(fleet(tmp_path))
        with guard.between(["csd0"], host=True), services():
            for _ in range(2):
                flush_ruleset()
                assert wires.reaches(HOST, HIGH) and not wires.reaches(HOST, LOW)
        flush_ruleset()
        with services():
            assert not wires.reaches(HOST, HIGH) and not wires.reaches(HOST, LOW)
        with guard.between(["csd0"], host=True), services():
            assert wires.reaches(HOST, HIGH)
        with services():
            assert not wires.reaches(HOST, HIGH)
            guard.close()
            assert wires.reaches(HOST, LOW)

    in_namespace(body)


def test_the_guard_outlives_a_daemon_that_is_killed(tmp_path: Path) -> None:
    """Its tunnels end a moment after it."""

    def body(wires: Wires) -> None:
        if not (pid := os.fork()):
            Forwarding(fleet(tmp_path))
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        with services():
            assert not wires.reaches(HOST, HIGH) and not wires.reaches(HOST, LOW)
            Forwarding(fleet(tmp_path)).close()
            assert wires.reaches(HOST, LOW)

    in_namespace(body)


def test_two_fleets_of_one_name_have_guards_of_their_own(tmp_path: Path) -> None:
    def body(wires: Wires) -> None:
        other = tmp_path / "other"
        other.mkdir()
        one = Forwarding(fleet(tmp_path))
        two = Forwarding(fleet(other, devices=("far0",)))
        with services():
            assert not wires.reaches(HOST, LOW)
            two.close()
            assert not wires.reaches(HOST, LOW)
            one.close()
            assert wires.reaches(HOST, LOW)

    in_namespace(body)


def test_the_guard_is_of_thousands_of_devices(tmp_path: Path) -> None:
    """Before: "Message too long", and with 300 "No buffer space available"."""

    def body(wires: Wires) -> None:
        guard = HostFirewall(fleet(tmp_path, devices=(*(f"far{number}" for number in range(3000)), "csd0")))
        with services():
            assert not wires.reaches(HOST, LOW)
        guard.close()

    in_namespace(body)


def test_a_kernel_without_nftables_is_refused_unless_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a kernel without the module; the rest of the guard is not made then."""

    def missing(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(nftables, "_send", missing)
    with pytest.raises(LocalError, match=r"host\.firewall = 'off'"):
        Forwarding(fleet(tmp_path))

    def body(wires: Wires) -> None:
        with services():
            guard = Forwarding(fleet(tmp_path, "off"))
            with guard.between(["csd0"], host=True):
                assert wires.reaches(HOST, LOW)
            guard.close()

    in_namespace(body)

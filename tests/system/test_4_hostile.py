# SPDX-License-Identifier: Apache-2.0
"""Devices and clients that lie: each is refused by name, and costs the others nothing."""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.agent.listener import CONNECTIONS
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, MillpondError, Refused, RemoteError
from millpond.host.fleet.authority import Authority
from millpond.wire import tls
from millpond.wire.channel import Channel
from millpond.wire.control_messages import CONTROL_PORT, Attach, GetTicket, Hello, Ticket, Welcome
from millpond.wire.framing import MAGIC, PREFIX, PROTOCOL, encode
from millpond.wire.messages import Ok
from millpond.wire.tls import Identity

from ..forking import ForkServer
from ..waiting import eventually
from .support import CANARY, Emulation, receive_all

pytestmark = pytest.mark.timeout(180)
MOST = (4 << 30) - 1
HUGE_HEAD = PREFIX.pack(MAGIC, PROTOCOL, MOST, 0)
HUGE_PAYLOAD = encode(Attach(b"x"), MOST)
MIB = 1 << 20


def soon() -> Deadline:
    return Deadline.after(15)


@pytest.fixture
def unharmed(fleet: Emulation) -> Iterator[Emulation]:
    """The shared fleet, of which csd0's agent is the same process in the end and takes no more memory."""
    agent = fleet.agent("csd0")
    before = agent.memory_info().rss
    yield fleet
    assert fleet.agent("csd0") == agent
    assert agent.memory_info().rss - before < 32 * MIB
    assert fleet.devices()["csd0"].state == "ready"


def hello(emulation: Emulation, device: str, identity: Identity) -> Welcome:
    """Greet an agent as ``identity``."""
    with emulation.client() as client:
        sock = client.dial(device, CONTROL_PORT)
    secure = tls.connect(sock, identity.context(server=False), device, soon())
    with Channel(secure, device) as channel:
        return channel.call(Hello("test"), Welcome, soon())


def test_another_version_of_the_protocol_is_named(odd: Emulation) -> None:
    newer = odd.wait({"newer": "incompatible"})["newer"]
    assert str(PROTOCOL) in newer.reason
    assert str(PROTOCOL + 1) in newer.reason
    table = odd.millpond("devices")
    assert table.code == 0
    assert "incompatible" in table.out


def test_a_device_of_another_fleet_is_refused(odd: Emulation) -> None:
    assert "certificate" in odd.wait({"stranger": "refused"})["stranger"].reason


def test_a_device_that_announces_gigabytes_is_refused_and_costs_nothing(odd: Emulation) -> None:
    daemon = odd.daemon()
    before = daemon.memory_info().rss
    reasons = set()

    def both() -> bool:
        reasons.add(odd.devices()["flood"].reason)
        return any("head of" in r for r in reasons) and any("'welcome'" in r for r in reasons)

    eventually(both, f"both announcements, {reasons}", 90, 0.1)
    assert odd.daemon() == daemon
    assert daemon.memory_info().rss - before < 32 * MIB


def test_a_device_that_turns_bad_is_refused_and_may_come_back(odd: Emulation) -> None:
    flag = odd.fleet.device_directory("turning") / "flash" / "public" / "turn"
    for _ in range(2):
        odd.wait({"turning": "ready"})
        flag.touch()
        try:
            assert "protocol" in odd.wait({"turning": "refused"})["turning"].reason
        finally:
            flag.unlink()
    odd.wait({"turning": "ready"})


def test_a_good_device_among_odd_ones_works(odd: Emulation) -> None:
    result = odd.millpond("run", "csd0", "uname", "-n")
    assert (result.code, result.out) == (0, "csd0\n")
    refused = odd.millpond("mount", "stranger", str(odd.base))
    assert refused.code == 1
    assert len(refused.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("flood", "it sent more than 65536 characters of output at once"),
        ("other", "it sent 'ok' while a script runs"),
        ("payload", "it sent a payload behind 'launch.exited'"),
        ("noise", "raving"),
    ],
)
def test_a_device_that_lies_about_a_launch_ends_it(
    odd: Emulation, tmp_path: Path, how: str, told: str
) -> None:
    odd.wait({"raving": "ready", "csd0": "ready"})
    (tmp_path / "waiting.py").write_text("import time\ntime.sleep(600)\n")
    argv = ("launch", "--devices", "csd0,raving", "--", tmp_path / "waiting.py", how)
    result = odd.millpond(*argv)
    (line,) = result.err.splitlines()
    assert (result.code, result.out) == (3, "")
    assert line.startswith("millpond: raving (rank 2): ") and told in line


def test_a_device_writes_on_no_terminal_and_in_no_other_workers_name(odd: Emulation, tmp_path: Path) -> None:
    odd.wait({"raving": "ready"})
    (tmp_path / "nothing.py").write_text("")
    result = odd.millpond("launch", "--devices", "raving", "--", tmp_path / "nothing.py", "terminal")
    assert result.code == 0, result
    assert result.out.splitlines() == ["[raving]  [2J  here", "[raving] [host] there"]


def test_a_device_that_prints_for_ever_costs_no_memory(odd: Emulation, tmp_path: Path) -> None:
    odd.wait({"raving": "ready"})
    (tmp_path / "waiting.py").write_text("import time\ntime.sleep(600)\n")
    daemon = odd.daemon()
    before = daemon.memory_info().rss
    argv = ("launch", "--devices", "raving", "--", tmp_path / "waiting.py", "exhausting")
    with odd.begin(*argv) as process:
        for _ in range(200):  # and then nobody looks any more
            assert process.stdout.readline().startswith("[raving] xxx")
        most = max(daemon.memory_info().rss for _ in range(20) if not time.sleep(0.1))
    assert most - before < 64 * MIB
    odd.wait({"raving": "ready", "csd0": "ready"})


def test_only_the_fleets_host_may_talk_to_an_agent(unharmed: Emulation, tmp_path: Path) -> None:
    fleet = unharmed
    assert hello(fleet, "csd0", fleet.fleet.identity).device == "csd0"
    other = Authority.create(tmp_path / "ca", "other").issue("host", tmp_path / "host")
    Identity(fleet.fleet.identity.authority, other.certificate, other.key)
    shutil.copy(fleet.fleet.identity.authority, other.authority)
    with pytest.raises(RemoteError):
        hello(fleet, "csd0", other)
    device = Identity.in_directory(fleet.fleet.device_directory("csd1") / "etc")
    with pytest.raises(RemoteError):
        hello(fleet, "csd0", device)
    with pytest.raises(RemoteError, match="certificate"):  # nor does one agent pass for another
        with fleet.client() as client:
            sock = client.dial("csd0", CONTROL_PORT)
        tls.connect(sock, fleet.fleet.identity.context(server=False), "csd1", soon())
    log = fleet.millpond("logs", "csd0").out
    assert "the certificate of csd1 was shown where 'host' belongs" in log


def dial(fleet: Emulation, encrypted: bool) -> socket.socket:
    """A connection to csd0's agent."""
    with fleet.client() as client:
        sock = client.dial("csd0", CONTROL_PORT)
    if encrypted:
        return tls.connect(sock, fleet.fleet.identity.context(server=False), "csd0", soon())
    return sock


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("announcement", [HUGE_HEAD, HUGE_PAYLOAD], ids=["head", "payload"])
def test_an_agent_takes_no_gigabytes(unharmed: Emulation, encrypted: bool, announcement: bytes) -> None:
    for _ in range(5):
        with dial(unharmed, encrypted) as sock:
            sock.sendall(announcement)
            receive_all(sock)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01garbage" * 9, b"\0" * 64, b"m"])
def test_an_agent_hangs_up_on_noise(unharmed: Emulation, noise: bytes) -> None:
    with dial(unharmed, encrypted=False) as sock:
        sock.sendall(noise)
        if noise == b"m":  # and then nothing: its time is limited
            sock.shutdown(socket.SHUT_WR)
        receive_all(sock)


def test_a_ticket_is_good_once_and_must_be_the_agents(fleet: Emulation) -> None:
    with Channel(dial(fleet, encrypted=True), "csd0") as control:
        token = control.call(GetTicket("volume"), Ticket, soon()).token
    with Channel(dial(fleet, encrypted=False), "csd0") as first:
        first.call(Attach(token), Ok, soon())
        for wrong in (token, secrets.token_bytes(32), b"", b"x" * 2000):
            with (
                Channel(dial(fleet, encrypted=False), "csd0") as second,
                pytest.raises(Refused, match="not valid") as caught,
            ):
                second.call(Attach(wrong), Ok, soon())
            assert caught.value.code == "ticket"
    with Channel(dial(fleet, encrypted=False), "csd0") as stranger, pytest.raises(ConnectionLost):
        stranger.call(Hello("test"), Welcome, soon())


def test_connections_without_a_word_do_not_shut_the_host_out(unharmed: Emulation) -> None:
    def greeted() -> bool:
        try:
            return hello(unharmed, "csd0", unharmed.fleet.identity).device == "csd0"
        except MillpondError:
            return False

    idle: list[socket.socket] = []
    try:
        for _ in range(3):
            idle += [dial(unharmed, encrypted=False) for _ in range(CONNECTIONS)]
            assert greeted()  # the oldest silent one has lost its place to the host
        assert unharmed.devices()["csd0"].state == "ready"  # the host keeps those that it has
        for sock in idle:
            receive_all(sock, 60)  # closed after ten seconds, or before
    finally:
        for sock in idle:
            sock.close()
    assert greeted()


def sightings(fleet: Emulation, device: str) -> int:
    with fleet.client() as client:
        return client.ledgers()[device].canaries["private"]


def test_the_gate_stops_private_text_in_a_public_file(
    unharmed: Emulation, apart: ForkServer, tmp_path: Path
) -> None:
    directory = unharmed.fleet.device_directory("csd2")
    leak = directory / "flash" / "public" / "leak.txt"
    leak.write_text("x" * 300_000 + CANARY + "y" * 1000)
    before = sightings(unharmed, "csd2")
    place, copy = tmp_path / "mnt", tmp_path / "copy"
    mounted = apart.run("millpond", "mount", "--fleet", unharmed.directory, "csd2", place)
    try:
        assert mounted.code == 0, mounted
        assert apart.run("cat", place / "public" / "README.txt").out.startswith("Anyone may read this")
        read = apart.run("sh", "-c", f"cat {place}/public/leak.txt > {copy}")
    finally:
        leak.unlink()
        apart.run("umount", "-l", place)
    assert read.code == 1
    assert "Input/output error" in read.err
    assert CANARY not in copy.read_text()
    assert sightings(unharmed, "csd2") > before
    assert "canary 'private' was about to leave" in (directory / "console.log").read_text()
    unharmed.wait_ready()

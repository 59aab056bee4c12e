# SPDX-License-Identifier: Apache-2.0
"""A device of the running daemon whose certificate is revoked or renewed; its agent is a TLS server here."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, MillpondError, RemoteError
from millpond.host.fleet import device as devices
from millpond.host.fleet import directory, provisioning, renewal, revocation
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.remote import certificate_renewal
from millpond.host.store.store import Store
from millpond.tunnel.datapath.stats import PacketStats
from millpond.wire import tls
from millpond.wire.channel import Channel
from millpond.wire.control_messages import CONTROL_PORT, GetLoad, Hello, Load, Welcome
from millpond.wire.messages import Message, Ok

from ..waiting import eventually

ANSWERS: dict[type[Message], Message] = {
    Hello: Welcome("csd0", "0", "boot", "machine", 1, 1, 1),
    GetLoad: Load(0.0, 1, 1, None, ()),
}


class Agent:
    """An agent that shows the identity in ``etc`` and answers greetings until ``close``."""

    def __init__(self, address: str, etc: Path) -> None:
        self._context = tls.CurrentContext(tls.Identity.in_directory(etc), server=True)
        self._server = socket.create_server((address, CONTROL_PORT))
        self._hosts = set[Channel]()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(MillpondError):
            secure = tls.accept(connection, self._context.get(), tls.HOST, Deadline.after(20))
            with Channel(secure, "host") as host:
                self._hosts.add(host)
                while True:
                    request = host.receive(NEVER).message
                    host.send(ANSWERS.get(type(request), Ok()), Deadline.after(20))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._threads[0].join(20)
        for host in list(self._hosts):
            host.shut_down()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@dataclass
class Endpoint:
    """A tunnel that is up until it is stopped."""

    alive: bool = True
    status: dict[str, Any] = field(default_factory=lambda: {"state": "up"})
    counts: tuple[PacketStats, PacketStats] = (PacketStats(), PacketStats())

    def stop(self) -> None:
        self.alive = False


@dataclass
class Rig:
    """The fleet, its device csd0, the tunnels that were started for it, and its agent."""

    fleet: Fleet
    device: Device
    tunnels: list[Endpoint]
    agent: Agent

    def wait(self, state: str, reason: str = "") -> None:
        """Wait for a state, and a part of its reason."""
        eventually(
            lambda: self.device.status.state == state and reason in self.device.status.reason,
            f"{state} ({reason}), not {self.device.status}",
        )


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A device that is ready. Its addresses are of the loopback, and of this process alone."""
    provisioning.create(tmp_path / "fleet", "farm", ("csd0",))
    toml = tmp_path / "fleet" / "fleet.toml"
    toml.write_text(toml.read_text().replace("10.77.", f"127.{1 + os.getpid() % 250}."))
    fleet = directory.read(tmp_path / "fleet")
    agent_toml = fleet.device_directory("csd0") / "etc" / "agent.toml"
    agent_toml.write_text(agent_toml.read_text().replace("10.77.", f"127.{1 + os.getpid() % 250}."))
    tunnels: list[Endpoint] = []

    def spawn(*_: object, **__: object) -> Endpoint:
        tunnels.append(Endpoint())
        return tunnels[-1]

    monkeypatch.setattr(devices, "spawn_endpoint", spawn)
    monkeypatch.setattr(devices, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(devices, "RETRY_INCOMPATIBLE_SECONDS", 0.02)
    store = Store(fleet.database)
    device = Device(fleet, fleet.config.device[0], store, None)  # type: ignore[arg-type]
    made = Rig(fleet, device, tunnels, Agent(fleet.addresses("csd0").device_ip, agent_toml.parent))
    device.start()
    try:
        made.wait("ready")
        yield made
    finally:
        device.stop()
        made.agent.close()
        store.close()


def soon() -> Deadline:
    return Deadline.after(20)


def test_a_revoked_device_is_cut_off_and_dialled_no_more(rig: Rig) -> None:
    open_one = rig.device.control(soon())
    open_one.call(Ok(), Ok, soon())
    renewal.revoke(rig.fleet, "csd0")
    with pytest.raises(RemoteError, match=r"^csd0: its certificate is revoked$"):
        rig.device.dial(22, soon())  # at once, also what needs no certificate
    with pytest.raises(ConnectionLost):
        open_one.call(Ok(), Ok, eventually_closed(open_one))
    rig.wait("revoked", "its certificate is revoked")
    assert [tunnel.alive for tunnel in rig.tunnels] == [False]
    with pytest.raises(RemoteError, match="its certificate is revoked"):
        rig.device.control(soon())
    assert not rig.device.wait_ready(Deadline.after(0.2))
    open_one.close()


def eventually_closed(channel: Channel) -> Deadline:
    """Return a deadline, once the other end, or the daemon, has shut the channel down."""

    def closed() -> bool:
        try:
            return not channel.sock.recv(1)
        except OSError:
            return True

    channel.sock.settimeout(20)
    eventually(closed, "closed")
    return soon()


def test_a_board_with_the_old_identity_is_refused_after_a_renewal(rig: Rig, tmp_path: Path) -> None:
    """Its name is that of a good device, and its certificate is of the fleet's authority."""
    own = rig.fleet.device_directory("csd0") / "etc"
    shutil.copytree(own, tmp_path / "stolen")
    certificate_renewal.renew(rig.fleet, "csd0")
    rig.wait("ready")
    rig.agent.close()
    rig.wait("absent")
    rig.agent = Agent(rig.fleet.addresses("csd0").device_ip, tmp_path / "stolen")
    rig.wait("refused", "certificate refused: certificate revoked")


def test_a_renewal_ends_connections_under_the_old_certificate(rig: Rig) -> None:
    open_one, shown = rig.device.control(soon()), serial(rig.device)
    certificate_renewal.renew(rig.fleet, "csd0")
    eventually_closed(open_one)
    open_one.close()
    rig.wait("ready")
    assert serial(rig.device) != shown
    assert serial(rig.device) == revocation.known_serials(rig.fleet, "csd0")[0]
    assert rig.tunnels[0].alive and len(rig.tunnels) == 1


def serial(device: Device) -> int:
    with device.control(soon()) as agent:
        return tls.peer_serial(agent.sock)  # type: ignore[arg-type]


def test_without_a_readable_list_no_device_is_connected(rig: Rig) -> None:
    renewal.revoke(rig.fleet, "csd0")
    good = rig.fleet.identity.revoked.read_bytes()
    rig.fleet.identity.revoked.write_text("nonsense\n")
    rig.wait("absent", "crl.pem: it is no list of revoked certificates")
    eventually(lambda: not any(tunnel.alive for tunnel in rig.tunnels), "no tunnel")
    with pytest.raises(MillpondError, match="it is no list"):
        rig.device.dial(22, soon())
    rig.fleet.identity.revoked.write_bytes(good)
    rig.wait("revoked")

# SPDX-License-Identifier: Apache-2.0
"""The states of a device, and the host's end of its tunnel when programs take its name, address or range."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LocalError
from millpond.host.fleet import device as devices
from millpond.host.fleet import directory, provisioning
from millpond.host.fleet.device import Device
from millpond.host.fleet.lifecycle import DeviceEvent, DeviceState, after
from millpond.host.store.store import Store
from millpond.tunnel.datapath.stats import PacketStats
from millpond.tunnel.endpoint.zygote_client import EndpointZygote
from millpond.tunnel.netdev.tun import Tun

from ..networks import in_namespace, ip
from ..waiting import eventually

ADDRESS, DEVICE = "10.77.0.1/30", "10.77.0.2"


def interface(name: str) -> None:
    ip("link", "add", name, "type", "veth", "peer", "name", f"peer-{name}"[:15])
    ip("link", "set", f"peer-{name}"[:15], "up")


@pytest.fixture
def device(tmp_path: Path) -> Device:
    provisioning.create(tmp_path / "fleet", "farm", ("csd0",))
    fleet = directory.read(tmp_path / "fleet")
    return Device(fleet, fleet.config.device[0], Store(fleet.database), cast(EndpointZygote, None))


def test_an_address_that_was_taken_away_is_put_back(device: Device) -> None:
    def body() -> None:
        interface("mp-csd0")
        assert device._mend_interface() == ""
        assert f"inet {ADDRESS}" in ip("addr", "show", "mp-csd0")
        ip("addr", "flush", "dev", "mp-csd0")
        ip("link", "set", "mp-csd0", "down")
        assert device._mend_interface() == ""
        assert "10.77.0.0/30 dev mp-csd0 proto kernel" in ip("route")

    in_namespace(body)


def test_another_interface_with_the_range_is_named(device: Device) -> None:
    def body() -> None:
        for name in ("mp-csd0", "vpn0"):
            interface(name)
            ip("link", "set", name, "up")
        ip("route", "add", "10.0.0.0/8", "dev", "vpn0", "table", "52")
        ip("rule", "add", "pref", "5270", "lookup", "52")
        assert f"what is sent to {DEVICE} leaves by vpn0" in device._mend_interface()
        ip("rule", "del", "pref", "5270")
        assert device._mend_interface() == ""

    in_namespace(body)


def test_a_call_to_an_absent_device_says_what_is_waited_for(device: Device) -> None:
    def body() -> None:
        with pytest.raises(ConnectionLost) as caught:
            device.dial(22, Deadline.after(5))
        assert str(caught.value) == "csd0: Network is unreachable; it is absent: not seen yet"

    in_namespace(body)


def test_a_name_that_is_taken_is_no_riddle() -> None:
    def body() -> None:
        interface("mp-csd0")
        with pytest.raises(LocalError, match="interface mp-csd0 cannot be made: another program has one of"):
            Tun("mp-csd0", 12, Deadline.after(0))

    in_namespace(body)


@dataclass
class Endpoint:
    """An endpoint whose process has ended, or whose tunnel is up."""

    state: str
    reason: str = ""
    brings: int = 0
    ended: bool = False

    @property
    def alive(self) -> bool:
        return self.state == "up" and not self.ended

    @property
    def counts(self) -> tuple[PacketStats, PacketStats]:
        self.packets += self.brings
        return PacketStats(), PacketStats(self.packets)

    @property
    def status(self) -> dict[str, Any]:
        return {"state": self.state, "reason": self.reason}

    packets: int = 0

    def stop(self) -> None:
        self.ended = True


def silent_agent(
    device: Device, monkeypatch: pytest.MonkeyPatch, brings: list[int]
) -> list[tuple[float, Endpoint]]:
    """Make the device's tunnels come up, each with so many packets at a look as ``brings`` says, the last
    figure for all further ones; its agent never answers. Returns the tunnels, and when each was made.
    """
    spawned = list[tuple[float, Endpoint]]()

    def spawn_up(*_: object, **__: object) -> Endpoint:
        end = Endpoint("up", brings=brings[min(len(spawned), len(brings) - 1)])
        spawned.append((time.monotonic(), end))
        return end

    def no_control(deadline: Deadline) -> None:
        raise ConnectionLost("no answer")

    monkeypatch.setattr(devices, "spawn_endpoint", spawn_up)
    monkeypatch.setattr(device, "control", no_control)
    return spawned


def test_what_ended_a_tunnel_stays_the_reason_and_is_told_once(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons, spawned = itertools.chain(3 * ["its name is taken"], itertools.repeat("another")), []

    def spawn_ended(*_: object, **__: object) -> Endpoint:
        spawned.append(Endpoint("down", next(reasons)))
        return spawned[-1]

    monkeypatch.setattr(devices, "spawn_endpoint", spawn_ended)
    monkeypatch.setattr(devices, "RETRY_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    device.start()
    try:
        eventually(lambda: len(spawned) > 6, "it is tried again and again")
        assert device.status.reason == "the tunnel cannot go on: another"
    finally:
        device.stop()
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"csd0 is absent: the tunnel cannot go on: {why}" for why in ("its name is taken", "another")
    ]


@pytest.mark.expected_log("is up and brings nothing: it is made anew")
def test_a_tunnel_that_is_up_and_brings_nothing_is_made_anew(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned = silent_agent(device, monkeypatch, [0, 0, 1])
    monkeypatch.setattr(devices, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(devices, "STALLED_SECONDS", 0.05)
    device.start()
    try:
        eventually(lambda: len(spawned) == 3 and spawned[-1][1].packets > 30, "the third one goes on")
        assert [end.ended for _, end in spawned] == [True, True, False]
    finally:
        device.stop()


@pytest.mark.expected_log("is up and brings nothing: it is made anew")
def test_a_device_that_never_sends_anything_is_tried_less_and_less_and_told_once(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spawned = silent_agent(device, monkeypatch, [*5 * [0], 1, 0])
    monkeypatch.setattr(devices, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(devices, "STALLED_SECONDS", 0.02)
    device.start()
    try:
        eventually(lambda: len(spawned) == 6 and spawned[-1][1].packets > 3, "the sixth goes on")
        assert len(caplog.records) == 1
        spawned[-1][1].brings = 0
        eventually(lambda: len(caplog.records) == 2, "what stalls after that is told")
    finally:
        device.stop()
    waits = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(spawned[:6])]
    assert all(wait >= 0.02 * 2**number for number, wait in enumerate(waits))


def test_an_agent_that_cannot_be_reached_is_told_once(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Deadline] = []

    def no_control(deadline: Deadline) -> None:
        tried.append(deadline)
        raise ConnectionLost("csd0: No route to host")

    monkeypatch.setattr(devices, "spawn_endpoint", lambda *_, **__: Endpoint("up"))
    monkeypatch.setattr(devices, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(device, "control", no_control)
    caplog.set_level(logging.INFO)
    device.start()
    try:
        eventually(lambda: len(tried) > 3, "it is tried again and again")
    finally:
        device.stop()
    assert [record.getMessage() for record in caplog.records] == ["csd0 is absent: No route to host"]


S, E = DeviceState, DeviceEvent
ANY = tuple(S)


def test_only_a_device_that_connects_or_has_recovered_becomes_ready() -> None:
    for state in set(ANY) - {S.CONNECTING, S.READY, S.FAULTY}:
        with pytest.raises(ValueError, match=f"{state}.*cannot see 'greeted'"):
            after(state, E.GREETED)

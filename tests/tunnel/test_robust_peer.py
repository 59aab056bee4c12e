# SPDX-License-Identifier: Apache-2.0
"""A peer that misbehaves at random loses its own link: the endpoint lives, rests and serves others."""

from __future__ import annotations

import json
import random
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from millpond.base.errors import ConnectionLost
from millpond.tunnel.ring.link_params import LinkParameters

from ..effort import scaled
from ..waiting import eventually
from .conftest import DEVICE_ADDRESS, HOST_ADDRESS, INTERFACE, Namespace, Pair
from .robust_random_peer import Mallory, cpu_seconds

SNIFFER = Path(__file__).with_name("robust_sniffer.py")
SECONDS, SESSION = scaled(2.0, 8.0), 0.5


def sniff(side: Namespace, source: str, destination: str) -> Any:
    """Watches what comes to the interface of ``side``."""
    sniffer = side.program(sys.executable, str(SNIFFER), INTERFACE, source, destination)
    sniffer.says("listening")
    return sniffer


def heard(sniffer: Any) -> dict[str, Any]:
    sniffer.process.send_signal(signal.SIGTERM)
    found: dict[str, Any] = json.loads(sniffer.result())
    return found


def exchange(pair: Pair, address: str = DEVICE_ADDRESS) -> None:
    """TCP crosses the tunnel both ways."""
    server = pair.device_side.traffic("serve", address, 1 << 20)
    server.says("listening")
    client = pair.host_side.traffic("exchange", address, 1 << 20)
    assert client.result() == server.result() == "1048576 intact"


@pytest.mark.parametrize("victim", ["device", "host"])
def test_an_end_outlives_random_mischief(pair: Pair, victim: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    side = pair.device_side if victim == "device" else pair.host_side
    peer, own = (HOST_ADDRESS, DEVICE_ADDRESS) if victim == "device" else (DEVICE_ADDRESS, HOST_ADDRESS)
    role = "host" if victim == "device" else "device"
    end = side.end(victim, pair.socket)
    end.wait_begun()
    sniffer = sniff(side, peer, own)
    mallory = Mallory(role, pair.socket, random.Random(seed), peer, own)
    began = time.monotonic()
    while time.monotonic() < began + SECONDS:
        mallory.session(SESSION)
    mallory.close()
    spent, lasted = cpu_seconds(end), time.monotonic() - began
    print(f"{mallory.links} links, {mallory.acts} acts, {spent:.2f} s of CPU in {lasted:.1f} s, {end.status}")
    assert end.process.poll() is None, end.errors
    eventually(lambda: end.status["state"] == "down", "its last link is given up")
    latest = max(status.get("generation", 0) for status in end.statuses)
    other = pair.host_side if victim == "device" else pair.device_side
    other.end(role, pair.socket).wait_up()
    end.wait_up(after=latest)
    exchange(pair)
    found = heard(sniffer)
    assert found["foreign"] == [] and found["seen"] > 20


class TinyPackets(LinkParameters):
    """An offer of an MTU that an interface with IPv6 addresses must not get."""

    def pack(self) -> bytes:
        record = bytearray(super().pack())
        struct.pack_into("<I", record, 16, 576)
        return bytes(record)


def test_an_end_keeps_its_ipv6_address_whatever_mtu_its_peer_wants(pair: Pair) -> None:
    device = pair.device_side.end("device", pair.socket, "--address", "fd00::1/127")
    device.wait_begun()
    mallory = Mallory("host", pair.socket, random.Random(0), "fd00::", "fd00::1")
    for own, happens in ((LinkParameters(mtu=1280), "the peer is gone"), (TinyPackets(), "MTU is 1280 to")):
        with mallory.join() as link, suppress(ConnectionLost):
            mallory.open(link, own)
            device.wait_up()
        device.wait_down(happens)
    host = pair.host_side.end("host", pair.socket, "--address", "fd00::/127")
    assert host.wait_up()["mtu"] == 65520
    exchange(pair, "fd00::1")


@pytest.mark.parametrize("victim", ["device", "host"])
def test_a_peer_that_names_the_last_generation_is_followed_by_others(pair: Pair, victim: str) -> None:
    side, other = (pair.device_side, pair.host_side)[:: 1 if victim == "device" else -1]
    role = "host" if victim == "device" else "device"
    end = side.end(victim, pair.socket)
    mallory = Mallory(role, pair.socket, random.Random(0), HOST_ADDRESS, DEVICE_ADDRESS)
    last = (1 << 62) - 1
    with mallory.join() as link:
        assert mallory.open(link, LinkParameters(generation=last)).generation == last
        assert end.wait_up(after=last - 1)["generation"] == last
    mallory.close()
    end.wait_down("the peer is gone")
    honest = other.end(role, pair.socket)
    honest.wait_up()
    assert end.wait_up()["generation"] == honest.status["generation"] == 1
    exchange(pair)

"""A peer that misbehaves at random costs itself the link: the end lives, rests and serves others."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import DEVICE_ADDRESS, HOST_ADDRESS, INTERFACE, Namespace, Pair
from .robust_mallory import Mallory, cpu_seconds

SNIFFER = Path(__file__).with_name("robust_sniffer.py")
SECONDS, SESSION = 8.0, 0.5


def sniff(side: Namespace, source: str, destination: str) -> Any:
    """Watches what comes to the interface of ``side``."""
    sniffer = side.program(sys.executable, str(SNIFFER), INTERFACE, source, destination)
    sniffer.says("listening")
    return sniffer


def heard(sniffer: Any) -> dict[str, Any]:
    sniffer.process.send_signal(signal.SIGTERM)
    found: dict[str, Any] = json.loads(sniffer.result())
    return found


def exchange(pair: Pair) -> None:
    """TCP crosses the tunnel both ways."""
    server = pair.device_side.traffic("serve", DEVICE_ADDRESS, 1 << 20)
    server.says("listening")
    client = pair.host_side.traffic("exchange", DEVICE_ADDRESS, 1 << 20)
    assert client.result().startswith("1048576 ") and server.result().startswith("1048576 ")


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("victim", ["device", "host"])
def test_an_end_outlives_random_mischief(pair: Pair, victim: str, turn: int) -> None:
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
    other = pair.host_side if victim == "device" else pair.device_side
    other.end(role, pair.socket).wait_up()
    end.wait_up(after=end.status.get("generation", 0) - 1)
    exchange(pair)
    found = heard(sniffer)
    assert found["foreign"] == [] and found["seen"] > 100

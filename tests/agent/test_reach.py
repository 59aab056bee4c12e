# SPDX-License-Identifier: Apache-2.0
"""Workers that cannot reach each other are told so at the start, with what is most likely in the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from millpond.launch.reach import unreachable, why_alone
from millpond.train.distributed.launch_messages import Launch

from .. import networks
from ..networks import ip

SILENT, PROHIBITED, NEAR = "10.91.0.9", "10.92.0.9", "127.0.0.1"
COMMANDS = """
link add v0 type veth peer name v1
addr add 10.91.0.1/24 dev v0
link set v0 up
link set v1 up
neigh add 10.91.0.9 lladdr 02:00:00:00:00:01 dev v0
route add prohibit 10.92.0.0/24
"""


def in_namespace(body: Callable[[], object]) -> object:
    """What ``body`` returns where packets for SILENT are lost, and those for PROHIBITED are refused."""
    reading, writing = os.pipe()

    def inside() -> None:
        for line in COMMANDS.strip().splitlines():
            ip(*line.split())
        os.write(writing, json.dumps(body()).encode())

    networks.in_namespace(inside)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        return json.load(pipe)


def launch(*names: tuple[str, str]) -> Launch:
    return Launch("a.py", (), {}, 1, 3, "10.91.0.1", 40000, "10.91.0.1", names=names)


def test_a_peer_that_refuses_a_connection_can_be_reached_and_a_silent_one_cannot() -> None:
    assert in_namespace(lambda: unreachable([NEAR], 10.0)) == []
    assert in_namespace(lambda: unreachable([NEAR, SILENT, PROHIBITED], 0.3)) == [PROHIBITED, SILENT]


def test_what_is_in_the_way_is_named() -> None:
    """Before: a launch hung for minutes where Docker, ufw or firewalld drop what the host forwards."""

    def body() -> list[str]:
        own, host = ("10.91.0.1", "csd1"), (NEAR, "host here")
        return [
            why_alone(launch(own, (NEAR, "csd0"), host), 10.0),
            why_alone(launch((SILENT, "csd0"), own, host), 0.3),
            why_alone(launch(own, (NEAR, "csd0"), (SILENT, "host here"), (PROHIBITED, "host here")), 0.3),
            why_alone(launch(), 10.0),
        ]

    reached, between, host, alone = in_namespace(body)  # type: ignore[misc]
    assert (reached, alone) == ("", "")
    assert between.startswith(f"csd0 at {SILENT} does not answer: does a firewall of the host (Docker,")
    assert host.startswith(f"host at {SILENT} does not answer")

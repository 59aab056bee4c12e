# SPDX-License-Identifier: Apache-2.0
"""What a daemon is told of the other hosts of a launch is checked before anything is opened to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millpond.base.errors import ConfigError, LocalError
from millpond.host.api.launch import JoinLaunch, LaunchPart, OtherHost
from millpond.host.fleet.addresses import MOST_NETWORKS, networks_of
from millpond.host.fleet.directory import DeviceConfig, Fleet, FleetConfig
from millpond.host.launch.joining import check_join
from millpond.host.launch.links import HostLinks

OWN, PEERS = "10.77.0.0/24", "10.77.0.0/16"
TOLD = LaunchPart((("10.77.0.1", "host"), ("10.77.0.2", "csd0")), ("10.77.0.0/30",), 40000, "", 0)
B = OtherHost("b", "192.0.2.2", ("10.77.1.0/30",), "", 5000)
C = OtherHost("c", "192.0.2.3", ("10.77.2.0/30",), "", 5000)
NAMES = (("10.77.1.2", "csd0.b"), ("10.77.2.2", "csd0.c"))
FIRST = JoinLaunch("a", "0" * 32, 0, 4, "10.77.0.1", 40000, NAMES, (B, C))
LAST = replace(FIRST, first=2, master_address="10.77.1.2", master_port=41000)


@pytest.mark.parametrize("joined", [FIRST, LAST])
def test_a_launch_that_can_be_is_joined(joined: JoinLaunch) -> None:
    check_join(joined, TOLD, OWN, PEERS)


@pytest.mark.parametrize(
    ("joined", "change", "words"),
    [
        (FIRST, {"master_port": 40001}, "not at the port that this host has chosen"),
        (FIRST, {"master_address": "10.77.0.2"}, "not at the port that this host has chosen"),
        (LAST, {"master_port": 22}, "the port 22, which is none of 7701 to 65534"),
        (LAST, {"master_port": 65535}, "which is none of"),
        (LAST, {"master_address": "192.0.2.1"}, "where no other worker is"),
        (LAST, {"first": 3}, "the first of 2 ranks of 4 is 3"),
        (FIRST, {"first": -1}, "the first of 2 ranks"),
        (FIRST, {"size": 5}, "of 5 is 0, with 2 others"),
        (FIRST, {"run": "../x"}, "no name of a run"),
        (FIRST, {"name": "a b"}, "'a b' is no name of a host"),
        (FIRST, {"name": "b"}, "two hosts have one name: b, b, c"),
        (FIRST, {"names": (NAMES[0], ("10.77.2.2", "x\n127.0.0.1 pypi.org"))}, "no name of a worker"),
        (FIRST, {"names": (NAMES[0], ("::1", "csd0.c"))}, "csd0.c has no address '::1'"),
        (FIRST, {"names": (NAMES[0], ("10.77.0.2", "csd0.c"))}, "in no network of its host"),
        (
            FIRST,
            {"others": (B, replace(C, networks=("10.77.1.0/29",)))},
            "b and c have devices in one network",
        ),
        (FIRST, {"others": (B, replace(C, port=70000))}, "c receives at no port 70000"),
        (FIRST, {"others": (B, replace(C, networks=("10.77.0.4/30",)))}, "in this fleet's network"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(joined: JoinLaunch, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_join(replace(joined, **change), TOLD, OWN, PEERS)


def test_a_host_with_more_devices_than_a_launch_takes_is_refused() -> None:
    """Before: the others were left out without a word."""
    many = [f"10.77.{1 + number // 64}.{number % 64 * 4}/30" for number in range(MOST_NETWORKS + 1)]
    with pytest.raises(ConfigError, match="b has 257 devices in the launch; 256 are possible"):
        networks_of("b", many, PEERS, OWN)


def test_links_without_a_key_are_not_plain_by_themselves(tmp_path: Path) -> None:
    config = FleetConfig("testing", network=OWN, peers=PEERS, device=(DeviceConfig("csd0"),))
    with pytest.raises(LocalError, match="no WireGuard, and the links are not to be plain"):
        HostLinks(Fleet(tmp_path, config)).to(FIRST, "csd0")

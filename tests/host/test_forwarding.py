# SPDX-License-Identifier: Apache-2.0
"""The rules that keep devices from each other, when other programs and other daemons change them."""

from __future__ import annotations

import ipaddress
import logging
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError
from millpond.host.fleet import forwarding
from millpond.host.fleet.addresses import PeerLink, networks_of
from millpond.host.fleet.directory import DeviceConfig, Fleet, FleetConfig, HostConfig
from millpond.host.fleet.forwarding import Forwarding, plain_link
from millpond.linux.netlink import rtnetlink

from .. import networks
from ..networks import ip

NAMES = ("csd0", "csd1")


def in_namespace(body: Callable[[], None]) -> None:
    """Run it in a network of its own, in which no interface goes away by itself."""

    def inside() -> None:
        forwarding.VANISH_SECONDS = 0.0
        body()

    networks.in_namespace(inside)


def fleet(folder: Path, devices: Sequence[str] = NAMES, peers: str = "") -> Fleet:
    folder.mkdir(exist_ok=True)
    named, host = tuple(map(DeviceConfig, devices)), HostConfig(firewall="off")
    config = FleetConfig("testing", peers=peers, device=named, host=host)
    return Fleet(folder, config)


def tunnels(*names: str) -> None:
    """Make interfaces with the names of tunnels."""
    for name in names:
        ip("link", "add", f"mp-{name}", "type", "veth", "peer", "name", f"peer-{name}")
        for end in ("mp", "peer"):
            ip("link", "set", f"{end}-{name}", "up")


def rules() -> list[str]:
    """The rules of tunnels, without their priorities."""
    return sorted(re.findall(r"iif (mp-.*?)\s*$", ip("rule"), re.MULTILINE))


def flags() -> list[str]:
    return [Path(f"/proc/sys/net/ipv4/conf/mp-{name}/forwarding").read_text().strip() for name in NAMES]


def test_a_second_daemon_leaves_the_rules_of_interfaces_that_it_has_not_made(tmp_path: Path) -> None:
    def body() -> None:
        first = Forwarding(fleet(tmp_path / "first"))
        tunnels("csd0")
        with first.between(["csd0"]):
            before = rules()
            second = Forwarding(fleet(tmp_path / "second", ("csd0", "csd9")))
            assert set(before) < set(rules())
            rtnetlink.set_forwarding("mp-csd0", on=True)  # as of a launch of the first one
            second.mend(["csd9"])
            assert Path("/proc/sys/net/ipv4/conf/mp-csd0/forwarding").read_text() == "1\n"
            second.close()
            assert rules() == before
        ip("link", "del", "mp-csd0")
        first.close()
        assert rules() == []

    in_namespace(body)


def test_rules_of_a_killed_daemon_are_replaced_once_its_tunnels_are_gone(tmp_path: Path) -> None:
    def body() -> None:
        tunnels(*NAMES)
        left = Forwarding(fleet(tmp_path)).between(NAMES)
        left.__enter__()
        assert len(rules()) == 4
        for name in NAMES:
            ip("link", "del", f"mp-{name}")
        Forwarding(fleet(tmp_path))
        assert [line.split()[-1] for line in rules()] == ["prohibit", "prohibit"]

    in_namespace(body)


def link(interface: str = "wire") -> PeerLink:
    """Make the link to another host, whose device is in 10.78.0.0/30."""
    ip("link", "add", interface, "type", "veth", "peer", "name", "its-end")
    ip("addr", "add", "192.0.2.1/24", "dev", interface)
    for end in (interface, "its-end"):
        ip("link", "set", end, "up")
    ip("addr", "add", "10.77.0.1/30", "dev", "mp-csd0")
    networks = networks_of("b", ("10.78.0.0/30",), "10.76.0.0/14", "10.77.0.0/16")
    return plain_link("b", "192.0.2.2", networks, ipaddress.IPv4Address("10.77.0.1"))


def settings() -> tuple[str, str, str]:
    """All rules, the tables of launches, and whether the link forwards."""
    flag = Path("/proc/sys/net/ipv4/conf/wire/forwarding").read_text().strip()
    routes = ip("-4", "route", "show", "table", "all").splitlines()
    mine = "\n".join(line for line in routes if f"table {forwarding._FIRST_TABLE}" in line)
    return ip("rule"), mine, flag


def test_a_link_to_another_host_is_open_for_a_launch_alone(tmp_path: Path) -> None:
    def body() -> None:
        guard = Forwarding(fleet(tmp_path))
        tunnels(*NAMES)
        peer, before = link(), settings()
        with guard.between(["csd0"], links=[peer]):
            opened, routes, flag = settings()
            assert "from 10.78.0.0/30 iif wire ipproto tcp dport 7701-65534 lookup" in opened
            assert re.search(r"^17701:.*iif wire prohibit", opened, re.MULTILINE)
            assert "10.78.0.0/30 via 192.0.2.2 dev wire" in routes and flag == "1"
            ip("rule", "del", "pref", "17701", "iif", "wire")
            guard.mend(NAMES)
            assert settings()[0] == opened
            with guard.between(["csd1"], links=[peer]):
                pass
            assert settings()[2] == "1"
        assert settings() == before
        guard.between(["csd0"], links=[peer]).__enter__()
        for name in NAMES:
            ip("link", "del", f"mp-{name}")
        Forwarding(fleet(tmp_path))  # after a daemon that was killed
        assert settings()[2] == "0" and "wire" not in settings()[0] and "iif lo" not in settings()[0]

    in_namespace(body)


def test_a_killed_daemons_way_to_another_host_is_not_taken_by_the_next_launch(tmp_path: Path) -> None:
    """Before: an encrypted launch went by the plain route of one before it."""

    def body() -> None:
        tunnels(*NAMES, "csd2")
        plain, other = link(), ipaddress.IPv4Address("10.78.0.2")
        first = Forwarding(fleet(tmp_path / "first"))
        first.between(["csd0"], links=[plain]).__enter__()
        ip("rule", "flush")  # the routes are left alone
        for priority, table in (("0", "local"), ("32766", "main"), ("32767", "default")):
            ip("rule", "add", "pref", priority, "lookup", table)
        encrypted = PeerLink("peer-csd1", None, plain.networks, plain.source)
        with first.between(["csd1"], links=[encrypted]):
            assert rtnetlink.next_hop(other) == ("peer-csd1", "")
        second = Forwarding(fleet(tmp_path / "first"))
        assert settings()[1] == "" and rtnetlink.routes(forwarding._TABLES) == []
        with second.between(["csd0"], links=[encrypted]):
            assert rtnetlink.next_hop(other) == ("peer-csd1", "")
            assert len(rtnetlink.routes(range(forwarding._FIRST_TABLE, forwarding._FIRST_TABLE + 1))) == 3

    in_namespace(body)


def test_what_goes_to_another_host_goes_by_the_link_or_nowhere(tmp_path: Path) -> None:
    """Before: it went by the default route, unencrypted, once the link was gone."""

    def body() -> None:
        tunnels(*NAMES, "csd2")
        peer, other = link(), ipaddress.IPv4Address("10.78.0.2")
        ip("route", "add", "default", "via", "192.0.2.254")
        assert rtnetlink.next_hop(other) == ("wire", "192.0.2.254")
        guard = Forwarding(fleet(tmp_path))
        with guard.between(["csd0"], links=[PeerLink("mp-csd2", None, peer.networks, peer.source)]):
            assert rtnetlink.next_hop(other) == ("mp-csd2", "")
            guard.add("csd1")  # a device more, during the launch
            assert rtnetlink.next_hop(other) == ("mp-csd2", "")
            ip("link", "del", "mp-csd2")
            assert rtnetlink.next_hop(other) == ("", "")
            ip("route", "flush", "table", str(forwarding._FIRST_TABLE))
            assert rtnetlink.next_hop(other) == ("", "")
        assert rtnetlink.next_hop(other) == ("wire", "192.0.2.254")

    in_namespace(body)


def test_a_socket_that_a_launch_has_left_sends_by_the_link_or_nowhere(tmp_path: Path) -> None:
    """Before: it sent again by the default route, unencrypted, from the end of the launch on."""

    def body() -> None:
        tunnels(*NAMES, "csd2")
        peer, before = link(), ip("rule")
        ip("route", "add", "default", "via", "192.0.2.254")
        guard = Forwarding(fleet(tmp_path, peers="10.76.0.0/14"))

        def way(to: str, source: str) -> str:
            asked = subprocess.run(["ip", "route", "get", to, "from", source], capture_output=True, text=True)
            return re.search(r" dev (\S+)", asked.stdout)[1] if not asked.returncode else asked.stderr

        with guard.between(["csd0"], links=[PeerLink("mp-csd2", None, peer.networks, peer.source)]):
            assert way("10.78.0.2", "10.77.0.1") == "mp-csd2"
            ip("rule", "del", "pref", str(forwarding._SOURCE))
            guard.mend(NAMES)
        assert "Permission denied" in way("10.78.0.2", "10.77.0.1")
        assert way("10.77.0.2", "10.77.0.1") == "mp-csd0"
        assert way("10.78.0.2", "192.0.2.1") == "wire"
        for name in NAMES:
            ip("link", "del", f"mp-{name}")
        guard.close()
        assert ip("rule") == before

    in_namespace(body)


def test_a_daemon_that_starts_leaves_the_links_of_other_fleets(tmp_path: Path) -> None:
    def body() -> None:
        tunnels(*NAMES)
        peer, guard = link(), Forwarding(fleet(tmp_path / "first"))
        with guard.between(["csd0"], links=[peer]):
            before = settings()
            elsewhere = FleetConfig("testing", network="10.79.0.0/16", host=HostConfig(firewall="off"))
            other = Forwarding(Fleet(tmp_path / "first", elsewhere))
            assert settings() == before
            other.close()

    in_namespace(body)


def test_a_link_of_a_router_stays_as_it_is(tmp_path: Path) -> None:
    def body() -> None:
        guard = Forwarding(fleet(tmp_path))
        tunnels(*NAMES)
        peer = link()
        rtnetlink.set_forwarding("wire", on=True)
        with guard.between(["csd0"], links=[peer]):
            assert "iif wire prohibit" not in settings()[0]
        assert settings()[2] == "1"

    in_namespace(body)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("10.77.0.4/30", "which is in this fleet's network 10.77.0.0/16"),
        ("10.80.0.0/30", "which is not in this fleet's 'peers', 10.76.0.0/14"),
        ("10.78.0.1/30", "has host bits set"),
    ],
)
def test_networks_of_another_host_are_of_its_own(network: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        networks_of("b", (network,), "10.76.0.0/14", "10.77.0.0/16")


def test_what_another_program_takes_away_is_put_back_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body() -> None:
        guard = Forwarding(fleet(tmp_path))
        tunnels(*NAMES, "csd2")
        with guard.between(NAMES):
            before = rules(), flags(), ip("-4", "route", "show", "table", "all")
            assert before[1] == ["1", "1"]
            ip("rule", "flush")  # as systemd-networkd does, which puts those of the kernel back
            for priority, table in (("32766", "main"), ("32767", "default")):
                ip("rule", "add", "pref", priority, "lookup", table)
            ip("route", "flush", "table", str(forwarding._FIRST_TABLE))
            guard.mend(NAMES)
            assert (rules(), flags(), ip("-4", "route", "show", "table", "all")) == before
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # which sets the flag of each interface
        assert flags() == ["1", "1"]
        for _ in range(2):
            guard.mend(NAMES)
        assert flags() == ["0", "0"]
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert told[1:] == ["another program had deleted routing rules of mp-csd0, mp-csd1: they are back"]

    in_namespace(body)

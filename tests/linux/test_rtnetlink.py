# SPDX-License-Identifier: Apache-2.0
"""Forwarding, rules and routes of a network namespace, as the kernel shows them afterwards."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from millpond.linux.child import in_child, leave_out_local_address
from millpond.linux.confinement.sandbox import Sandbox, exit_code, spawn
from millpond.linux.netlink import rtnetlink

from ..networks import in_namespace

NETWORK = ipaddress.IPv4Network("10.77.0.0/30")
TABLE = 7_700_000


def why_not() -> str:
    """Why this machine cannot be tested on, if it cannot."""
    if shutil.which("ip") is None:
        return "there is no 'ip' to ask"

    def probe() -> int:
        return subprocess.run(["ip", "rule"], capture_output=True, check=False).returncode

    try:
        return (
            ""
            if exit_code(os.waitpid(spawn(Sandbox(own_network=True), probe), 0)[1]) == 0
            else "no namespaces"
        )
    except OSError as error:
        return str(error)


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False).stdout


def test_an_interface_forwards_or_not() -> None:
    def body() -> None:
        setting = Path("/proc/sys/net/ipv4/conf/lo/forwarding")
        everything = Path("/proc/sys/net/ipv4/conf/all/forwarding").read_text()
        for on in (True, False, True):
            rtnetlink.set_forwarding("lo", on=on)
            assert setting.read_text().strip() == str(int(on))
        assert Path("/proc/sys/net/ipv4/conf/all/forwarding").read_text() == everything
        with pytest.raises(OSError):
            rtnetlink.set_forwarding("none", on=True)

    in_namespace(body)


def test_rules_are_added_and_deleted_by_interface_and_priority() -> None:
    def body() -> None:
        before = ip("rule")
        for interface in ("mp-a", "mp-b"):
            for is_new in (True, False):
                assert rtnetlink.allow_tcp(interface, 17700, range(7701, 65535), TABLE) is is_new
                assert rtnetlink.prohibit(interface, 17701) is is_new
        rules = ip("rule")
        assert f"17700:\tfrom all iif mp-a [detached] ipproto tcp dport 7701-65534 lookup {TABLE}" in rules
        assert "17701:\tfrom all iif mp-a [detached] prohibit" in rules
        found = rtnetlink.rules(range(17700, 17702))
        assert sorted(found) == [(name, number) for name in ("mp-a", "mp-b") for number in (17700, 17701)]
        assert rtnetlink.rules(range(17701, 17702)) == [("mp-a", 17701), ("mp-b", 17701)]
        rtnetlink.delete_rules("mp-a", 17700)
        rules = ip("rule")
        assert "iif mp-a [detached] ipproto tcp" not in rules
        assert "iif mp-a [detached] prohibit" in rules and "iif mp-b [detached] ipproto tcp" in rules
        for interface in ("mp-a", "mp-b"):
            rtnetlink.delete_rules(interface, 17700)
            rtnetlink.delete_rules(interface, 17701)
        assert ip("rule") == before

    in_namespace(body)


def test_routes_of_a_table_are_added_and_deleted() -> None:
    def body() -> None:
        assert rtnetlink.add_route(NETWORK, "lo", TABLE)
        assert f"{NETWORK} dev lo" in ip("route", "show", "table", str(TABLE))
        assert not rtnetlink.add_route(NETWORK, "lo", TABLE)
        for _ in range(2):
            rtnetlink.delete_route(NETWORK, TABLE)
        assert not ip("route", "show", "table", str(TABLE))

    in_namespace(body)


def test_a_route_by_a_gateway_has_its_source_and_goes_for_what_this_machine_sends() -> None:
    def body() -> None:
        pair("wire")
        ip("addr", "add", "192.0.2.1/24", "dev", "wire")
        ip("addr", "add", "10.78.0.1/32", "dev", "lo")
        ip("link", "set", "wire", "up")
        gateway, source = ipaddress.IPv4Address("192.0.2.2"), ipaddress.IPv4Address("10.78.0.1")
        before = ip("rule")
        assert rtnetlink.add_route(NETWORK, "wire", TABLE, gateway, source)
        assert not ip("route", "get", "10.77.0.2")
        assert rtnetlink.use_table("lo", 17700, TABLE) and not rtnetlink.use_table("lo", 17700, TABLE)
        assert "via 192.0.2.2 dev wire table 7700000 src 10.78.0.1" in ip("route", "get", "10.77.0.2")
        assert rtnetlink.next_hop(ipaddress.IPv4Address("10.77.0.2")) == ("wire", "192.0.2.2")
        assert rtnetlink.next_hop(gateway) == ("wire", "")
        assert rtnetlink.allow_tcp("wire", 17700, range(7701, 65535), TABLE, NETWORK)
        assert f"from {NETWORK} iif wire ipproto tcp dport 7701-65534 lookup {TABLE}" in ip("rule")
        for interface in ("lo", "wire"):
            rtnetlink.delete_rules(interface, 17700)
        rtnetlink.delete_route(NETWORK, TABLE)
        assert ip("rule") == before and not ip("route", "show", "table", str(TABLE))

    in_namespace(body)


def pair(name: str) -> None:
    """Make an interface whose carrier is up."""
    ip("link", "add", name, "type", "veth", "peer", "name", f"{name}-peer")
    ip("link", "set", f"{name}-peer", "up")


def test_an_address_is_added_where_it_is_missing() -> None:
    def body() -> None:
        pair("mp-a")
        address = ipaddress.IPv4Interface("10.77.0.1/30")
        for is_new in (True, False):
            assert rtnetlink.add_address("mp-a", address) is is_new
            rtnetlink.set_up("mp-a")
        assert "inet 10.77.0.1/30" in ip("addr", "show", "mp-a") and "UP" in ip("link", "show", "mp-a")
        assert f"{NETWORK} dev mp-a" in ip("route")

    in_namespace(body)


def test_the_way_to_an_address_is_that_of_the_kernel() -> None:
    def body() -> None:
        address = ipaddress.IPv4Address("10.77.0.2")
        assert rtnetlink.outgoing(address) == ""
        for name in ("mp-a", "vpn"):
            pair(name)
            ip("link", "set", name, "up")
        ip("route", "add", "10.0.0.0/8", "dev", "vpn")
        assert rtnetlink.outgoing(address) == "vpn"
        ip("route", "add", str(NETWORK), "dev", "mp-a")
        assert rtnetlink.outgoing(address) == "mp-a"
        ip("rule", "add", "pref", "5", "to", str(NETWORK), "prohibit")
        assert rtnetlink.outgoing(address) == ""

    in_namespace(body)


@pytest.mark.parametrize("mtu", [1500, 1000])
def test_an_interface_without_ipv6_needs_no_local_address_left_out(mtu: int) -> None:
    def body() -> None:
        pair("mp-a")
        ip("link", "set", "mp-a", "mtu", str(mtu))  # one below 1280 has no IPv6

        def work(netlink: Any) -> None:
            (index,) = netlink.link_lookup(ifname="mp-a")
            leave_out_local_address(netlink, index)

        assert in_child(work) == ""
        ip("link", "set", "mp-a", "up")
        assert "inet6" not in ip("addr", "show", "mp-a")

    in_namespace(body)

# SPDX-License-Identifier: Apache-2.0
"""Pure: checks of what a host is told of the other hosts of a launch, before it opens anything to them.

The text comes from the command, and through it from the other hosts' daemons.
"""

from __future__ import annotations

import ipaddress
import re
from itertools import combinations

from millpond.base.errors import ConfigError
from millpond.host.api.launch import JoinLaunch, LaunchPart
from millpond.host.fleet.addresses import PORTS, networks_of

_RUN = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WORKER = re.compile(r"[A-Za-z0-9_.-]{1,160}")
_PORTS_OF_UDP = range(1 << 16)


def check_join(joined: JoinLaunch, told: LaunchPart, own: str, peers: str) -> None:
    """Check a launch over several hosts against the part that this host has ``told``, whose fleet has the
    network ``own`` in ``peers``. Raises ConfigError.
    """
    if fault := _fault_of_ranks(joined, told) or _fault_of_names(joined):
        raise ConfigError(f"the launch over several hosts: {fault}")
    networks = {other.name: networks_of(other.name, other.networks, peers, own) for other in joined.others}
    for one, two in combinations(networks, 2):
        if any(mine.overlaps(theirs) for mine in networks[one] for theirs in networks[two]):
            raise ConfigError(f"{one} and {two} have devices in one network: each fleet needs one of its own")
    known = [network for each in networks.values() for network in each]
    for address, name in joined.names:
        if not any(ipaddress.IPv4Address(address) in network for network in known):
            raise ConfigError(f"{name} has the address {address}, which is in no network of its host")


def _fault_of_ranks(joined: JoinLaunch, told: LaunchPart) -> str:
    """Return what is wrong with the ranks, and with where they meet; "" if nothing is."""
    here = len(told.workers)
    if joined.size != here + len(joined.names) or not 0 <= joined.first <= joined.size - here:
        return (
            f"the first of {here} ranks of {joined.size} is {joined.first}, with {len(joined.names)} others"
        )
    if joined.master_port not in PORTS:
        return f"all are to meet at the port {joined.master_port}, which is none of {PORTS[0]} to {PORTS[-1]}"
    place = (joined.master_address, joined.master_port)
    if not joined.first and place != (told.workers[0][0], told.port):
        return f"all are to meet at {place[0]}:{place[1]} here, not at the port that this host has chosen"
    if joined.first and joined.master_address not in dict(joined.names):
        return f"all are to meet at {joined.master_address}, where no other worker is"
    return ""


def _fault_of_names(joined: JoinLaunch) -> str:
    """Return what is wrong with names, addresses and ports of links; "" if nothing is."""
    hosts = [other.name for other in joined.others]
    if not _RUN.fullmatch(joined.run):
        return f"{joined.run!r} is no name of a run"
    for text in (joined.name, *hosts):
        if not _HOST.fullmatch(text):
            return f"{text!r} is no name of a host"
    if len({joined.name, *hosts}) != 1 + len(hosts):
        return f"two hosts have one name: {', '.join([joined.name, *hosts])}"
    for other in joined.others:
        if other.port not in _PORTS_OF_UDP:
            return f"{other.name} receives at no port {other.port}"
    for address, text in joined.names:
        if not _WORKER.fullmatch(text):
            return f"{text!r} is no name of a worker"
        if not _is_address(address):
            return f"{text} has no address {address!r}"
    return ""


def _is_address(text: str) -> bool:
    try:
        return str(ipaddress.IPv4Address(text)) == text
    except ValueError:
        return False

# SPDX-License-Identifier: Apache-2.0
"""Edge: parse the arguments of an endpoint and run one accordingly."""

from __future__ import annotations

import argparse
import ipaddress
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux.signals import stop_descriptor
from millpond.linux.syscalls import CAP_SYS_ADMIN
from millpond.tunnel.addresses import check_peers, peer_of
from millpond.tunnel.datapath.confinement import CONFINEMENTS, confine_endpoint
from millpond.tunnel.datapath.native import ENGINES
from millpond.tunnel.datapath.stats_shm import make_stats
from millpond.tunnel.endpoint.status import StatusWriter
from millpond.tunnel.endpoint.supervisor import Endpoint, EndpointConfig
from millpond.tunnel.errors import Orphaned
from millpond.tunnel.ring.link_params import ALL_OFFLOADS, DEFAULT_DEPTH, DEFAULT_MTU, LinkParameters
from millpond.tunnel.transports.base import Transport
from millpond.tunnel.transports.memfd import MemfdConnector, MemfdListener

log = logging.getLogger("millpond.tunnel")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the arguments. Raises SystemExit for wrong ones."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        _check(arguments)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """Run an endpoint until SIGTERM or SIGINT. Exit codes: 0 stopped, 1 it cannot work."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s millpond.tunnel {arguments.role} {arguments.interface}: %(message)s",
    )
    status = StatusWriter(arguments.status_fd)
    _confine(arguments)
    try:
        Endpoint(_config(arguments), _transport(arguments), status).run()
    except LocalError as error:
        if arguments.status_fd is None:
            log.error("%s", error)
        else:  # the process that started this one tells it, once
            with suppress(Orphaned):
                status.down(str(error))
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m millpond.tunnel", description="One endpoint of a tunnel."
    )
    parser.add_argument("role", choices=("host", "device"))
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--socket", type=Path, help="Unix socket that the device listens on")
    peer.add_argument(
        "--ivshmem",
        metavar="WHERE",
        help="the doorbell server's Unix socket; in a virtual machine the device's PCI address, or pci",
    )
    peer.add_argument(
        "--nvme", metavar="WHERE", help="the host's /dev/ngXnY, or auto for the one that is millpond's"
    )
    parser.add_argument("--interface", required=True, help="name of the TUN interface to make")
    parser.add_argument("--address", required=True, help="its address, such as 10.77.0.1/30")
    parser.add_argument("--peers", help="a network that the device may speak with, such as 10.77.0.0/16")
    parser.add_argument("--mtu", type=int, default=DEFAULT_MTU, help="the most bytes of a packet")
    parser.add_argument("--depth", type=int, default=DEFAULT_DEPTH, help="entries per queue")
    parser.add_argument(
        "--offload", choices=("all", "none"), default="all", help="segmentation and checksum offloads"
    )
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="what runs the pumps")
    parser.add_argument(
        "--confinement",
        choices=CONFINEMENTS,
        default="required",
        help="whether to run where the pumps cannot have a filter of system calls",
    )
    parser.add_argument("--name", default="", help="this endpoint's name in the peer's status")
    parser.add_argument("--status-fd", type=int, help="descriptor that gets a JSON line per change")
    parser.add_argument("--counters-fd", type=int, help="memory file that gets the counters")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """Check arguments that argparse cannot. Raises ValueError."""
    if not 0 < len(arguments.interface.encode()) < 16:
        raise ValueError(f"an interface name has 1 to 15 bytes, not {arguments.interface!r}")
    if arguments.nvme and arguments.role == "device":
        raise ValueError("--nvme is for a host; its device is a controller")
    address = ipaddress.ip_interface(arguments.address)
    peer_of(address)
    if arguments.peers:
        check_peers(address, ipaddress.ip_network(arguments.peers))
    _offer(arguments)


def _offer(arguments: argparse.Namespace) -> LinkParameters:
    """Return the parameters that this endpoint offers. Raises ValueError for values out of range."""
    offloads = ALL_OFFLOADS if arguments.offload == "all" else 0
    name = arguments.name or arguments.role
    return LinkParameters(mtu=arguments.mtu, depth=arguments.depth, offloads=offloads, name=name)


def _config(arguments: argparse.Namespace) -> EndpointConfig:
    return EndpointConfig(
        role=arguments.role,
        interface=arguments.interface,
        address=ipaddress.ip_interface(arguments.address),
        peers=ipaddress.ip_network(arguments.peers) if arguments.peers else None,
        offer=_offer(arguments),
        engine=arguments.engine,
        confinement=arguments.confinement,
        stop=stop_descriptor(),
        counters=make_stats() if arguments.counters_fd is None else arguments.counters_fd,
    )


def _transport(arguments: argparse.Namespace) -> Transport:
    """Make the transport that the arguments name. Raises LocalError where it cannot work.

    Each transport is imported only where it is used: an endpoint runs for long, and should hold no more code
    than it needs.
    """
    if arguments.nvme:
        from millpond.tunnel.transports.nvme.transport import passthrough_to

        return passthrough_to(arguments.nvme)
    if arguments.ivshmem:
        from millpond.tunnel.transports.ivshmem.transport import IvshmemTransport

        return IvshmemTransport(arguments.role, arguments.ivshmem, arguments.depth)
    path = arguments.socket.absolute()
    if arguments.role == "host":
        return MemfdConnector(path)
    return MemfdListener(path, arguments.depth)


def _confine(arguments: argparse.Namespace) -> None:
    """Drop the capabilities that the endpoint does not need; in a virtual machine it drives a PCI device and
    keeps all of them.
    """
    if arguments.nvme:
        confine_endpoint(CAP_SYS_ADMIN)
    elif arguments.socket or arguments.role == "host":
        confine_endpoint()

# SPDX-License-Identifier: Apache-2.0
"""Entry: run a device's NVMe/TCP target as a process of its own, ``PYTHONPATH=tests python -m nvmet``."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux.signals import stop_descriptor
from millpond.linux.syscalls import die_with_parent
from millpond.tunnel.addresses import peer_of
from millpond.tunnel.datapath.confinement import confine_endpoint
from millpond.tunnel.datapath.stats_shm import make_stats
from millpond.tunnel.endpoint.status import StatusWriter
from millpond.tunnel.errors import Orphaned
from millpond.tunnel.ring.link_params import DEFAULT_MTU, LinkParameters
from nvmet.backing import BackingFile
from nvmet.controller import Target
from nvmet.identify import TargetIdentity, default_nqn
from nvmet.interface import Interface
from nvmet.namespace import Namespace
from nvmet.server import TargetServer
from nvmet.stats import CommandStats
from nvmet.subsystem import Subsystem
from nvmet.vendor_commands import VendorCommands

log = logging.getLogger("nvmet")

_QUEUE_ENTRIES = 128
_IDLE_SECONDS = 10.0


def main(argv: list[str] | None = None) -> int:
    """Run the target. Exit codes: 0 stopped by SIGTERM or SIGINT, 1 it cannot work, 2 wrong arguments."""
    die_with_parent(signal.SIGKILL)
    parser = _parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s nvmet {arguments.interface}: %(message)s")
    try:
        own = _check(arguments)
    except ValueError as error:
        parser.error(str(error))
    status = StatusWriter(arguments.status_fd)
    try:
        with ExitStack() as undo:
            _serve(arguments, own, status, undo)
    except LocalError as error:
        log.error("%s", error)
        with suppress(Orphaned):
            status.down(str(error))
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nvmet", description="A device's NVMe/TCP target.")
    parser.add_argument(
        "--listen", required=True, help="address and port, such as 127.0.0.1:4420; port 0: any"
    )
    parser.add_argument("--backing", type=Path, required=True, help="file or block device of the namespace")
    parser.add_argument("--block-size", type=int, choices=(512, 4096), default=512, help="bytes of a block")
    parser.add_argument("--interface", required=True, help="name of the TUN interface to make")
    parser.add_argument("--address", required=True, help="its address, such as 10.77.0.2/30")
    parser.add_argument("--mtu", type=int, default=DEFAULT_MTU, help="the most bytes of a packet")
    parser.add_argument("--name", default="device", help="this endpoint's name in the host's status")
    parser.add_argument("--nqn", default="", help="name of the NVM subsystem; follows from --name")
    parser.add_argument("--queues", type=int, default=8, help="the most I/O queues")
    parser.add_argument(
        "--idle", type=float, default=_IDLE_SECONDS, help="the longest wait of a RECV, seconds"
    )
    parser.add_argument("--status-fd", type=int, help="descriptor that gets a JSON line per change")
    parser.add_argument("--counters-fd", type=int, help="memory file that gets the counters")
    return parser


def _check(arguments: argparse.Namespace) -> LinkParameters:
    """Check the arguments; returns the parameters that this endpoint offers. Raises ValueError."""
    if not 0 < len(arguments.interface.encode()) < 16:
        raise ValueError(f"an interface name has 1 to 15 bytes, not {arguments.interface!r}")
    if not 1 <= arguments.queues <= 64:
        raise ValueError(f"there are 1 to 64 I/O queues, not {arguments.queues}")
    if not 0.01 <= arguments.idle <= 25:
        raise ValueError("a RECV waits 0.01 to 25 s: Linux resets a drive that takes 30 s")
    peer_of(ipaddress.ip_interface(arguments.address))
    return LinkParameters(mtu=arguments.mtu, name=arguments.name)


def _serve(arguments: argparse.Namespace, own: LinkParameters, status: StatusWriter, undo: ExitStack) -> None:
    """Serve until stopped. Raises LocalError."""
    backing = BackingFile(arguments.backing, arguments.block_size)
    undo.callback(backing.close)
    listener = _listen(arguments.listen)
    undo.callback(listener.close)
    stats = CommandStats()
    interface = _make_interface(arguments, own, status, stats)
    undo.callback(interface.close)
    vendor = VendorCommands(own, interface, time.monotonic, arguments.idle, stats)
    identity = _identity(arguments, backing)
    target = Target(identity, Namespace(identity, backing, stats), vendor, arguments.queues)
    subsystem = Subsystem(target, time.monotonic)
    server = TargetServer(listener, subsystem, vendor, interface, stop_descriptor())
    undo.callback(server.close)
    confine_endpoint()
    where = "{}:{}".format(*listener.getsockname()[:2])
    status.down(f"waiting for a host at {where}", listen=where, nqn=identity.nqn)
    server.run()
    status.down("stopped", **interface.figures())


def _make_interface(
    arguments: argparse.Namespace, own: LinkParameters, status: StatusWriter, stats: CommandStats
) -> Interface:
    counters = make_stats() if arguments.counters_fd is None else arguments.counters_fd
    address = ipaddress.ip_interface(arguments.address)
    return Interface(
        arguments.interface, address, own, status, counters, lambda: {"opcodes": stats.figures()}
    )


def _identity(arguments: argparse.Namespace, backing: BackingFile) -> TargetIdentity:
    nqn = arguments.nqn or default_nqn(arguments.name)
    return TargetIdentity(nqn, backing.blocks, arguments.block_size, _QUEUE_ENTRIES)


def _listen(where: str) -> socket.socket:
    """Return a listening socket. Raises LocalError if the address cannot be used."""
    host, _, port = where.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=32)
    except (OSError, ValueError, OverflowError) as error:
        raise LocalError(f"cannot listen at {where}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())

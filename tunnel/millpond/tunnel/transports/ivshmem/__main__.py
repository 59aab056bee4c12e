# SPDX-License-Identifier: Apache-2.0
"""Entry: run the doorbell server, ``python -m millpond.tunnel.transports.ivshmem``; QEMU needs it at its
start.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux.signals import stop_descriptor
from millpond.linux.syscalls import die_with_parent, drop_capabilities, no_new_privileges
from millpond.tunnel.ring.link_params import DEFAULT_DEPTH
from millpond.tunnel.transports.ivshmem.doorbell_server import DoorbellServer, bar_size

log = logging.getLogger("millpond.tunnel.transports.ivshmem")


def main(argv: list[str] | None = None) -> int:
    """Run the server. Exit codes: 0 stopped by SIGTERM or SIGINT, 1 it cannot listen, 2 wrong arguments."""
    die_with_parent(signal.SIGKILL)
    parser = argparse.ArgumentParser(
        prog="python -m millpond.tunnel.transports.ivshmem",
        description="Memory and doorbells for QEMU's -device ivshmem-doorbell,vectors=3 and one endpoint.",
    )
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--depth", type=int, default=DEFAULT_DEPTH, help="entries per queue to have room for")
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s millpond.tunnel.transports.ivshmem: %(message)s"
    )
    try:
        size = bar_size(arguments.depth)
    except ValueError as error:
        parser.error(str(error))
    try:
        with DoorbellServer(arguments.socket.absolute(), arguments.depth) as server:
            no_new_privileges()
            drop_capabilities()
            log.info("listening at %s with %d MiB", arguments.socket, size >> 20)
            server.serve(stop_descriptor())
    except LocalError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Entry: a process that serves the data sets below a folder, ``python -m millpond.data.streaming FOLDER``."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import signal
import socket
import sys
from pathlib import Path

import torch

from millpond.base.errors import LocalError, MillpondError
from millpond.data.streaming.server import NO_TRANSFORMS, DataServer, ServiceSettings
from millpond.data.streaming.transforms.functions import functions_of, in_process


def main() -> int:
    """Serve until a signal ends it. Exit codes: 0 ended by a signal, 1 it cannot serve, 2 wrong usage."""
    logging.basicConfig(format="%(message)s")
    arguments = _arguments()
    torch.set_num_threads(1)  # chunks are read by several threads
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        settings = _settings(arguments)
        with _listening(arguments.listen, settings.secret) as sock, DataServer(sock, settings):
            host, port = sock.getsockname()[:2]
            print(f"{settings.root} is served on {host}:{port}", flush=True)
            signal.sigwait(signals)
    except (OSError, MillpondError) as error:
        print(f"millpond: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m millpond.data.streaming", description="Serve data sets.")
    parser.add_argument("folder", type=Path, help="its sub-folders are data sets")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="ADDRESS:PORT", help="127.0.0.1, any port")
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help="consumers have to know its content")
    parser.add_argument(
        "--transforms", type=Path, metavar="FILE.py", help="its functions of a sample, by name"
    )
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="where epochs outlive this process")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="for lost consumers: 10")
    parser.add_argument("--readers", type=int, default=4, metavar="N", help="threads that read: 4")
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> ServiceSettings:
    if not arguments.folder.is_dir():
        raise LocalError(f"there is no folder {arguments.folder}")
    if not (arguments.grace > 0 and arguments.readers > 0):
        raise LocalError("--grace and --readers are positive")
    secret = arguments.secret_file.read_text().strip() if arguments.secret_file else ""
    transforms = in_process(functions_of(arguments.transforms)) if arguments.transforms else NO_TRANSFORMS
    root, state = arguments.folder, arguments.state
    return ServiceSettings(root, secret, state, transforms, arguments.grace, arguments.readers)


def _listening(where: str, secret: str) -> socket.socket:
    """Return a listening socket. Raises OSError, and LocalError for one that others reach without secret."""
    host, _, port = where.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        number = int(port)
    except ValueError:
        raise LocalError(f"--listen {where}: an address and a port, such as 10.0.0.1:7001") from None
    if not secret and not address.is_loopback:
        raise LocalError(f"--listen {where}: other machines reach it, so it needs --secret-file")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    return socket.create_server((str(address), number), family=family, backlog=128)


if __name__ == "__main__":
    sys.exit(main())

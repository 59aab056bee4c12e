# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'metrics': a fleet's figures in Prometheus' format."""

from __future__ import annotations

import logging
import signal
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.cli.exits import ended_by_signals
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, new_app
from millpond.host.fleet import directory

app = new_app()
PORT = 9748


@app.command("metrics")
def command(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="Serve there; other hosts cannot reach loopback.")
    ] = f"127.0.0.1:{PORT}",
    jobs: Annotated[int, typer.Option(min=0, max=100, help="Show the figures of this many jobs.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once instead, and end.")] = False,
) -> None:
    """Serve the figures of fleet and jobs for Prometheus.

    They are of devices, tunnels, volumes and jobs. Ctrl-C ends it.
    The figures are at http://ADDRESS:PORT/metrics. A daemon that does not run is no error: millpond_up is 0
    until it answers. Anyone who reaches the address may read them.
    """
    from millpond.host.monitor.exporter import server  # needs prometheus_client
    from millpond.host.monitor.exporter.source import FleetSource

    address, port = _split(listen)
    directory.read(fleet_directory)
    logging.basicConfig(format="millpond: %(message)s")
    source = FleetSource(fleet_directory, shown=jobs)
    if once:
        print(server.text(source), end="")
        return
    with ended_by_signals():
        source.start()
        server.serve(source, address, port)
        print(f"serving http://{listen}/metrics; Ctrl-C ends it", flush=True)
        while True:
            signal.pause()


def _split(listen: str) -> tuple[str, int]:
    """Return the address and the port of a text. Raises LocalError."""
    address, colon, port = listen.rpartition(":")
    if not (colon and address and port.isdecimal() and int(port) < 1 << 16):
        raise LocalError(f"--listen {listen}: expected an address and a port, such as 127.0.0.1:{PORT}")
    return address.strip("[]"), int(port)

# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'dial-stdio', by which another host's command reaches this host's daemon over SSH."""

from __future__ import annotations

import sys

from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, new_app
from millpond.host.client.connection import connected
from millpond.host.fleet import directory
from millpond.host.remote.relay import relay

app = new_app()


@app.command("dial-stdio", hidden=True)
def dial_stdio(fleet_directory: FleetOption = DEFAULT_FLEET) -> None:
    """Relay the standard streams to and from the host daemon."""
    with connected(directory.read(fleet_directory)) as connection:
        relay(connection, sys.stdin.fileno(), sys.stdout.fileno())

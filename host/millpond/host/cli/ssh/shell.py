# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'shell'."""

from __future__ import annotations

import sys

import typer

from millpond.base.text import printable
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    AdminOption,
    AuthorityOption,
    DeviceArgument,
    FleetOption,
    new_app,
)
from millpond.host.client.daemon_client import DaemonClient
from millpond.images.ondevice.sshd_config import ADMIN, USER

app = new_app()


@app.command()
def shell(
    device: DeviceArgument,
    admin: AdminOption = False,
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
) -> None:
    """Open a shell on a device over SSH."""
    from millpond.host.remote import ssh

    server = ADMIN if admin else USER
    with (
        DaemonClient(fleet_directory, authority) as client,
        client.dial(device, server.port) as sock,
        ssh.connected(client.fleet, device, sock, server) as transport,
    ):
        if sys.stdin.isatty():  # its prompt may be a bare $
            print(f"millpond: a shell on {printable(device)}; 'exit' ends it", file=sys.stderr)
        raise typer.Exit(ssh.shell(transport))

# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'ssh-config', and the command that OpenSSH runs to connect, 'ssh-proxy'."""

from __future__ import annotations

import socket
import sys
from typing import Annotated

import typer

from millpond.base.text import printable
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    AdminOption,
    AuthorityOption,
    DeviceArgument,
    FleetOption,
    complete_device_sets,
    new_app,
)
from millpond.host.cli.ssh.access import access_of
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import directory
from millpond.linux import sockets

app = new_app()
RelayOption = Annotated[
    bool,
    typer.Option(
        "--relay", help="Configure clients other than OpenSSH, which cannot take over an open connection."
    ),
]


@app.command("ssh-config")
def ssh_config(
    devices: Annotated[
        str,
        typer.Argument(
            metavar="DEVICES",
            help="The devices; without them, all.",
            show_default=False,
            autocompletion=complete_device_sets,
        ),
    ] = "@all",
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Begin the names of hosts with this text.")
    ] = "",
    relay: RelayOption = False,
    admin: AdminOption = False,
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
) -> None:
    """Print a configuration of OpenSSH that names the devices.

    With it ssh, scp, sftp, rsync and editors reach devices by name.

    millpond ssh-config > ~/.ssh/millpond; then 'ssh -F ~/.ssh/millpond csd0', or once for all programs the
    line 'Include millpond' at the top of ~/.ssh/config: 'ssh csd0', 'scp FILE csd0:public/',
    'rsync -a DIR csd0:public/', 'ssh -L 8888:localhost:8888 csd0'.
    """
    from millpond.host.remote import ssh_access

    fleet = directory.read(fleet_directory, authority)
    names = fleet.named(devices)
    access = access_of(fleet, admin=admin, passes=not relay)
    print(f"# The devices of the fleet '{printable(fleet.config.name)}', by 'millpond ssh-config'")
    print(ssh_access.ssh_config(access, names, prefix), end="")


@app.command("ssh-proxy", hidden=True)
def ssh_proxy(
    device: DeviceArgument,
    port: Annotated[int, typer.Argument(metavar="PORT", min=1, max=65535)],
    passes: Annotated[bool, typer.Option("--pass", help="Pass the connection to OpenSSH.")] = False,
    fleet_directory: FleetOption = DEFAULT_FLEET,
) -> None:
    """Connect to a port of a device, as an SSH ProxyCommand."""
    from millpond.host.remote.relay import relay

    with DaemonClient(fleet_directory) as client, client.dial(device, port) as connection:
        if passes:
            with socket.socket(fileno=sys.stdout.fileno()) as client_end:
                sockets.send_descriptors(client_end, [connection.fileno()])
                client_end.detach()
        else:
            relay(connection, sys.stdin.fileno(), sys.stdout.fileno())

# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'inventory'."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.host.cli.options import DEFAULT_FLEET, AdminOption, AuthorityOption, FleetOption, new_app
from millpond.host.cli.ssh.access import access_of
from millpond.host.fleet import directory
from millpond.host.records import device_set
from millpond.host.terminal import printing

app = new_app()


@app.command()
def inventory(
    _list: Annotated[
        bool, typer.Option("--list", help="Print the whole inventory, as without options.")
    ] = False,
    host: Annotated[str, typer.Option(metavar="DEVICE", help="Print the variables of one device.")] = "",
    admin: AdminOption = False,
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
) -> None:
    """Print the fleet as Ansible's dynamic inventory, as JSON. Groups are boards, and groups of fleet.toml.

    Ansible runs an inventory that is a program: write '#!/bin/sh' and 'exec millpond inventory "$@"' to
    an executable file, and try 'ansible -i ./FILE millpond -m raw -a uptime'.
    """
    from millpond.host.remote import ssh_access

    fleet = directory.read(fleet_directory, authority)
    access = access_of(fleet, admin=admin, passes=True)
    if host:
        printing.print_json(ssh_access.host_variables(access, fleet.device(host)))
        return
    known = {device.name for device in fleet.config.device}
    groups = {
        name: [each for each in device_set.members(text) if each in known]
        for name, text in fleet.config.groups.items()
    }
    printing.print_json(ssh_access.inventory(access, fleet.config.device, groups))

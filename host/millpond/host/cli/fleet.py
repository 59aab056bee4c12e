# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands that change the fleet: 'init', 'add', 'remove', 'revoke' and 'renew'."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import ConnectionLost, LocalError, RemoteError
from millpond.base.text import duration
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    AuthorityOption,
    DeviceArgument,
    FleetOption,
    FormatOption,
    new_app,
)
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import directory
from millpond.host.fleet.directory import DeviceConfig
from millpond.host.terminal.printing import Format, show
from millpond.host.terminal.progress_lines import each_told, waiting
from millpond.images.boards import EMULATED

app = new_app()
REFUSAL_SECONDS = 20.0
"""How long a daemon may take to refuse a device, beside the longest silence of its agent."""


@app.command()
def init(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    devices: Annotated[
        int, typer.Option(min=0, max=99, help="The number of emulated devices; 0 for a fleet of boards.")
    ] = 3,
    name: Annotated[str, typer.Option(help="The fleet's name.")] = "fleet",
    lan: Annotated[
        bool, typer.Option("--lan", help="Connect the devices by a network (LAN) of their own.")
    ] = False,
    network: Annotated[
        str, typer.Option(help="The network of the tunnels; several hosts need one each.")
    ] = directory.NETWORK,
    peers: Annotated[
        str, typer.Option(help="The network of all hosts' tunnels, for 'millpond launch --hosts'.")
    ] = "",
    authority: AuthorityOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Create a fleet: its authority, SSH keys and emulated devices. 'millpond add' adds boards."""
    from millpond.host.fleet import provisioning

    names = [f"csd{number}" for number in range(devices)]
    told = functools.partial(each_told, "init", noun="device", shows=output is Format.TEXT)
    made = provisioning.create(
        fleet_directory, name, names, lan=lan, keys=authority, network=network, peers=peers, told=told
    )
    document = {"fleet": str(made.directory), "name": name, "devices": names}
    show(output, document, f"fleet '{name}' with {', '.join(names) or 'no device'} is in {made.directory}")


@app.command()
def add(
    device: DeviceArgument,
    board: Annotated[
        str,
        typer.Option(help="The kind of board. Then write the board's disk with 'millpond flash --device'."),
    ],
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Add a device to the fleet, and create its identity. A running host daemon uses the device at once."""
    from millpond.host.fleet import provisioning

    provisioning.add(directory.read(fleet_directory, authority), DeviceConfig(device, board=board))
    with waiting(device, "the host daemon takes it", shows=output is Format.TEXT):
        taken = _taken_by_daemon(fleet_directory, device)
    state = "and the host daemon has it" if taken else "and the next host daemon has it: none runs now"
    way = f"; 'millpond flash --device {device}' writes its disk" if board != EMULATED else ""
    text = f"{device} ({board}) is in the fleet, {state}{way}"
    show(output, {"device": device, "board": board, "daemon": taken}, text)


def _taken_by_daemon(fleet: Path, device: str) -> bool:
    """Return whether a daemon runs and has the device now. Raises RemoteError where it refuses."""
    try:
        client = DaemonClient(fleet)
    except LocalError:
        return False
    with client:
        client.add_device(device)
    return True


@app.command()
def remove(
    device: DeviceArgument,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Remove a device from the fleet and a running daemon. Fails while a job or launch uses the device."""
    from millpond.host.daemon import removal
    from millpond.host.fleet import provisioning, revocation

    found = directory.read(fleet_directory)
    text = provisioning.without(found, device)
    waits = waiting(device, "the host daemon forgets it", shows=output is Format.TEXT)
    with waits, removal.forgotten_by_daemon(found, device) as was_known:
        if not provisioning.remove(found, text, device) and not was_known:
            found.device(device)  # raises the error for a device that nothing is left of
    left = str(found.device_directory(device))
    lines = [
        f"{device} is no longer in the fleet. Left are:",
        f"  {left}: its identity and keys here, and of an emulated device its flash",
        "  on the device: its private data, agent.toml and keys, and what jobs kept there",
    ]
    if not revocation.is_revoked(found, device):
        lines.append(f"Its certificate stays good until 'millpond revoke {device}'")
    show(output, {"device": device, "left": left}, "\n".join(lines))


@app.command()
def revoke(
    device: DeviceArgument,
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Revoke a device's certificate, so that it is refused.

    The device may be removed already: the fleet refuses its board from then on.
    A running daemon closes its connections and its tunnel within seconds; this command waits for that.
    """
    from millpond.host.fleet import renewal  # imports cryptography, which takes long

    directory.check_name(device)
    found = directory.read(fleet_directory, authority)
    count = renewal.revoke(found, device)
    most = duration(found.config.silence + REFUSAL_SECONDS)
    with waiting(
        device, f"the host daemon closes its connections, at most {most}", shows=output is Format.TEXT
    ):
        taken = _wait_for_refusal(found, device)
    before = "" if count else ", and was before"
    is_member = any(one.name == device for one in found.config.device)
    unknown = ""
    if not is_member:
        unknown = f"\n{device} is not in the fleet any more: a board that has this certificate is refused"
    elif not taken:
        unknown = "\nno host daemon that runs knows the device: the next one refuses it"
    document = {"device": device, "revoked": count, "daemon": taken}
    show(output, document, f"the certificate of {device} is revoked{before}{unknown}")


def _wait_for_refusal(fleet: directory.Fleet, device: str) -> bool:
    """Wait until the daemon refuses a device; return False where none runs, or does not have it. Raises
    RemoteError for a daemon that does not.
    """
    try:
        client = DaemonClient(fleet.directory)
    except LocalError:
        return False
    end = time.monotonic() + fleet.config.silence + REFUSAL_SECONDS
    with client, contextlib.suppress(ConnectionLost):
        while (state := {one.name: one.state for one in client.devices()}.get(device)) != "revoked":
            if state is None:
                return False
            if time.monotonic() > end:
                raise RemoteError(
                    f"{device} is revoked, but the host daemon does not refuse it yet: restart the daemon"
                )
            time.sleep(0.1)
        return True
    return False


def _renewed(fleet: directory.Fleet, device: str, tell: Callable[[str], None]) -> str:
    from millpond.host.fleet import renewal
    from millpond.host.remote import certificate_renewal  # imports paramiko, which takes long

    if device != "host":
        return certificate_renewal.renew(fleet, device, tell)
    renewal.renew_host(fleet)
    return "in use"


@app.command()
def renew(
    device: DeviceArgument,
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Give a device a new certificate.

    The old one is revoked once the device shows the new one.
    A device whose certificate is revoked gets other keys, too; only 'flash --device' brings them to a board.
    With the name 'host' the command renews the host's own certificate.
    """
    found = directory.read(fleet_directory, authority)
    with waiting(device, "its certificate is made", shows=output is Format.TEXT) as tell:
        where = _renewed(found, device, tell)
    advice = {
        "in use": "",
        "at its start": "; it is used when the device is started",
        "to be flashed": f": write it to the board by 'millpond flash --device {device}'",
    }
    document = {"device": device, "certificate": where}
    show(output, document, f"{device} has a new certificate{advice[where]}")

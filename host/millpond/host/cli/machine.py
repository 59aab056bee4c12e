# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands of one machine: 'host', and 'emulate' and 'demo', which need no device."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.base.text import printable
from millpond.host.cli.exits import loading
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, new_app
from millpond.host.fleet import directory

app = new_app()


@app.command()
def host(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    group: Annotated[
        str, typer.Option(metavar="GROUP", help="Members of this group may use the daemon.")
    ] = "",
) -> None:
    """Run the host daemon in the foreground, as systemd does."""
    from millpond.host.daemon import main as daemon

    daemon.run(fleet_directory, group)


@app.command()
def emulate(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    group: Annotated[
        str, typer.Option(metavar="GROUP", help="Members of this group may use the daemon.")
    ] = "",
    qemu: Annotated[
        int, typer.Option(min=0, max=16, metavar="N", help="Add this many devices in QEMU: qemu0, qemu1, ...")
    ] = 0,
    image: Annotated[
        Path, typer.Option(metavar="IMAGE", help="The image for new devices in QEMU, built by 'make image'.")
    ] = Path(".image/qemu-virt"),
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND]", help="Run this command when all devices are ready, then end."),
    ] = None,
) -> None:
    """Run a host daemon and emulated devices until Ctrl-C.

    Create the fleet if there is none.
    """
    with loading():
        from millpond.host.emulation import machine, qemu_devices
        from millpond.host.fleet import provisioning

    if command and not shutil.which(command[0]):
        raise LocalError(f"'{printable(command[0])}' is no command: sh -c takes a line of them")
    if not (fleet_directory / "fleet.toml").exists():
        provisioning.create(fleet_directory, "emulated", [f"csd{number}" for number in range(3)])
    found = qemu_devices.ensure(directory.read(fleet_directory), qemu, image)
    said = ""
    if command is None:
        names = ", ".join(device.name for device in found.config.device)
        said = f"emulating {names}; try 'millpond devices --fleet {fleet_directory}'; Ctrl-C ends it"
    raise typer.Exit(machine.emulate(found, command, said, group=group))


@app.command("demo")
def demonstrate(
    place: Annotated[
        Path, typer.Option("--in", metavar="DIR", help="The directory for the demo's files.")
    ] = Path(".demo"),
    devices: Annotated[int, typer.Option(min=1, max=16, help="The number of emulated devices.")] = 3,
    rounds: Annotated[
        int,
        typer.Option(
            min=0,
            help="The greatest number of rounds, or of epochs of a synchronous job; 0: that of the job.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="The seed for dividing the data and for training.")] = 7,
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Train this job on the demo's digits, and score it by the demo's test data."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the fleet running until Ctrl-C, and print commands to try.")
    ] = False,
) -> None:
    """Emulate a fleet, and train on its data in about a minute."""
    with loading():
        from millpond.host.emulation.demo import prepare

    plan = prepare.DemoPlan(place.absolute(), devices, seed, rounds, job and job.absolute(), keep)
    raise typer.Exit(prepare.run(plan))


@app.command("demo-inside", hidden=True)
def demonstrate_inside(
    place: Path,
    seed: int,
    rounds: int,
    job: Annotated[Path | None, typer.Option()] = None,
    keep: bool = False,
) -> None:
    """Run the part of the demo that is inside the emulated machine."""
    from millpond.host.emulation.demo import prepare, steps

    raise typer.Exit(steps.run(prepare.DemoPlan(place, seed=seed, rounds=rounds, job=job, keep=keep)))

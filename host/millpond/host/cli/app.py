# SPDX-License-Identifier: Apache-2.0
"""Entry: the command line, ``millpond``.

A command imports what it alone needs itself: numpy, paramiko and the daemon take longer than most commands.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError, MillpondError, RemoteError
from millpond.base.schema import dump
from millpond.base.text import escaped, printable
from millpond.base.version import VERSION
from millpond.host.cli import flash, fleet_changes, jobs, launch, new, remote, sign, update
from millpond.host.cli.data import check as data_check
from millpond.host.cli.data import explain as data_explain
from millpond.host.cli.exits import (
    EXIT_CODES,
    FLEET_DIRECTORY,
    INTERRUPTED,
    LOCAL,
    REMOTE,
    SSH,
    exit_code,
    fail,
    run,
)
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    AuthorityOption,
    DeviceArgument,
    FleetOption,
    Format,
    FormatOption,
)
from millpond.host.client import DaemonClient
from millpond.host.fleet import directory
from millpond.host.remote.errors import SshFailed
from millpond.host.terminal import printing, tables

_LARGEST_ID = (1 << 32) - 2
app = typer.Typer(
    epilog=f"{FLEET_DIRECTORY}\n\n{EXIT_CODES}",
    no_args_is_help=True,
    rich_markup_mode=None,  # "[...]" is text
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"millpond {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """millpond trains on computational storage devices; private data never leaves its device."""


@app.command()
def init(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    devices: Annotated[int, typer.Option(min=1, max=99, help="How many emulated devices.")] = 3,
    name: Annotated[str, typer.Option(help="The fleet's name.")] = "fleet",
    lan: Annotated[bool, typer.Option("--lan", help="Devices with a network of their own.")] = False,
    authority: AuthorityOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Make a fleet: its certificate authority, SSH keys, and devices."""
    from millpond.host.fleet import provisioning

    names = [f"csd{number}" for number in range(devices)]
    made = provisioning.create(fleet_directory, name, names, lan=lan, keys=authority)
    if output is Format.JSON:
        printing.print_json({"fleet": str(made.directory), "name": name, "devices": names})
    else:
        print(f"fleet '{name}' with {', '.join(names)} is in {made.directory}")


app.command()(fleet_changes.add)
app.command()(fleet_changes.remove)
app.command()(fleet_changes.revoke)
app.command()(fleet_changes.renew)


@app.command()
def host(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    group: Annotated[
        str, typer.Option(metavar="GROUP", help="Let members of this group use the daemon, too.")
    ] = "",
) -> None:
    """Run the host daemon in the foreground (systemd runs it so)."""
    from millpond.host import daemon

    daemon.run(fleet_directory, group)


@app.command()
def emulate(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    qemu: Annotated[
        int, typer.Option(min=0, max=16, metavar="N", help="And so many devices in QEMU, qemu0 and on.")
    ] = 0,
    image: Annotated[
        Path, typer.Option(metavar="IMAGE", help="What 'make image' made; for new devices in QEMU.")
    ] = Path(".image/qemu-virt"),
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND]", help="Run this inside when all devices are ready, then shut down."
        ),
    ] = None,
) -> None:
    """Run a host daemon and the fleet's emulated devices, until Ctrl-C. Makes the fleet if there is none."""
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
    raise typer.Exit(machine.emulate(found, command, said))


@app.command("demo")
def demonstrate(
    directory: Annotated[Path, typer.Option("--in", metavar="DIR", help="Where it keeps its things.")] = Path(
        ".demo"
    ),
    seed: Annotated[int, typer.Option(help="Of the data's division and the training.")] = 7,
) -> None:
    """Emulate a fleet and train on its private data: the whole of millpond in a minute."""
    from millpond.host.emulation.demo import prepare

    raise typer.Exit(prepare.run(directory, seed))


@app.command("demo-inside", hidden=True)
def demonstrate_inside(directory: Path, seed: int) -> None:
    """The part of the demo that runs inside the emulated machine."""
    from millpond.host.emulation.demo import steps

    raise typer.Exit(steps.run(directory, seed))


@app.command()
def devices(fleet_directory: FleetOption = DEFAULT_FLEET, output: FormatOption = Format.TEXT) -> None:
    """List the devices: state, load and traffic."""
    with DaemonClient(fleet_directory) as client:
        found = client.overview()
    if output is Format.JSON:
        printing.print_json(found)
    else:
        console = tables.console()
        console.print(tables.devices(found.devices))
        for line in (*tables.plain(found.devices), *found.warnings):
            console.print(line, soft_wrap=True)


@app.command()
def topology(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    explain: Annotated[
        bool, typer.Option("--explain", help="Run each, and show what it took beside the prediction.")
    ] = False,
    values: Annotated[int, typer.Option(min=1, help="The size of the model.")] = 1_000_000,
    root: Annotated[str, typer.Option(help="The device that adds.")] = "",
    repeats: Annotated[int, typer.Option(min=1, max=100, help="How often each is run.")] = 5,
    output: FormatOption = Format.TEXT,
) -> None:
    """Measure the links between the devices, and predict what adding their updates takes in each topology."""
    from millpond.host.terminal import topology_table

    with DaemonClient(fleet_directory) as client:
        found = client.topology(values, root, repeats if explain else 0)
    if output is Format.JSON:
        printing.print_json(found)
    else:
        tables.console().print(topology_table.show(found, values))


@app.command()
def tunnel(
    device: DeviceArgument,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every second, until Ctrl-C.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show the tunnel to a device: its link, and what it carried, dropped and waited for."""
    from millpond.host.cli import tunnel as tunnel_command

    with DaemonClient(fleet_directory) as client:
        if watch:
            ask = functools.partial(client.tunnel, device)
            tunnel_command.watch(tables.console(), ask, as_json=output is Format.JSON)
        found = client.tunnel(device)
    if output is Format.JSON:
        printing.print_json(found)
    else:
        tables.console().print(tunnel_command.show(found))


app.command(cls=remote.RunCommand, context_settings={"allow_interspersed_args": False})(remote.run)
app.command()(remote.shell)


@app.command()
def mount(
    device: DeviceArgument,
    mountpoint: Annotated[Path, typer.Argument(metavar="DIR", help="A directory; made if it is not there.")],
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="How long an operation may take while the device answers; 900 by default. A device that "
            "answers nothing for 15 s, or this time if it is shorter, has stopped.",
        ),
    ] = None,
    uid: Annotated[
        int | None,
        typer.Option(
            metavar="UID",
            min=0,
            max=_LARGEST_ID,
            help="Show all files as this user's, and let all users in by their modes. By default "
            "those of the device's server show as yours.",
        ),
    ] = None,
    gid: Annotated[
        int | None,
        typer.Option(
            metavar="GID", min=0, max=_LARGEST_ID, help="Show all files as this group's, and let it in."
        ),
    ] = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Mount the public part of a device's volume, until 'umount'."""
    from millpond.fs.fuse import mounts
    from millpond.fs.store.layout import PUBLIC
    from millpond.host.fleet import mounts as volume_mounts

    place, is_new = _free_place(mountpoint)
    argv = volume_mounts.command(fleet_directory.absolute(), device, place, timeout, uid, gid)
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    if fault := volume_mounts.fault_of(process):
        mounts.unmount_dead(place)  # that of a process that had to be killed
        if is_new:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise (LocalError if process.returncode == LOCAL else RemoteError)(fault)
    if output is Format.JSON:
        public = str(mountpoint / PUBLIC)
        printing.print_json({"device": device, "mountpoint": str(mountpoint), "public": public})
    else:
        print(f"the public part of {device} is at {mountpoint / PUBLIC}")


def _free_place(mountpoint: Path) -> tuple[Path, bool]:
    """Return a mount point as the kernel names it, without a dead mount, and whether it had to be made.
    Raises LocalError.
    """
    from millpond.fs.fuse import mounts

    if (shown := escaped(str(mountpoint))) != str(mountpoint):
        raise LocalError(f"'{shown}' is not UTF-8: mount at a folder of another name")
    place = mounts.place_of(mountpoint)
    mounts.unmount_dead(place)
    mounts.require_no_volume(place)
    is_new = not place.exists()
    place.mkdir(parents=True, exist_ok=True)
    return place, is_new


@app.command()
def umount(
    mountpoint: Annotated[Path, typer.Argument(metavar="DIR")],
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Unmount a volume. Never waits, even if the device is gone. Files open in it stay usable."""
    from millpond.fs.fuse import mounts

    if not mounts.is_volume(mountpoint):
        raise LocalError(f"no volume is mounted at {mountpoint}{_mounted_elsewhere(fleet_directory)}")
    mounts.unmount(mounts.place_of(mountpoint))
    if output is Format.JSON:
        printing.print_json({"mountpoint": str(mountpoint)})


def _mounted_elsewhere(fleet_directory: Path) -> str:
    """Return where users have mounted the fleet's volumes, as the end of a message."""
    from millpond.fs.mount.stats_socket import read_stats

    try:
        fleet = directory.read(fleet_directory)
        found = read_stats(fleet.mount_stats)
    except (MillpondError, OSError):  # it can be unmounted without the fleet
        return ""
    places = ", ".join(
        f"{mount.device} at {mount.mountpoint}"
        for mount in found
        if mount.mountpoint != str(fleet.mountpoint(mount.device))  # the daemon's own, for jobs
    )
    return f"; mounted: {places}" if places else ""


@app.command()
def volume(
    device: DeviceArgument,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    check: Annotated[
        bool, typer.Option("--check", help="Check all that can be seen from here; exit code 1 with findings.")
    ] = False,
    operations: Annotated[
        bool,
        typer.Option(
            "--ops", help="Show what programs did on this host's mounts: counts, latencies, errors."
        ),
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show a device's volume: its space, its clients and their leases, and this host's mounts."""
    from millpond.host.cli import volume as volume_command

    console = tables.console()
    if not check:
        found = volume_command.ask(fleet_directory, device)
        show = volume_command.show_operations if operations else volume_command.show
        printing.print_json(found) if output is Format.JSON else console.print(show(found))
        return
    checked = volume_command.check(fleet_directory, device)
    if output is Format.JSON:
        printing.print_json(checked)
    else:
        print("\n".join(volume_command.lines(checked)))
    raise typer.Exit(REMOTE if checked.findings else 0)


@app.command()
def cp(
    paths: Annotated[
        list[str], typer.Argument(metavar="SOURCE... TARGET", help="On a device: csd0:public/...; else here.")
    ],
    fleet_directory: FleetOption = DEFAULT_FLEET,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Directories with all in them.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Copy files to or from the public part of a volume. After a failure the same command goes on. Modes,
    times, holes, hard links and extended attributes (user.*) are kept.
    """
    from millpond.host.cli import copy

    copy.run(fleet_directory, paths, recursive=recursive, as_json=output is Format.JSON)


app.command("flash")(flash.command)
app.command("update")(update.command)
app.command("new")(new.command)
app.command("sign")(sign.command)
data_check.app.command()(data_explain.explain)
app.add_typer(data_check.app, name="data")
app.command()(jobs.train)
app.command()(jobs.resume)
app.command(context_settings={"allow_interspersed_args": False})(launch.launch)
app.command()(jobs.profile)
app.add_typer(jobs.jobs, name="jobs")
app.command()(jobs.stop)
app.command()(remote.logs)


@app.command()
def simulate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FLEET.toml",
            help="Workers, their curves and loads, as in agent/examples/fleet-36.toml; or [tiers].",
        ),
    ],
    output: FormatOption = Format.TEXT,
) -> None:
    """Simulate synchronous training on a fleet whose devices are busy now and then, or, with a table [tiers],
    mini-epochs over a slow and a fast tier; nothing is trained.
    """
    from millpond.host.cli.simulation import fleet as simulate_command
    from millpond.host.cli.simulation import tiers as simulate_tiers

    if simulate_tiers.is_of_tiers(file):
        tiers = simulate_tiers.run(simulate_tiers.read(file))
        if output is Format.JSON:
            printing.print_json(
                {"results": [dump(result) for result in tiers], "emulation": "simulated time"}
            )
        else:
            tables.console().print(simulate_tiers.show(tiers))
        return
    found = simulate_command.read(file)
    results = simulate_command.run(found, simulate_command.cohort_of(found, file.name))
    if output is Format.JSON:
        printing.print_json({"results": [dump(result) for result in results], "emulation": "simulated time"})
    else:
        tables.console().print(simulate_command.show(results))


def _exit_code(error: MillpondError) -> int:
    if isinstance(error, SshFailed):
        return SSH
    return INTERRUPTED if isinstance(error, flash.Interrupted) else exit_code(error)


def _run() -> object:
    try:
        return app(prog_name="millpond", standalone_mode=False)
    except typer.TyperException as error:
        if text := error.format_message():  # without arguments typer has printed the help
            context = getattr(error, "ctx", None)  # of a wrong usage: the command that was used
            command = context.command_path if context else "millpond"
            fail(f"{text.rstrip('.')} (see '{command} --help')", LOCAL)
        raise SystemExit(LOCAL) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer makes a code of its own of it
            raise end.__context__ from None
        raise


def main() -> None:
    """Run a command; every error is one line on standard error."""
    run(_run, _exit_code)

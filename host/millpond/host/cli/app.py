# SPDX-License-Identifier: Apache-2.0
"""Entry: the command line, ``millpond``.

A command imports what it alone needs itself: numpy, paramiko and the daemon take longer than most commands.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError, MillpondError, Refused, RemoteError
from millpond.base.schema import dump
from millpond.base.version import VERSION
from millpond.host.cli import data_check, flash, jobs, new, remote, sign, update
from millpond.host.cli.exits import EXIT_CODES, FLEET_DIRECTORY, INTERRUPTED, JOB, LOCAL, REMOTE, SSH, fail
from millpond.host.cli.options import DEFAULT_FLEET, DeviceArgument, FleetOption, Format, FormatOption
from millpond.host.client import DaemonClient
from millpond.host.fleet import directory
from millpond.host.fleet.directory import DeviceConfig
from millpond.host.remote.errors import SshFailed
from millpond.host.terminal import tables

app = typer.Typer(
    epilog=f"{FLEET_DIRECTORY}\n\n{EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    output: FormatOption = Format.TEXT,
) -> None:
    """Make a fleet: its certificate authority, SSH keys, and devices."""
    from millpond.host.fleet import provisioning

    names = [f"csd{number}" for number in range(devices)]
    made = provisioning.create(fleet_directory, name, names, lan=lan)
    if output is Format.JSON:
        tables.print_json({"fleet": str(made.directory), "name": name, "devices": names})
    else:
        print(f"fleet '{name}' with {', '.join(names)} is in {made.directory}")


@app.command()
def add(
    device: DeviceArgument,
    board: Annotated[str, typer.Option(help="What it is; a device's disk is flashed with --device then.")],
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Add a device to the fleet, and make its identity. The host daemon knows it when it is started again."""
    from millpond.host.fleet import provisioning

    provisioning.add(directory.read(fleet_directory), DeviceConfig(device, board=board))
    if output is Format.JSON:
        tables.print_json({"device": device, "board": board})
    else:
        print(f"{device}, a {board}, is in the fleet; restart the host daemon to have it there")


@app.command()
def host(fleet_directory: FleetOption = DEFAULT_FLEET) -> None:
    """Run the host daemon in the foreground (systemd runs it so)."""
    from millpond.host import daemon

    daemon.run(fleet_directory)


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
        list[str] | None, typer.Argument(metavar="[-- COMMAND]", help="Run this inside, then shut down.")
    ] = None,
) -> None:
    """Run a host daemon and the fleet's emulated devices, until Ctrl-C. Makes the fleet if there is none."""
    from millpond.host.emulation import machine, qemu_devices
    from millpond.host.fleet import provisioning

    if not (fleet_directory / "fleet.toml").exists():
        provisioning.create(fleet_directory, "emulated", [f"csd{number}" for number in range(3)])
    found = qemu_devices.ensure(directory.read(fleet_directory), qemu, image)
    if command is None:
        names = ", ".join(device.name for device in found.config.device)
        print(
            f"emulating {names}; try 'millpond devices --fleet {fleet_directory}'; Ctrl-C ends it", flush=True
        )
    raise typer.Exit(machine.emulate(found, command))


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
        found = client.devices()
    if output is Format.JSON:
        tables.print_json({"devices": found})
    else:
        console = tables.console()
        console.print(tables.devices(found))
        for line in tables.plain(found):
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
        tables.print_json(found)
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
        tables.print_json(found)
    else:
        tables.console().print(tunnel_command.show(found))


app.command(cls=remote.RunCommand, context_settings={"allow_interspersed_args": False})(remote.run)
app.command()(remote.shell)


@app.command()
def mount(
    device: DeviceArgument,
    mountpoint: Annotated[Path, typer.Argument(metavar="DIR", help="A directory; made if it is not there.")],
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Mount the public part of a device's volume, until 'umount'."""
    from millpond.host.fleet import mounts as volume_mounts

    mountpoint.mkdir(parents=True, exist_ok=True)
    argv = volume_mounts.command(fleet_directory.absolute(), device, mountpoint.absolute())
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout and process.stderr
    if not process.stdout.readline().startswith(b"ready: "):
        complaint = process.stderr.read().decode(errors="replace").strip()
        kind = LocalError if process.wait() == LOCAL else RemoteError
        raise kind(complaint or f"{device} cannot be mounted")
    if output is Format.JSON:
        tables.print_json({"device": device, "mountpoint": str(mountpoint)})
    else:
        print(f"the public part of {device} is at {mountpoint}")


@app.command()
def umount(
    mountpoint: Annotated[Path, typer.Argument(metavar="DIR")], output: FormatOption = Format.TEXT
) -> None:
    """Unmount a volume. Never waits, even if the device is gone."""
    from millpond.fs.fuse import mounts

    if not mounts.is_volume(mountpoint):
        raise LocalError(f"no volume is mounted at {mountpoint}")
    mounts.unmount(mountpoint.absolute())
    if output is Format.JSON:
        tables.print_json({"mountpoint": str(mountpoint)})


@app.command()
def volume(
    device: DeviceArgument,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    check: Annotated[
        bool, typer.Option("--check", help="Check all that can be seen from here; exit code 1 with findings.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show a device's volume: its space, its clients and their leases, and this host's mounts."""
    from millpond.host.cli import volume as volume_command

    console = tables.console()
    if not check:
        found = volume_command.ask(fleet_directory, device)
        tables.print_json(found) if output is Format.JSON else console.print(volume_command.show(found))
        return
    checked = volume_command.check(fleet_directory, device)
    if output is Format.JSON:
        tables.print_json(checked)
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
    """Copy files to or from the public part of a volume. After a failure the same command goes on."""
    from millpond.host.cli import copy

    if len(paths) < 2:
        raise LocalError("a source and a target are needed, such as: millpond cp data.npy csd0:public/")
    console = tables.quiet_console() if output is Format.JSON else tables.console()
    copied = copy.run(fleet_directory, paths[:-1], paths[-1], console, recursive=recursive)
    if output is Format.JSON:
        tables.print_json(copied)
    else:
        resumed = f", {tables.size(copied.resumed)} of them by an earlier copy" if copied.resumed else ""
        print(f"{copied.files} files, {tables.size(copied.bytes)}{resumed}")


app.command("flash")(flash.command)
app.command("update")(update.command)
app.command("new")(new.command)
app.command("sign")(sign.command)
app.add_typer(data_check.app, name="data")
app.command()(jobs.train)
app.command()(jobs.resume)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def launch(
    script: Annotated[Path, typer.Argument(metavar="-- SCRIPT.py", help="Any torch.distributed script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS...", help="For the script.")] = None,
    devices: Annotated[str, typer.Option(metavar="csd0,csd1", help="These devices, not all of them.")] = "",
    host: Annotated[bool, typer.Option("--host/--no-host", help="Whether the host is worker 0.")] = True,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", metavar="PATH", help="A file, or a folder, to lie beside the script."),
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Keep what the script saves, as DIR/WORKER/FILE."),
    ] = None,
    most: Annotated[
        int, typer.Option("--output-limit", min=1, max=65536, help="MiB of files of each worker.")
    ] = 256,
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="Show private folders to the script, which then has millpond.train.group alone."
        ),
    ] = False,
    folders: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="private/FOLDER", help="With --private: these folders, not all."),
    ] = None,
    signature: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --private: an owner's signature of the script's digest."),
    ] = None,
    digest: Annotated[bool, typer.Option("--digest", help="Print the script's digest; run nothing.")] = False,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Run a torch.distributed script (gloo) across host and devices, as torchrun does. Ctrl-C ends it."""
    from millpond.host.api.launch import StartLaunch
    from millpond.host.cli import launch as launch_command

    sent = launch_command.read_files(script, files or ())
    if digest:
        launch_command.show_digest(script.name, sent, as_json=output is Format.JSON)
        return
    if (folders or signature) and not private:
        raise LocalError("--data and --signature are for --private")
    start = StartLaunch(
        script.name,
        tuple(arguments or ()),
        sent,
        tuple(name.strip() for name in devices.split(",") if name.strip()),
        host,
        most << 20 if saved else 0,
        private,
        tuple(folders or ()),
        signature.read_text() if signature else "",
    )
    with DaemonClient(fleet_directory) as client:
        ended = launch_command.run(client, start, saved, as_json=output is Format.JSON)
    if ended.error:
        fail(ended.error, JOB, document=False)


app.command()(jobs.profile)
app.add_typer(jobs.jobs, name="jobs")
app.command()(jobs.stop)
app.command()(remote.logs)


@app.command()
def simulate(
    file: Annotated[Path, typer.Argument(metavar="FLEET.toml", help="Workers, their curves and loads.")],
    output: FormatOption = Format.TEXT,
) -> None:
    """Simulate synchronous training on a fleet whose devices are busy now and then; nothing is trained."""
    from millpond.host.cli import simulate as simulate_command

    found = simulate_command.read(file)
    results = simulate_command.run(found, simulate_command.cohort_of(found, file.name))
    if output is Format.JSON:
        tables.print_json({"results": [dump(result) for result in results], "emulation": "simulated time"})
    else:
        tables.console().print(simulate_command.show(results))


def _exit_code(error: MillpondError) -> int:
    if isinstance(error, SshFailed):
        return SSH
    if isinstance(error, flash.Interrupted):
        return INTERRUPTED
    return LOCAL if isinstance(error, LocalError) or _is_usage(error) else REMOTE


def _is_usage(error: MillpondError) -> bool:
    return isinstance(error, Refused) and error.code in ("unknown", "local", "state")


def main() -> None:
    """Run a command; every error is one line on standard error."""
    try:
        code = app(prog_name="millpond", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended; a daemon must not die of it, so no signal
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except MillpondError as error:
        fail(str(error), _exit_code(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), LOCAL)
    except typer.TyperException as error:
        if text := error.format_message():  # without arguments typer has printed the help
            context = getattr(error, "ctx", None)  # of a wrong usage: the command that was used
            command = context.command_path if context else "millpond"
            fail(f"{text.rstrip('.')} (see '{command} --help')", LOCAL)
        raise SystemExit(LOCAL) from None
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", INTERRUPTED)
    raise SystemExit(code if isinstance(code, int) else 0)

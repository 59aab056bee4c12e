# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands for volumes: 'mount', 'umount', 'volume' and 'cp'."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError, MillpondError, RemoteError
from millpond.base.text import escaped
from millpond.host.cli.exits import LOCAL, REMOTE
from millpond.host.cli.options import DEFAULT_FLEET, DeviceArgument, FleetOption, FormatOption, new_app
from millpond.host.fleet import directory
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format

app = new_app()
_LARGEST_ID = (1 << 32) - 2


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
    public = str(mountpoint / PUBLIC)
    document = {"device": device, "mountpoint": str(mountpoint), "public": public}
    printing.show(output, document, f"the public part of {device} is at {public}")


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
    mountpoint: Annotated[Path, typer.Argument(metavar="DIR|DEVICE")],
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Unmount a volume, named by its mountpoint or, if it is mounted once, its device. Never waits, even if
    the device is gone. Files open in it stay usable.
    """
    from millpond.fs.fuse import mounts

    if mounts.is_volume(mountpoint):
        place = mounts.place_of(mountpoint)
    else:
        place = _place_of_user(str(mountpoint), fleet_directory)
    mounts.unmount(place)
    printing.show(output, {"mountpoint": str(place)}, "")


def _place_of_user(device: str, fleet_directory: Path) -> Path:
    """Return where a user has mounted the volume of a device, if that is one place. Raises LocalError."""
    places = _mounted_by_users(fleet_directory)
    if len(found := [place for name, place in places if name == device]) == 1:
        return Path(found[0])
    elsewhere = ", ".join(f"{name} at {place}" for name, place in places)
    raise LocalError(f"no volume is mounted at {device}{elsewhere and '; mounted: ' + elsewhere}")


def _mounted_by_users(fleet_directory: Path) -> list[tuple[str, str]]:
    """Return the devices whose volumes users have mounted, and where: none without a fleet."""
    from millpond.fs.mount.stats_socket import read_stats

    try:
        fleet = directory.read(fleet_directory)
        found = read_stats(fleet.mount_stats)
    except (MillpondError, OSError):
        return []
    return [
        (mount.device, mount.mountpoint)
        for mount in found
        if mount.mountpoint != str(fleet.mountpoint(mount.device))  # the daemon's own, for jobs
    ]


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
    from millpond.host.remote import volume_report
    from millpond.host.terminal import volume_table

    if not check:
        found = volume_report.ask(fleet_directory, device)
        show = volume_table.show_operations if operations else volume_table.show
        printing.show(output, found, lambda: show(found))
        return
    checked = volume_report.check(fleet_directory, device)
    printing.show(output, checked, lambda: "\n".join(volume_table.lines(checked)))
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

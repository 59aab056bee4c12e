# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands 'mount' and 'umount'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError, MillpondError
from millpond.base.text import printable
from millpond.fs.store.layout import PUBLIC
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, FormatOption, complete_devices, new_app
from millpond.host.cli.volumes import mounting
from millpond.host.cli.volumes.mounting import LARGEST_ID
from millpond.host.fleet import directory
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import waiting

app = new_app()


MountDeviceArgument = Annotated[
    str | None, typer.Argument(metavar="DEVICE", help="Such as csd0.", autocompletion=complete_devices)
]
PlaceArgument = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="The directory; made if it is missing.")
]
FstabOption = Annotated[
    str,
    typer.Option(
        "-o",
        metavar="OPTIONS",
        help="Options as in /etc/fstab: ro, allow_other, uid=UID, gid=GID, timeout=SECONDS, and "
        "wait=SECONDS for the device.",
    ),
]
OthersOption = Annotated[
    bool,
    typer.Option("--allow-other", help="Let other users in. With another user as --uid this is always so."),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0.1,
        help="How long an operation may take while the device answers; 900 by default. A device that "
        "answers nothing for 15 s, or this time if it is shorter, has stopped.",
    ),
]
UidOption = Annotated[
    int | None,
    typer.Option(
        metavar="UID",
        min=0,
        max=LARGEST_ID,
        help="Show all files as this user's, and let all users in by their modes. By default "
        "those of the device's server show as yours.",
    ),
]
GidOption = Annotated[
    int | None,
    typer.Option(metavar="GID", min=0, max=LARGEST_ID, help="Show all files as this group's, and let it in."),
]


@app.command()
def mount(
    device: MountDeviceArgument = None,
    mountpoint: PlaceArgument = None,
    options: FstabOption = "",
    allow_other: OthersOption = False,
    timeout: TimeoutOption = None,
    uid: UidOption = None,
    gid: GidOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Mount the public part of a device's volume, until 'umount'. Without arguments, list the mounts.

    A mount whose process has ended is mounted again in its place. In /etc/fstab ('make install' installs
    mount.millpond): csd0 /mnt/csd0 millpond fleet=DIR,uid=1000,nofail,x-systemd.automount 0 0
    """
    if device is None:
        _list_mounts(output)
        return
    if mountpoint is None:
        raise LocalError(f"a directory is needed, such as: millpond mount {device} ~/{device}")
    asked = mounting.parsed(options)
    asked = replace(
        asked,
        allow_other=allow_other or asked.allow_other,
        uid=asked.uid if uid is None else uid,
        gid=asked.gid if gid is None else gid,
        timeout=asked.timeout if timeout is None else timeout,
    )
    fleet = Path(asked.fleet) if asked.fleet else fleet_directory
    with waiting(device, "its volume is mounted", shows=output is Format.TEXT) as tell:
        was_dead = mounting.mount(fleet, device, mountpoint, asked, tell)
    public = str(mountpoint / PUBLIC)
    document = {"device": device, "mountpoint": str(mountpoint), "public": public, "renewed": was_dead}
    again = " again: the process of the mount there had ended" if was_dead else ""
    printing.show(output, document, f"the public part of {device} is at {public}{again}")


def _list_mounts(output: Format) -> None:
    """Show the volumes that are mounted in this namespace, and which of them are dead."""
    from millpond.fs.fuse import mounts

    found = [
        {"device": name, "mountpoint": str(place), "dead": mounts.is_dead(place)}
        for name, place in mounts.volumes()
    ]
    lines = [
        f"{each['device']} at {each['mountpoint']}"
        + f": its process has ended; 'millpond mount {each['device']} {each['mountpoint']}' renews it"
        * bool(each["dead"])
        for each in found
    ]
    shown = (printable(line, len(line)) for line in lines or ["no volume is mounted"])  # any user may mount
    printing.show(output, {"mounts": found}, "\n".join(shown))


@app.command()
def umount(
    mountpoint: Annotated[Path, typer.Argument(metavar="DIR|DEVICE")],
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Unmount a volume, by its mountpoint or its device.

    The device names it if it is mounted once. Never waits, even if the device is gone. Files open in it stay
    usable.
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

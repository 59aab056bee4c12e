# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): mounts the public part of a device's volume, by a process that outlives the command."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError, RemoteError
from millpond.base.text import duration, escaped
from millpond.host.cli.exits import LOCAL
from millpond.linux.file_lock import name_held

LARGEST_ID = (1 << 32) - 2
_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of a mount: whose files show as ``uid``'s and ``gid``'s, whether other users are let in,
    how long an operation may take (``timeout``), and how long the mount waits for the device (``wait``).
    """

    read_only: bool = False
    allow_other: bool = False
    uid: int | None = None
    gid: int | None = None
    timeout: float | None = None
    wait: float = 0.0
    fleet: str = ""


_IGNORED = (
    *("defaults", "auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "owner", "group"),
    *("nosuid", "nodev", "async", "relatime", "noatime", "nodiratime"),
)
"""Options of mount(8) that a mount has anyway, or that are for its callers."""


def parsed(text: str) -> MountOptions:
    """Return the options of a text as in fstab(5). Raises LocalError for an unknown one."""
    flags, values = dict[str, bool](), dict[str, str]()
    for option in filter(None, text.split(",")):
        name, equals, value = option.partition("=")
        if name in ("ro", "allow_other") and not equals:
            flags["read_only" if name == "ro" else name] = True
        elif name == "rw":
            flags["read_only"] = False
        elif name in ("uid", "gid", "timeout", "wait", "fleet") and value:
            values[name] = value
        elif not (name in _IGNORED or name.startswith(("x-", "comment"))):
            raise LocalError(
                f"unknown mount option '{option}'; known: ro, rw, allow_other, uid=, gid=, timeout=, wait=, "
                "fleet="
            )
    return MountOptions(
        read_only=flags.get("read_only", False),
        allow_other=flags.get("allow_other", False),
        uid=_number(values, "uid"),
        gid=_number(values, "gid"),
        timeout=_seconds(values, "timeout"),
        wait=_seconds(values, "wait") or 0.0,
        fleet=values.get("fleet", ""),
    )


def _number(values: dict[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > LARGEST_ID:
        raise LocalError(f"mount option {name}={text}: this is no number of a user or group")
    return int(text)


def _seconds(values: dict[str, str], name: str) -> float | None:
    text = values.get(name)
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if seconds is not None and not 0 < seconds < 1e9:
        raise LocalError(f"mount option {name}={text}: this is no number of seconds")
    return seconds


def mount(
    fleet: Path,
    device: str,
    mountpoint: Path,
    options: MountOptions,
    tell: Callable[[str], None] = lambda _: None,
) -> bool:
    """Mount a volume, and ``tell`` why it is tried again. Returns whether it replaces a mount whose process
    had ended. Raises LocalError, also while another command mounts at the same place, and RemoteError.
    """
    from millpond.fs.fuse import mounts

    if (shown := escaped(str(mountpoint))) != str(mountpoint):
        raise LocalError(f"'{shown}' is not UTF-8: mount at a folder of another name")
    place = mounts.place_of(mountpoint)
    with name_held(f"mount {place}") as is_held:
        if not is_held:
            raise LocalError(f"{place}: another command is mounting a volume there")
        return _mount(fleet, device, place, options, tell)


def _mount(fleet: Path, device: str, place: Path, options: MountOptions, tell: Callable[[str], None]) -> bool:
    from millpond.fs.fuse import mounts
    from millpond.host.fleet import mounts as volume_mounts

    is_new, was_dead = _free(place)
    argv = volume_mounts.command(
        fleet.absolute(),
        device,
        place,
        options.timeout,
        options.uid,
        options.gid,
        read_only=options.read_only,
        allow_other=options.allow_other,
    )
    end = time.monotonic() + options.wait
    while error := _started(argv):
        mounts.unmount_dead(place)  # that of a process that had to be killed
        if time.monotonic() > end:
            if is_new:
                with contextlib.suppress(OSError):
                    place.rmdir()
            raise error
        tell(f"{error}: tried again for {duration(end - time.monotonic())} at most")
        time.sleep(_AGAIN_SECONDS)
    return was_dead


def _started(argv: list[str]) -> LocalError | RemoteError | None:
    """Start a mounter, which leaves this process's session once it has mounted: an automount lets the process
    group of systemd alone pass until then. Returns why it has not mounted, None if it has.
    """
    from millpond.host.fleet import mounts as volume_mounts

    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if fault := volume_mounts.fault_of(process):
        return (LocalError if process.returncode == LOCAL else RemoteError)(fault)
    return None


def _free(place: Path) -> tuple[bool, bool]:
    """Make a mount point, or remove its dead mount. Returns whether it was made, and whether it had a dead
    mount. Raises LocalError.
    """
    from millpond.fs.fuse import mounts

    was_dead = mounts.unmount_dead(place)
    mounts.require_no_volume(place)
    is_new = not place.exists()
    place.mkdir(parents=True, exist_ok=True)
    return is_new, was_dead

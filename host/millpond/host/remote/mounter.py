# SPDX-License-Identifier: Apache-2.0
"""Entry: mounts the public part of a device's volume on the host, and serves it until it is unmounted."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, MillpondError, Refused
from millpond.fs.client.remote_fs import DEFAULT_SECONDS
from millpond.fs.mount.host import BINDINGS, mount_and_serve
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import directory
from millpond.linux.syscalls import die_with_parent
from millpond.wire.channel import Channel

_LOG_BYTES = 1 << 20


def main(argv: list[str] | None = None) -> int:
    """Mount and serve. Returns 0 when unmounted; else prints one line on stderr and returns 2 for a mistake,
    else 1.
    """
    parser = argparse.ArgumentParser(prog="millpond.host.remote.mounter")
    parser.add_argument("fleet", type=Path)
    parser.add_argument("device")
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--allow-other", action="store_true", help="let other users in")
    parser.add_argument("--read-only", action="store_true", help="let nothing be changed through the mount")
    parser.add_argument("--die-with-parent", action="store_true", help="unmount when the caller ends")
    parser.add_argument("--binding", choices=BINDINGS, default="auto", help="how the kernel is talked to")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="SECONDS",
        help="how long an operation may take while the device answers",
    )
    parser.add_argument("--uid", type=int, help="the user whose all files show as")
    parser.add_argument("--gid", type=int, help="the group whose all files show as")
    arguments = parser.parse_args(argv)
    if arguments.die_with_parent:
        die_with_parent(signal.SIGTERM)

    def dial(deadline: Deadline) -> Channel:
        with DaemonClient(arguments.fleet) as daemon:
            return daemon.volume(arguments.device, deadline)

    def ready(how: str) -> None:
        if not arguments.die_with_parent:  # it outlives the terminal of its command
            with contextlib.suppress(PermissionError):  # it leads a session
                os.setsid()
        print(f"ready: {how}", flush=True)

    try:
        dial(Deadline.after(10)).close()  # a wrong name or an absent device fails now, not at the first ls
        fleet = directory.read(arguments.fleet)
        _log_to(fleet.mount_log(arguments.device), arguments.mountpoint)
        mount_and_serve(
            dial,
            arguments.mountpoint,
            name=arguments.device,
            allow_other=arguments.allow_other,
            read_only=arguments.read_only,
            binding=arguments.binding,
            timeout=arguments.timeout,
            numbers=fleet.mount_stats,
            uid=arguments.uid,
            gid=arguments.gid,
            on_ready=ready,
        )
    except (MillpondError, OSError) as error:
        print(error, file=sys.stderr)
        mistake = isinstance(error, LocalError) or (isinstance(error, Refused) and error.code == "unknown")
        return 2 if mistake else 1
    return 0


def _log_to(path: Path, mountpoint: Path) -> None:
    """Log to a file: this process outlives the terminal of its command."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1)
    except OSError:  # a mount without a log is better than none
        return
    form = f"%(asctime)s %(levelname)s {str(mountpoint).replace('%', '%%')}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=[handler])


if __name__ == "__main__":
    sys.exit(main())

"""Entry: a device mounts its own volume: ``python -m millpond.fs.local BACKING MOUNTPOINT [--name csd0]``.

Writes one line when the mount is up: ``ready``, and behind it how files are read and written. SIGTERM, or the
end of the process that started it, unmounts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from millpond.fs import fuse, raw
from millpond.fs.inodes import Inodes
from millpond.fs.operations import Operations
from millpond.linux.sandbox import has_many_uids
from millpond.linux.syscalls import die_with_parent
from millpond.wire.errors import LocalError, MillpondError


def main(argv: list[str] | None = None) -> int:
    """Mount and serve until the end. Returns 0, or 1 with one line on standard error."""
    arguments = _parser().parse_args(argv)
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel knew
        return 0
    try:
        _mount(arguments.backing, arguments.mountpoint, arguments.name, arguments.binding)
    except (MillpondError, OSError) as error:
        print(f"millpond.fs.local: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millpond.fs.local", description="Mount a device's volume on the device."
    )
    parser.add_argument("backing", type=Path, help="the flash directory, with its public and private part")
    parser.add_argument("mountpoint", type=Path, help="an empty directory")
    parser.add_argument("--name", default="millpond", help="what the mount is called in the table of mounts")
    parser.add_argument(
        "--binding",
        choices=("auto", "raw", "fuse-python"),
        default="auto",
        help="how the kernel is talked to; by itself fuse-python where it cannot read and write files itself",
    )
    return parser


def _mount(backing: Path, mountpoint: Path, name: str, binding: str) -> None:
    try:
        root = os.open(backing, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise LocalError(f"{backing}: cannot be a volume: {error.strerror}") from None
    try:
        complaint = raw.why_no_passthrough(mountpoint)
        chown_new = os.geteuid() == 0 and has_many_uids()
        how = f"by this process ({complaint})" if complaint else "by the kernel itself (FUSE passthrough)"
        if binding == "raw" or (binding == "auto" and not complaint):
            tree = Inodes(root, chown_new=chown_new)
            raw.mount_and_serve(tree, mountpoint, name=name, on_ready=lambda: _say_ready(how))
        else:
            volume = Operations(root, chown_new=chown_new)
            how = f"through fuse-python{f', since {complaint}' if complaint else ''}"
            fuse.mount_and_serve(
                volume, mountpoint, name=name, allow_other=True, on_ready=lambda: _say_ready(how)
            )
    finally:
        os.close(root)


def _say_ready(how: str) -> None:
    print(f"ready: files are read and written {how}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Entry: ``mount.millpond``, which mount(8) and systemd run for lines of /etc/fstab of the type millpond."""

from __future__ import annotations

import argparse
from pathlib import Path

from millpond.base.errors import LocalError, MillpondError
from millpond.host.cli import exits
from millpond.host.cli.volumes import mounting
from millpond.host.fleet import directory

USAGE, FAILED = 1, 32
"""Exit codes of mount(8)."""


def main() -> None:
    """Mount the device that is named as a line of /etc/fstab does: DEVICE DIR -o OPTIONS."""
    parser = argparse.ArgumentParser(prog="mount.millpond", description="mounts the public part of a device")
    parser.add_argument("device", help="such as csd0, or csd0:/ as NFS writes it")
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument(
        "-o", dest="options", default="", help="ro, uid=UID, fleet=DIR, wait=SECONDS and others"
    )
    for flag in "snv":
        parser.add_argument(f"-{flag}", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-f", dest="is_fake", action="store_true", help="mount nothing")
    parser.add_argument("-t", metavar="TYPE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    exits.run(lambda: _mount(asked), _code_of)


def _mount(asked: argparse.Namespace) -> None:
    options = mounting.parsed(asked.options)
    fleet = Path(options.fleet) if options.fleet else directory.default_directory()
    if not asked.is_fake:
        mounting.mount(fleet, asked.device.removesuffix("/").removesuffix(":"), asked.mountpoint, options)


def _code_of(error: MillpondError) -> int:
    return USAGE if isinstance(error, LocalError) else FAILED


if __name__ == "__main__":
    main()

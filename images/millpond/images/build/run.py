# SPDX-License-Identifier: Apache-2.0
"""Edge: the one place where the builder runs other programs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from millpond.base.errors import LocalError

PACKAGES = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "aarch64-linux-gnu-objcopy": "binutils-aarch64-linux-gnu",
    "aarch64-linux-gnu-readelf": "binutils-aarch64-linux-gnu",
    "aarch64-linux-gnu-strip": "binutils-aarch64-linux-gnu",
    "apt-get": "apt",
    "cpio": "cpio",
    "dpkg-deb": "dpkg",
    "mcopy": "mtools",
    "mkfs.vfat": "dosfstools",
    "mksquashfs": "squashfs-tools",
    "mmd": "mtools",
    "osslsigncode": "osslsigncode",
    "sfdisk": "fdisk",
    "depmod": "kmod",
    "veritysetup": "cryptsetup-bin",
}
"""Which Debian package brings a program."""
_LINES = 12


def find(program: str) -> str:
    """Return the path of a program. Raises LocalError that names the package to install."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        package = PACKAGES.get(program, program)
        raise LocalError(
            f"the image needs {program}: sudo apt install {package}, or images/prerequisites.sh image"
        )
    return found


def run(
    *argv: str | Path,
    given: bytes | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    hint: str = "",
) -> bytes:
    """Run a program with ``given`` as its input and return its output. Raises LocalError with the end of its
    output, a command line that can be copied, and the hint.
    """
    words = [find(str(argv[0])), *map(str, argv[1:])]
    done = subprocess.run(
        words,
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        cwd=folder,
        env={**_environment(), "LC_ALL": "C", **(environment or {})},
        check=False,
    )
    if done.returncode:
        raise LocalError(_story(argv, done, folder, hint))
    return done.stdout


def _environment() -> dict[str, str]:
    """Return this process's environment without a packager's clock: the image has its own."""
    return {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}


def _story(
    argv: Sequence[str | Path], done: subprocess.CompletedProcess[bytes], folder: Path | None, hint: str
) -> str:
    said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-_LINES:]
    line = shlex.join(map(str, argv))
    where = f"cd {shlex.quote(str(folder))} && " if folder else ""
    ending = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
    return "\n".join([*said, f"failed with {ending}: {where}{line}", *([f"hint: {hint}"] if hint else [])])

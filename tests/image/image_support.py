# SPDX-License-Identifier: Apache-2.0
"""Support of the image's tests: data for both devices, and builds of other images."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from millpond.host.emulation.demo import data
from millpond.images.build.secure_boot import SigningKey

from ..system.qemu import NAME, Board
from ..system.support import MILLPOND

ROOT = Path(__file__).parents[2]


def give_data(board: Board) -> Path:
    """Digits for both devices, private ones of their own; the folder of the test set."""
    base = board.emulation.base
    division = data.divide(data.load(), 2, 7)
    data.write(base / "test", division.test)
    flash = board.fleet.device_directory("csd0") / "flash"
    data.write(flash / "private" / "digits", division.private[0])
    data.write(flash / "public" / "digits", division.public[0])
    for part, samples in (("private", division.private[1]), ("public", division.public[1])):
        data.write(base / "staged" / part, samples)
        _put(board, base / "staged" / part, f"/volume/{part}/digits")
    return base / "test"


def _put(board: Board, folder: Path, target: str) -> None:
    """The files of ``folder`` on the device at ``target``, by root: so private ones get there."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(folder, ".")
    line = f"mkdir -p {target} && tar -x --no-same-owner -C {target}"
    argv = [*MILLPOND, "run", "--fleet", str(board.fleet.directory), "--admin", NAME, "--", line]
    subprocess.run(argv, input=archive.getvalue(), check=True, timeout=300)


@dataclass(frozen=True)
class Builder:
    """Builds images below ``output``."""

    output: Path
    cache: Path
    options: tuple[str, ...]

    def build(self, name: str, serial: int, source: Path = ROOT, *, signer: SigningKey | None = None) -> Path:
        """An image of ``source``, signed for Secure Boot by the ``signer`` if there is one; its folder."""
        argv = [sys.executable, "-m", "millpond.images.build", "--output", str(self.output / name)]
        argv += ["--serial", str(serial), "--cache", str(self.cache), "--source", str(source), *self.options]
        if signer:
            argv += ["--secure-boot-key", str(signer.key)]
            argv += ["--secure-boot-certificate", str(signer.certificate)]
        subprocess.run(argv, check=True, timeout=900)
        return self.output / name / "qemu-virt"

# SPDX-License-Identifier: Apache-2.0
"""Edge (rshim, mlx-mkbfb): boot streams of BlueField cards. UNTESTED with hardware: only the bytes are right.

A boot stream (.bfb) is a chain of images, each with a header of 24 bytes and padded to a multiple of 8. What
is written to the ``boot`` file of a card's rshim resets the card and is what it boots.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from millpond.base.errors import LocalError, RemoteError
from millpond.base.text import printable

UNTESTED = "flashing a BlueField is untested: there was no such card to try it with"
TOOL = "mlx-mkbfb"
BASE = Path("/lib/firmware/mellanox/boot/default.bfb")
_HEADER = struct.Struct("<IBBBBIIQ")
_MAGIC = 0x13026642
_MAJOR = 1
_CHUNK = 1 << 20
_ARM64_IMAGE = slice(0x38, 0x3C)
_BUILD_SECONDS = 300.0


def rshim(target: str, devices: Path = Path("/dev")) -> Path | None:
    """Return the file that boots the card of a target like ``rshim0`` or ``/dev/rshim0``; None for others.

    Raises LocalError if there is no such card.
    """
    match = re.fullmatch(r"(?:/dev/)?(rshim\d+)(?:/boot)?", target)
    if not match:
        return None
    boot = devices / match[1] / "boot"
    if not boot.exists():
        raise LocalError(
            f"no {boot}: is the card there, and the rshim driver running ('systemctl start rshim')?"
        )
    return boot


def check(file: BinaryIO, where: str) -> int:
    """Return the number of images in a boot stream. Raises LocalError unless headers and CRCs are right."""
    count, following = 0, 1
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise LocalError(f"{where}: image {count} is cut short")
        magic, version, _, lengths, _, size, crc, following = _HEADER.unpack(header)
        if magic != _MAGIC or version & 0xF != _MAJOR or lengths >> 4 != _HEADER.size // 8:
            raise LocalError(f"{where}: image {count} has no header of a BlueField boot stream")
        if _crc(file, size + -size % 8) != crc:
            raise LocalError(f"{where}: image {count} is damaged or cut short")
        count += 1
    if following:
        raise LocalError(f"{where}: ends after {count} images, though more are to follow")
    return count


def _crc(file: BinaryIO, left: int) -> int | None:
    crc = 0
    while left:
        part = file.read(min(left, _CHUNK))
        if not part:
            return None
        crc, left = zlib.crc32(part, crc), left - len(part)
    return crc


def build(folder: Path, result: Path) -> None:
    """Make a boot stream of a folder's ``kernel`` and ``initrd`` (and ``cmdline``, if it is there).

    NVIDIA's firmware, ``default.bfb`` of the folder or of this machine, goes before them. Raises LocalError.
    """
    tool = shutil.which(TOOL)
    if tool is None:
        raise LocalError(
            f"no {TOOL} in PATH: it is in NVIDIA's rshim package, and at github.com/Mellanox/bfscripts"
        )
    base = next((path for path in (folder / BASE.name, BASE) if path.is_file()), None)
    if base is None:
        raise LocalError(f"no {BASE.name} in {folder}: NVIDIA's package mlxbf-bootimages has it")
    argv = [tool, "--image", str(_kernel(folder)), "--initramfs", str(_part(folder, "initrd"))]
    if (line := folder / "cmdline").is_file():
        argv += ["--boot-args", f"={line.read_text().strip()}"]
    argv += [str(base), str(result)]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise LocalError(f"{TOOL} did not end within {_BUILD_SECONDS:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise LocalError(f"{TOOL} failed: {printable(said[-1])}")


def _part(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise LocalError(f"{path}: no such file: a boot stream needs it")
    return path


def _kernel(folder: Path) -> Path:
    path = _part(folder, "kernel")
    with path.open("rb") as file:
        if file.read(_ARM64_IMAGE.stop)[_ARM64_IMAGE] != b"ARMd":
            raise LocalError(f"{path} is no uncompressed arm64 kernel, which alone a BlueField's UEFI boots")
    return path


def push(stream: Path, boot: Path, watch: Callable[[int], None]) -> int:
    """Write a boot stream to a card. Returns its bytes.

    Raises LocalError for a bad stream, and RemoteError if the card takes none.
    """
    with stream.open("rb") as file:
        check(file, str(stream))
        file.seek(0)
        try:
            descriptor = os.open(boot, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RemoteError(f"{boot}: {error.strerror}: another program may have it open") from None
        try:
            return _copy(file, descriptor, watch)
        except OSError as error:
            raise RemoteError(f"{boot}: {error.strerror}: the same command begins anew") from None
        finally:
            os.close(descriptor)


def _copy(file: BinaryIO, descriptor: int, watch: Callable[[int], None]) -> int:
    total = 0
    while part := file.read(_CHUNK):
        left = memoryview(part)
        while left:
            count = os.write(descriptor, left)
            left, total = left[count:], total + count
            watch(count)
    return total

# SPDX-License-Identifier: Apache-2.0
"""A small image with a real partition table, readers of a disk's tables, and loop devices."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.images.format import locate
from millpond.images.format.manifest import Manifest, SeedPlace, dumps

from ..waiting import eventually

MIB = 1 << 20
SECTOR = 512
SEED = SeedPlace(5 * MIB, MIB)


def _gpt(size: int, salt: int) -> tuple[bytes, bytes]:
    """The sectors at the beginning and at the end of a disk with one partition, as the UEFI standard says."""
    last = size // SECTOR - 1
    drawn = random.Random(salt)
    guid, kind, own = (drawn.randbytes(16) for _ in range(3))
    entry = struct.pack("<16s16sQQQ72s", kind, own, 2048, last - 2048, 0, "root".encode("utf-16-le"))
    entries = entry.ljust(128 * 128, b"\0")

    def header(own: int, other: int, at: int) -> bytes:
        fields = (own, other, 34, last - 34, guid, at, 128, 128, zlib.crc32(entries))
        text = struct.pack("<8sIIIIQQQQ16sQIII", b"EFI PART", 0x10000, 92, 0, 0, *fields)
        return (text[:16] + struct.pack("<I", zlib.crc32(text)) + text[20:]).ljust(SECTOR, b"\0")

    protective = bytearray(SECTOR)
    struct.pack_into("<B3sB3sII", protective, 446, 0, b"\0\2\0", 0xEE, b"\xff\xff\xff", 1, last)
    protective[510:] = b"\x55\xaa"
    return bytes(protective) + header(1, last, 2) + entries, entries + header(last, 1, last - 32)


@functools.cache
def raw(size: int = 8 * MIB, salt: int = 1) -> dict[int, bytes]:
    """What is in such an image, by offset; all else is a hole."""
    begin, end = _gpt(size, salt)
    some = random.Random(salt)
    parts = {0: begin, size - len(end): end}
    for offset, length in ((MIB - 8192, MIB + 4096), (3 * MIB, 4096), (6 * MIB, MIB + 20480)):
        parts[offset] = some.randbytes(length)
    return parts


def write(path: Path, parts: dict[int, bytes], size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)
        for offset, data in parts.items():
            file.seek(offset)
            file.write(data)


BOARD = "qemu-virt"


def make_image(folder: Path, size: int = 8 * MIB, salt: int = 1) -> tuple[Path, Manifest]:
    """An image of nothing that boots, with its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "millpond-test.img"
    write(path, raw(size, salt), size)
    manifest = Manifest("millpond", "0.1.0", 7, BOARD, "aarch64", locate.describe(path), SEED)
    path.with_suffix(".json").write_text(dumps(manifest))
    return path, manifest


def tables(data: bytes) -> set[str]:
    """The signatures of partition tables on a disk, whether they make a table or not."""
    found = set()
    if data[510:512] == b"\x55\xaa" and any(data[446 + 4 + 16 * number] for number in range(4)):
        found.add("mbr")
    if data[SECTOR : SECTOR + 8] == b"EFI PART":
        found.add("primary")
    if data[-SECTOR:][:8] == b"EFI PART":
        found.add("backup")
    return found


def without_identifiers(data: bytes, size: int | None = None) -> bytes:
    """Return a disk of ``size`` bytes without the GUIDs in its two tables, which are drawn, and CRCs."""
    plain, last = bytearray(data), (size or len(data)) - SECTOR
    for header, table in ((SECTOR, 2 * SECTOR), (last, last - 32 * SECTOR)):
        if plain[header : header + 8] == b"EFI PART":
            for at, length in ((header + 16, 4), (header + 56, 16), (header + 88, 4)):
                plain[at : at + length] = bytes(length)
            for entry in range(table, table + 128 * 128, 128):
                plain[entry + 16 : entry + 32] = bytes(16)
    return bytes(plain)


def identifiers(data: bytes) -> set[bytes]:
    """Return the GUIDs of a disk and its partitions; both tables must be right and the same."""
    found, last = [], len(data) - SECTOR
    for header, table in ((SECTOR, 2 * SECTOR), (last, last - 32 * SECTOR)):
        entries, head = data[table : table + 128 * 128], data[header : header + 92]
        assert struct.unpack_from("<QIII", head, 72) == (table // SECTOR, 128, 128, zlib.crc32(entries))
        assert struct.unpack_from("<I", head, 16)[0] == zlib.crc32(head[:16] + bytes(4) + head[20:])
        partitions = (entries[at : at + 32] for at in range(0, len(entries), 128))
        found.append({head[56:72]} | {entry[16:] for entry in partitions if any(entry)})
    assert found[0] == found[1]
    return found[0]


def run(*argv: str | Path) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@contextlib.contextmanager
def loop(path: Path, size: int, *options: str) -> Iterator[Path]:
    """A disk that is a file; the test is skipped where that can't be had."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists() or not shutil.which("losetup"):
        pytest.skip("needs root and loop devices")
    path.touch()
    os.truncate(path, size)
    try:
        device = run("losetup", "--find", "--show", *options, path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device: {error.stderr.strip()}")
    try:
        yield Path(device)
    finally:
        if shutil.which("delpart"):  # without it, nor addpart beside it, a test has added no partition
            subprocess.run(["delpart", device, "1"], capture_output=True, check=False)
        run("losetup", "--detach", device)


@contextlib.contextmanager
def mounted(device: Path, at: Path) -> Iterator[None]:
    """A file system on a disk or partition, made anew."""
    run("mkfs.ext4", "-q", "-F", "-L", "holiday", device)
    at.mkdir()
    run("mount", device, at)
    try:
        yield
    finally:
        run("umount", at)
        eventually(lambda: _is_free(device), "no other namespace has a copy of the mount")


def _is_free(device: Path) -> bool:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_EXCL))
    except OSError:
        return False
    return True

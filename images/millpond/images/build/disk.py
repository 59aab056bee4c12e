# SPDX-License-Identifier: Apache-2.0
"""Edge: the disk image: a partition table with two slots, the first filled. No loop device is needed."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.build.boot import ESP_BYTES
from millpond.images.build.run import run

MIB = 1 << 20
ROOT_BYTES = 256 * MIB
SEED_BYTES = MIB
_TABLE_BYTES = 34 * 512  # of either end: headers and entries, and the protective sector
_SPOILT_BYTES = 64 << 10  # of a file system that must not be found
_NAMESPACE = uuid.UUID("0b4f5a0e-52a3-4f0c-9c0c-6d696c6c706f")
_ESP = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B"
_ROOT = "B921B045-1DF0-41C3-AF44-4C6F280D3FAE"
_SEED = "6D696C6C-706F-4E64-8000-5EED00000001"


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition; ``offset`` and ``bytes`` within the disk."""

    name: str
    type: str
    offset: int
    bytes: int


def identifier(name: str) -> str:
    """Return the GUID of a partition or of the ``disk``, which is the same in every build."""
    return str(uuid.uuid5(_NAMESPACE, name)).upper()


def layout() -> list[Partition]:
    """Return the partitions of every image; a device adds ``state`` and ``flash`` at its first boot."""
    kinds = [("espA", _ESP, ESP_BYTES), ("espB", _ESP, ESP_BYTES), ("rootA", _ROOT, ROOT_BYTES)]
    kinds += [("rootB", _ROOT, ROOT_BYTES), ("seed", _SEED, SEED_BYTES)]
    offset, found = MIB, []
    for name, kind, size in kinds:
        found.append(Partition(name, kind, offset, size))
        offset += size
    return found


def image_bytes() -> int:
    """Return the size of the whole disk, with room for the backup table at its end."""
    last = layout()[-1]
    return last.offset + last.bytes + MIB


def make_disk(made: Path, esp: Path, root: Path) -> list[tuple[int, int]]:
    """Write the disk ``made``, sparse; return where the bytes that count begin and end, zeros among them.

    They are the table, slot A, and the first bytes of slot B's EFI system partition: a disk that was used
    may hold a program there, and the firmware would find it. Raises LocalError for what is too large for
    its partition.
    """
    for source, room in ((esp, ESP_BYTES), (root, ROOT_BYTES)):
        if source.stat().st_size > room:
            raise LocalError(f"{source.name} has {source.stat().st_size} bytes, its partition {room}")
    with made.open("wb") as file:
        os.truncate(file.fileno(), image_bytes())
    script = f"label: gpt\nlabel-id: {identifier('disk')}\nunit: sectors\nfirst-lba: 2048\n"
    for part in layout():
        script += f"start={part.offset // 512}, size={part.bytes // 512}, type={part.type}, "
        script += f'uuid={identifier(part.name)}, name="{part.name}"\n'
    run("sfdisk", "--quiet", "--no-reread", made, given=script.encode())
    places = {part.name: part.offset for part in layout()}
    used = [(0, _TABLE_BYTES), (image_bytes() - _TABLE_BYTES, image_bytes())]
    with made.open("r+b") as target:
        for content, name in (
            (esp.read_bytes(), "espA"),
            (bytes(_SPOILT_BYTES), "espB"),
            (root.read_bytes(), "rootA"),
        ):
            target.seek(places[name])
            target.write(content)
            used.append((places[name], places[name] + len(content)))
    return sorted(used)

# SPDX-License-Identifier: Apache-2.0
"""Edge (disks): the partitions in a disk's GUID partition table, read from the disk itself."""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from pathlib import Path

_SIGNATURE = b"EFI PART"
_BLOCKS = (512, 4096)
_SMALLEST, _MOST, _FARTHEST = 128, 1024, 1 << 40
"""Bytes of an entry, entries, and blocks before them, in a table that is taken for one."""


@dataclass(frozen=True, slots=True)
class TablePartition:
    """A partition: its place in the table, from 1, its type's and its own GUID in lower case, its name."""

    number: int
    type: str
    guid: str
    name: str


def partitions(disk: Path) -> list[TablePartition]:
    """Return the partitions of a disk; none if it has no such table. Raises OSError."""
    with disk.open("rb") as file:
        for block in _BLOCKS:
            file.seek(block)
            header = file.read(92)
            if header.startswith(_SIGNATURE):
                first, count, size = struct.unpack_from("<QII", header, 72)
                if not _SMALLEST <= size <= block or count > _MOST or first > _FARTHEST:
                    return []
                file.seek(first * block)
                return _parsed(file.read(count * size), size)
    return []


def _parsed(table: bytes, size: int) -> list[TablePartition]:
    found = []
    for number, at in enumerate(range(0, len(table) - size + 1, size), 1):
        kind, own = (str(uuid.UUID(bytes_le=table[at + i : at + i + 16])) for i in (0, 16))
        name = table[at + 56 : at + 128].decode("utf-16-le", errors="replace").partition("\0")[0]
        if uuid.UUID(kind).int:
            found.append(TablePartition(number, kind, own, name))
    return found

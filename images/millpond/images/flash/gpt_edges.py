# SPDX-License-Identifier: Apache-2.0
"""Pure: the ends of an image, which hold its partition table and are written last."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from millpond.images.format.manifest import EDGE

SECTOR = 512
_SIGNATURE = b"EFI PART"
_GUID = 16
_SIZE_AT, _CRC_AT, _DISK_AT, _TABLE_AT = 12, 16, 56, 72  # of a table's header
_TABLE = struct.Struct("<Q3I")
"""First sector of the entries, their count, the size of each, their CRC."""


class GptEdges:
    """The first and the last MiB of an image of ``size`` bytes, collected while the rest is written.

    The headers of a partition table are in the image's second and last sector. Kernels and firmware look
    for them only if the first sector says that there is a table, so that sector is written last: with it,
    and not before, the disk claims to be whole. Repair tools look for the headers alone, so these are
    written last but one.
    """

    def __init__(self, size: int) -> None:
        self._head, self._tail = bytearray(EDGE), bytearray(EDGE)
        self._tail_offset = size - EDGE

    def keep(self, data: memoryview, offset: int) -> tuple[memoryview, int]:
        """Keep what belongs to the ends. Returns the rest, and where it goes."""
        if (before := EDGE - offset) > 0:
            self._head[offset : offset + len(data[:before])] = data[:before]
            data, offset = data[before:], EDGE
        if (inside := self._tail_offset - offset) < len(data):
            inside = max(inside, 0)
            start = offset + inside - self._tail_offset
            self._tail[start : start + len(data) - inside] = data[inside:]
            data = data[:inside]
        return data, offset

    def draw_identifiers(self, draw: Callable[[], bytes]) -> None:
        """Give the disk and each partition a GUID of its own, which ``draw`` returns, in both tables.

        All images of a board have the same ones, and firmware finds the partition to boot by its GUID.
        """
        drawn: dict[bytes, bytes] = {}

        def new(old: bytes) -> bytes:
            return drawn.setdefault(old, draw())

        for edge, header, start in (
            (self._head, SECTOR, 0),
            (self._tail, EDGE - SECTOR, self._tail_offset),
        ):
            if edge[header : header + len(_SIGNATURE)] == _SIGNATURE:
                _replace_identifiers(edge, header, start, new)

    def rest(self) -> list[tuple[bytes, int]]:
        """Return all but the three sectors, each piece with its offset."""
        return [
            (bytes(self._tail[:-SECTOR]), self._tail_offset),
            (bytes(self._head[2 * SECTOR :]), 2 * SECTOR),
        ]

    def headers(self) -> list[tuple[bytes, int]]:
        """Return the last sector and the second, with their offsets."""
        return [
            (bytes(self._tail[-SECTOR:]), self._tail_offset + EDGE - SECTOR),
            (bytes(self._head[SECTOR : 2 * SECTOR]), SECTOR),
        ]

    def first_sector(self) -> bytes:
        """Return the sector that makes the image whole."""
        return bytes(self._head[:SECTOR])

    def first_blocks(self) -> bytes:
        """Return the first MiB, for comparison."""
        return bytes(self._head)


def _replace_identifiers(edge: bytearray, header: int, start: int, new: Callable[[bytes], bytes]) -> None:
    """Replace the GUIDs in the table whose header is at ``header`` of an edge, which begins at byte ``start``
    of the disk (UEFI 2.10, 5.3).
    """
    sector, count, size, _ = _TABLE.unpack_from(edge, header + _TABLE_AT)
    table, end = sector * SECTOR - start, sector * SECTOR - start + count * size
    places = [at + _GUID for at in range(table, end, size) if edge[at : at + _GUID].strip(b"\0")]
    for at in (header + _DISK_AT, *places):
        edge[at : at + _GUID] = new(bytes(edge[at : at + _GUID]))
    _TABLE.pack_into(edge, header + _TABLE_AT, sector, count, size, zlib.crc32(edge[table:end]))
    (length,) = struct.unpack_from("<I", edge, header + _SIZE_AT)
    struct.pack_into("<I", edge, header + _CRC_AT, 0)
    struct.pack_into("<I", edge, header + _CRC_AT, zlib.crc32(edge[header : header + length]))

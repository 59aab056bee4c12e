# SPDX-License-Identifier: Apache-2.0
"""Pure: the ends of an image, which hold its partition table and are written last."""

from __future__ import annotations

from millpond.images.format.manifest import EDGE

SECTOR = 512


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

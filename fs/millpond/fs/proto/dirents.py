# SPDX-License-Identifier: Apache-2.0
"""Pure: packs a directory's listing into one payload."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from millpond.base.errors import ProtocolError
from millpond.fs.vfs.inode_api import Buffer
from millpond.fs.vfs.path_api import DirectoryEntry

_ENTRY = struct.Struct("!QIH")


def pack_entries(entries: Iterable[DirectoryEntry]) -> bytes:
    """Pack the payload of Entries: for each name an inode, a mode, the length of the name, the name."""
    packed = []
    for entry in entries:
        name = os.fsencode(entry.name)
        packed += [_ENTRY.pack(entry.inode, entry.mode, len(name)), name]
    return b"".join(packed)


def unpack_entries(data: Buffer) -> tuple[DirectoryEntry, ...]:
    """Unpack the payload of ``pack_entries``. Raises ProtocolError if it is malformed."""
    data, entries, at = bytes(data), [], 0
    try:
        while at < len(data):
            inode, mode, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            entries.append(DirectoryEntry(_name(data[at : at + length], length), inode, mode))
            at += length
    except struct.error:
        raise ProtocolError("a directory's listing ends in the middle of an entry") from None
    return tuple(entries)


def _name(data: bytes, length: int) -> str:
    if len(data) != length or not 0 < length < 256 or b"/" in data or b"\0" in data or data in (b".", b".."):
        raise ProtocolError("a directory's listing holds a name that no file can have")
    return os.fsdecode(data)

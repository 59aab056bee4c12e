# SPDX-License-Identifier: Apache-2.0
"""Pure: packs a directory's listing, or a page of it, into one payload."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from millpond.base.errors import ProtocolError
from millpond.fs.proto.validate import require_name
from millpond.fs.vfs.inode_api import Buffer
from millpond.fs.vfs.path_api import DirectoryEntry

_ENTRY = struct.Struct("!QqIH")


def pack_page(entries: Iterable[DirectoryEntry], size: int) -> tuple[bytes, bool]:
    """Pack the payload of Entries as long as there is room in ``size`` bytes, at least one: for each name an
    inode, the cookie behind it, a mode, the length of the name, the name. Returns the payload, and whether
    there were no more.
    """
    packed = list[bytes]()
    for entry in entries:
        name = os.fsencode(entry.name)
        size -= _ENTRY.size + len(name)
        if size < 0 and packed:
            return b"".join(packed), False
        packed += (_ENTRY.pack(entry.inode, entry.offset, entry.mode, len(name)), name)
    return b"".join(packed), True


def unpack_entries(data: Buffer) -> tuple[DirectoryEntry, ...]:
    """Unpack the payload of ``pack_page``; ``offset`` of an entry is the cookie behind it. Raises
    ProtocolError if it is malformed.
    """
    data, entries, at = bytes(data), [], 0
    try:
        while at < len(data):
            inode, cookie, mode, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            entries.append(DirectoryEntry(_name(data[at : at + length], length), inode, mode, cookie))
            at += length
    except struct.error:
        raise ProtocolError("a directory's listing ends in the middle of an entry") from None
    return tuple(entries)


def _name(data: bytes, length: int) -> str:
    if len(data) != length:
        raise ProtocolError("a directory's listing ends in the middle of a name")
    require_name(data)
    return os.fsdecode(data)

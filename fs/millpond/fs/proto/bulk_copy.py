# SPDX-License-Identifier: Apache-2.0
"""Pure: messages that list a directory with attributes (READDIRPLUS) and store small files whole, and the
packing of their payloads.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from millpond.base.errors import ProtocolError
from millpond.fs.proto import file_ops
from millpond.fs.proto.file_locks import ReleaseLocks
from millpond.fs.vfs.bulk_api import MAX_STORED, SmallFile
from millpond.fs.vfs.inode_api import Buffer
from millpond.fs.vfs.lock_types import OFFSET_MAX
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes
from millpond.wire.messages import Kind, Message, message

_ENTRY = struct.Struct("!HqQQ??QIQIIQQIqqqQ")
"""Bytes of the name, cookie, node, granted, readable, bare; the other attributes in their order."""
_ATTRIBUTES, _MODE, _LINKS, _SIZE, _RDEV = 6, 7, 8, 11, 17  # places in it
_MOST = (1 << 32) - 1
_TYPES = {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK}
_MODE_TYPES = frozenset(kind >> 12 for kind in _TYPES)  # of a mode of at most 16 bits
_DOTS = (b".", b"..")
Granted = tuple[int, int, int, bool, bool]
"""Of an entry: cookie, node, granted, readable, bare."""
_FILE = struct.Struct("!HIIqq")
"""Bytes of the name, bytes of the contents, mode, atime, mtime."""


@message("fs.readdirplus", Kind.VOLUME)
class ReadDirectoryPlus(Message):
    """List a page of the directory that ``path`` leads to from ``node``, with attributes: its names behind
    ``cookie``, 0 for the first, in at most ``size`` bytes. With ``delegated`` the attributes are granted, and
    all but regular files are looked up, as by Walk; with ``names_only`` inodes and types are told alone; with
    ``bare`` it is said which files have no extended attributes, which takes the server long. A cookie is the
    file system's own position: it outlives the connection and the server. Answered by EntriesPlus.
    """

    node: int
    path: tuple[bytes, ...] = ()
    cookie: int = 0
    size: int = MAX_TRANSFER
    delegated: bool = False
    names_only: bool = False
    bare: bool = False


@message("fs.entriesplus", Kind.VOLUME)
class EntriesPlus(Message):
    """The payload is a page of a directory, packed by ``Page``; ``end``: there are no names behind it.
    ``granted`` numbers the grant of the directory, under which its names may be cached; 0 for none, and
    always if the request had a ``path``.
    """

    end: bool
    granted: int = 0


@dataclass(frozen=True, slots=True)
class EntryPlus:
    """A name in a directory with attributes; the next page begins behind ``cookie``. ``node`` is 0 unless the
    name was looked up, and the attributes of a regular file may be granted without one; ``granted`` and
    ``readable`` as in FoundIs.
    """

    name: bytes
    cookie: int
    attributes: Attributes
    node: int = 0
    granted: int = 0
    readable: bool = False


@message("fs.returnunused", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ReturnUnused(Message):
    """Return delegations of files that the client has no node of, by inode numbers: those that were granted
    by a number up to the one in ``grants``. Not answered.
    """

    inodes: tuple[int, ...]
    grants: tuple[int, ...]


UNANSWERED: Final = (*file_ops.UNANSWERED, ReturnUnused, ReleaseLocks)
"""The requests that are not answered."""


@message("fs.storefiles", Kind.VOLUME)
class StoreFiles(Message):
    """Store files in a directory, each whole or not at all, on the flash and in place of what has its name.
    The payload is packed by ``pack_files``. Answered by FilesStored.
    """

    directory: int


@message("fs.filesstored", Kind.VOLUME)
class FilesStored(Message):
    """Reply to StoreFiles: an errno for each file, 0 for success."""

    errors: tuple[int, ...]


class Page:
    """Packs entries into the payload of EntriesPlus, at most ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self._parts: list[bytes] = []
        self._left = size

    def has_room(self, name: bytes) -> bool:
        """Return whether an entry with this name still fits; the first one always does."""
        return not self._parts or _ENTRY.size + len(name) <= self._left

    def add(
        self,
        name: bytes,
        cookie: int,
        fields: Sequence[int],
        node: int = 0,
        granted: int = 0,
        readable: bool = False,
        bare: bool = False,
    ) -> None:
        """Add the entry that EntryPlus describes; ``fields`` are the attributes in their order."""
        self._parts += (_ENTRY.pack(len(name), cookie, node, granted, readable, bare, *fields), name)
        self._left -= _ENTRY.size + len(name)

    def packed(self) -> bytes:
        """Return the payload."""
        return b"".join(self._parts)


def unpack_page(data: Buffer) -> Iterator[EntryPlus]:
    """Iterate over the entries that a Page packed. Raises ProtocolError if ``data`` is malformed, or if an
    entry is impossible.
    """
    at, whole = 0, bytes(data)
    while at < len(whole):
        at, name, (cookie, node, granted, readable, bare), fields = unpack_entry(whole, at)
        yield EntryPlus(name, cookie, Attributes(*fields, bare=bare), node, granted, readable)


def unpack_entry(data: bytes, at: int) -> tuple[int, bytes, Granted, tuple[int, ...]]:
    """Unpack the entry at an offset of a payload that a Page packed. Returns the offset behind it, the name,
    cookie, node, granted, readable and bare, and the attributes in their order. Raises ProtocolError as
    ``unpack_page`` does.
    """
    try:
        found = _ENTRY.unpack_from(data, at)
    except struct.error:
        raise ProtocolError("a page of a directory ends in the middle of an entry") from None
    length = found[0]
    end = at + _ENTRY.size + length
    name = data[end - length : end]
    if (
        not (0 < len(name) == length < 256 and found[1] > 0)
        or b"/" in name
        or b"\0" in name
        or name in _DOTS
        or found[_MODE] >> 12 not in _MODE_TYPES
        or found[_SIZE] > OFFSET_MAX
        or found[_LINKS] > _MOST
        or found[_RDEV] > _MOST
    ):
        raise ProtocolError("a page of a directory holds an entry that cannot be")
    return end, name, found[1:_ATTRIBUTES], found[_ATTRIBUTES:]


def pack_files(files: Sequence[SmallFile]) -> bytes:
    """Pack the payload of StoreFiles. Raises struct.error for a number that no file can have."""
    parts: list[Buffer] = []
    for file in files:
        head = (len(file.name), len(file.data), file.mode, file.atime, file.mtime)
        parts += (_FILE.pack(*head), file.name, file.data)
    return b"".join(parts)


def unpack_files(data: Buffer) -> list[SmallFile]:
    """Return the files that ``pack_files`` packed; their contents are views into ``data``. Raises
    ProtocolError if it is malformed, or has more than MAX_STORED files.
    """
    view, at, files = memoryview(data), 0, list[SmallFile]()
    while at < len(view):
        if len(view) - at < _FILE.size or len(files) >= MAX_STORED:
            raise ProtocolError("files to store end in the middle of one, or are too many")
        length, size, mode, atime, mtime = _FILE.unpack_from(view, at)
        at += _FILE.size + length + size
        if at > len(view):
            raise ProtocolError("files to store end in the middle of one")
        name = bytes(view[at - size - length : at - size])
        files.append(SmallFile(name, view[at - size : at], mode, atime, mtime))
    return files

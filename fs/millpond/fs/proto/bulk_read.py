# SPDX-License-Identifier: Apache-2.0
"""Pure: messages that look up and read many small files in one request, and the packing of the results."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from millpond.base.errors import ProtocolError
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.proto.validate import require_possible
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes
from millpond.wire.messages import Kind, Message, message

_FOUND = struct.Struct("!IQQQ?IQIQIIQQIqqqQ")
"""Number of the name, node, granted, name_granted, readable, bytes of contents; the attributes in their
order.
"""


@message("fs.fetch", Kind.VOLUME)
class FetchMany(Message):
    """Look up these names in a directory, and read every regular file that is delegated and has at most
    ``contents`` bytes. Unless ``delegated``, only regular files of at most so many bytes are read: they get
    no node, and the client caches nothing of them. Answered by Fetched.
    """

    directory: int
    names: tuple[bytes, ...]
    contents: int
    delegated: bool = True


@message("fs.fetched", Kind.VOLUME)
class Fetched(Message):
    """Reply to FetchMany: the payload packs the first ``looked`` names' results, as many as fit."""

    looked: int


class Batch:
    """Packs lookup results, each followed by the file's contents, into the payload of Fetched."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._left = MAX_TRANSFER

    def has_room(self, contents: int) -> bool:
        """Return whether a file of this many bytes still fits."""
        return _FOUND.size + contents <= self._left

    def add(self, number: int, found: FoundIs, contents: bytes) -> None:
        """Add the lookup result of the name with this number, and the file's contents."""
        granted = (found.granted, found.name_granted, found.readable)
        head = _FOUND.pack(number, found.node, *granted, len(contents), *found.attributes.fields())
        self._parts += (head, contents)
        self._left -= len(head) + len(contents)

    def packed(self) -> bytes:
        """Return the payload."""
        return b"".join(self._parts)


def unpack_found(data: memoryview) -> Iterator[tuple[int, FoundIs, memoryview]]:
    """Iterate over what a Batch packed: number of the name, lookup result, contents (a view into ``data``).
    Raises ProtocolError if ``data`` is malformed.
    """
    at = 0
    while at < len(data):
        if len(data) - at < _FOUND.size:
            raise ProtocolError("what was found ends in the middle of a file")
        number, node, granted, named, readable, size, *fields = _FOUND.unpack_from(data, at)
        at += _FOUND.size + size
        if at > len(data):
            raise ProtocolError("what was found ends in the middle of a file's contents")
        found = FoundIs(node, Attributes(*fields), granted, named, readable)
        require_possible(found)
        yield number, found, data[at - size : at]

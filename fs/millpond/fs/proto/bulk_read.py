"""Pure: the messages by which a client fetches many small files at once, and how what was found is packed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from millpond.base.errors import ProtocolError
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.proto.validate import require_possible
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes
from millpond.wire.messages import Kind, Message, message

_FOUND = struct.Struct("!IQQQ?IQIQIIQQIqqqQ")
"""Which name, node, granted, name_granted, readable, bytes of contents; the attributes in their order."""
_FIELDS = attrgetter(*Attributes.__match_args__)


@message("fs.fetch", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Look up these names, of each directory a tuple, and read the whole of each regular file that is granted
    and has at most ``contents`` bytes. Answered by Fetched.
    """

    directories: tuple[int, ...]
    names: tuple[tuple[bytes, ...], ...]
    contents: int


@message("fs.fetched", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Fetched(Message):
    """The payload is what was found of the first so many of all the names, as many as had room in it."""

    looked: int


class Batch:
    """A payload of Fetched that is being made: what was found, its contents behind each."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._left = MAX_TRANSFER

    def has_room(self, contents: int) -> bool:
        """Whether a file with so many bytes fits in."""
        return _FOUND.size + contents <= self._left

    def add(self, number: int, found: FoundIs, contents: bytes) -> None:
        """The name of this number stands for that."""
        granted = (found.granted, found.name_granted, found.readable)
        head = _FOUND.pack(number, found.node, *granted, len(contents), *_FIELDS(found.attributes))
        self._parts += (head, contents)
        self._left -= len(head) + len(contents)

    def packed(self) -> bytes:
        """All of it."""
        return b"".join(self._parts)


def unpack_found(data: memoryview) -> Iterator[tuple[int, FoundIs, memoryview]]:
    """What a Batch packed: the numbers of the names, what they stand for and the contents, which are part of
    ``data``. Raises ProtocolError for anything else.
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

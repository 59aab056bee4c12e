"""Pure: what a client and the server of a volume say to each other, one request and one reply at a time.

Names and paths are bytes, as the kernel has them. A request that fails is answered by Error. Only Write, Data
and Entries have a payload of raw bytes.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from millpond.fs.volume import Attributes, Entry, Owner, Statistics
from millpond.wire.errors import ProtocolError
from millpond.wire.message import Kind, Message, message

MAX_LISTING = 64 << 20
"""The most bytes of one directory's listing: some two million names."""

_ENTRY = struct.Struct("!QIH")


@message("fs.hello", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First on a connection: go on with the session of this name, 16 bytes that nobody else can guess, or
    begin it. A connection without has a session of its own. Answered by Welcome.
    """

    session: bytes


@message("fs.again", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Again(Message):
    """Answered as the session's last request was, if that had no payload."""


@message("fs.goodbye", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """The session ends with this connection. Answered by Done."""


@message("fs.getattr", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GetAttributes(Message):
    """Answered by AttributesAre."""

    path: bytes


@message("fs.readdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ReadDirectory(Message):
    """Answered by Entries."""

    path: bytes


@message("fs.readlink", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ReadLink(Message):
    """Answered by Link."""

    path: bytes


@message("fs.mknod", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeNode(Message):
    """Answered by Done. ``rdev`` is a device file's device."""

    path: bytes
    mode: int
    owner: Owner | None = None
    rdev: int = 0


@message("fs.mkdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeDirectory(Message):
    """Answered by Done."""

    path: bytes
    mode: int
    owner: Owner | None = None


@message("fs.unlink", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Unlink(Message):
    """Answered by Done."""

    path: bytes


@message("fs.rmdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class RemoveDirectory(Message):
    """Answered by Done."""

    path: bytes


@message("fs.symlink", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeSymlink(Message):
    """Answered by Done."""

    target: bytes
    path: bytes
    owner: Owner | None = None


@message("fs.rename", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Rename(Message):
    """Answered by Done."""

    old: bytes
    new: bytes


@message("fs.link", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeLink(Message):
    """Answered by Done."""

    old: bytes
    new: bytes


@message("fs.chmod", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ChangeMode(Message):
    """Answered by Done."""

    path: bytes
    mode: int


@message("fs.chown", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ChangeOwner(Message):
    """Answered by Done; -1 keeps one."""

    path: bytes
    uid: int
    gid: int


@message("fs.truncate", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Truncate(Message):
    """Answered by Done."""

    path: bytes
    size: int


@message("fs.utimens", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class SetTimes(Message):
    """Answered by Done; nanoseconds since 1970."""

    path: bytes
    atime: int
    mtime: int


@message("fs.open", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Open(Message):
    """Answered by Opened."""

    path: bytes
    flags: int
    mode: int = 0
    owner: Owner | None = None


@message("fs.read", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Read(Message):
    """Answered by Data."""

    handle: int
    size: int
    offset: int


@message("fs.write", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Write(Message):
    """The payload is the data; answered by Written."""

    handle: int
    offset: int


@message("fs.fsync", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Sync(Message):
    """Answered by Done."""

    handle: int
    data_only: bool


@message("fs.release", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Release(Message):
    """Answered by Done."""

    handle: int


@message("fs.statfs", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GetStatistics(Message):
    """Answered by StatisticsAre."""


@message("fs.ftruncate", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class TruncateOpen(Message):
    """Answered by Done."""

    handle: int
    size: int


@message("fs.fgetattr", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GetOpenAttributes(Message):
    """Answered by AttributesAre."""

    handle: int


@message("fs.welcome", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Whether the session goes on, and how many of its requests were performed, not counting Hello, Again and
    Goodbye.
    """

    known: bool
    performed: int


@message("fs.done", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Done(Message):
    """It is done, and on the device's file system."""


@message("fs.error", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Error(Message):
    """It failed, as ``errno`` says."""

    errno: int


@message("fs.attributes", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class AttributesAre(Message):
    """The attributes of a file."""

    attributes: Attributes


@message("fs.entries", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Entries(Message):
    """The payload is a directory's listing, packed by ``pack_entries``."""


@message("fs.link.target", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Link(Message):
    """Where a symbolic link points."""

    target: bytes


@message("fs.opened", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Opened(Message):
    """``handle`` is good on this connection; ``inode`` tells whether a later opening finds the same file."""

    handle: int
    inode: int


@message("fs.data", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Data(Message):
    """The payload is what was read."""


@message("fs.written", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Written(Message):
    """How many bytes were written."""

    count: int


@message("fs.statistics", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class StatisticsAre(Message):
    """How full the volume is."""

    statistics: Statistics


def pack_entries(entries: Iterable[Entry]) -> bytes:
    """The payload of Entries: for each an inode, a mode, the length of its name, its name."""
    packed = []
    for entry in entries:
        name = os.fsencode(entry.name)
        packed += [_ENTRY.pack(entry.inode, entry.mode, len(name)), name]
    return b"".join(packed)


def unpack_entries(data: bytes | bytearray) -> tuple[Entry, ...]:
    """What ``pack_entries`` packed. Raises ProtocolError for anything else."""
    entries, at = [], 0
    try:
        while at < len(data):
            inode, mode, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            entries.append(Entry(_name(data[at : at + length], length), inode, mode))
            at += length
    except struct.error:
        raise ProtocolError("a directory's listing ends in the middle of an entry") from None
    return tuple(entries)


def _name(data: bytes | bytearray, length: int) -> str:
    if len(data) != length or not data or b"/" in data or b"\0" in data or data in (b".", b".."):
        raise ProtocolError("a directory's listing holds a name that no file can have")
    return os.fsdecode(bytes(data))


def known_errno(number: int) -> int:
    """The errno that a peer named, or EIO if there is no such errno here."""
    return number if number in errno.errorcode else errno.EIO

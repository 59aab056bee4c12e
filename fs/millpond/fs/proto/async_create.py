"""Pure: the messages by which a client gets a directory exclusively, and tells what names it made there."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.fs.vfs.path_api import Attributes
from millpond.wire.messages import Kind, Message, message

MOST = 128
"""Files that are prepared, and names that are told, at once."""


@dataclass(frozen=True, slots=True)
class NameUpdate:
    """A prepared file gets a name in the directory for which it was prepared, which is the client's by this
    grant. ``serial`` numbers are told in order: one that was told already is not done again. ``time`` is when
    it was made, in nanoseconds since 1970.
    """

    serial: int
    directory: int
    granted: int
    node: int
    name: bytes
    mode: int
    time: int


@dataclass(frozen=True, slots=True)
class Touched:
    """Names were made in a directory that is the client's by this grant, and taken away again."""

    directory: int
    granted: int


@message("fs.prepare", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Preallocate(Message):
    """Prepare so many files for a directory that is the client's by this grant, or without one: grant it
    exclusively. An earlier grant of it ends then, and what was prepared by that is given back. Answered by
    Prepared.
    """

    node: int
    granted: int
    count: int


@message("fs.prepared", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Preallocated(Message):
    """Files without a name, each open for reading and writing: their nodes, handles, inodes and the grants of
    their attributes, which are alike but for the inode. ``granted`` is the number of the directory's
    exclusive grant, 0 if it is refused; the payload is the directory's listing, if that is new.
    """

    granted: int
    attributes: Attributes | None = None
    nodes: tuple[int, ...] = ()
    handles: tuple[int, ...] = ()
    inodes: tuple[int, ...] = ()
    grants: tuple[int, ...] = ()


@message("fs.tell", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class FlushNames(Message):
    """Prepared files get names, one after the other until one cannot; directories that were ``touched`` have
    changed now. Answered by Done, or Error: ESTALE if a directory is not the client's by this grant any more,
    or a file was not prepared for it.
    """

    told: tuple[NameUpdate, ...]
    touched: tuple[Touched, ...] = ()

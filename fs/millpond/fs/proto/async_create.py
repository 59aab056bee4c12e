# SPDX-License-Identifier: Apache-2.0
"""Pure: messages of asynchronous create: directory delegations, preallocated files, and their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millpond.fs.vfs.path_api import Attributes
from millpond.wire.messages import Kind, Message, message

MAX_BATCH = 128
"""Most files that one Preallocate makes, and most names that one FlushNames applies."""
MAX_TIME: Final = (1 << 40) * 10**9
"""Latest time that a file or directory is given, in nanoseconds since 1970."""
ROOM: Final = 1 << 16
"""Most bytes that a preallocated file may have room for."""


@dataclass(frozen=True, slots=True)
class NameUpdate:
    """A preallocated file gets a name in its directory, under the client's exclusive delegation ``granted``.
    Serials are flushed in order: one that was applied already is not applied again. ``time`` is when the name
    was made, in nanoseconds since 1970.
    """

    serial: int
    directory: int
    granted: int
    node: int
    name: bytes
    mode: int
    time: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The next ``size`` bytes of the payload are all that the file holds which gets its name by the update
    ``serial``. ``accessed`` is its access time, and ``changed`` the change time that programs may have seen,
    in nanoseconds since 1970.
    """

    serial: int
    size: int
    accessed: int
    changed: int


@dataclass(frozen=True, slots=True)
class Touched:
    """Names were made and removed again in a directory under the client's exclusive delegation
    ``granted``.
    """

    directory: int
    granted: int


@message("fs.prepare", Kind.VOLUME)
class Preallocate(Message):
    """Preallocate ``count`` files for a directory under the exclusive delegation ``granted``. With 0 the
    server grants the delegation first; an earlier one ends, and its preallocated files are closed. Answered
    by Preallocated.
    """

    node: int
    granted: int
    count: int


@message("fs.prepared", Kind.VOLUME)
class Preallocated(Message):
    """Unnamed files, each open for reading and writing: nodes, handles, inodes and the grants of their
    attributes, which are alike but for the inode. ``granted`` is the number of the directory's exclusive
    delegation, 0 if it is refused; the payload is the directory's listing if the delegation is new. There is
    room for ``room`` bytes of contents of each, to be told with its name.
    """

    granted: int
    attributes: Attributes | None = None
    nodes: tuple[int, ...] = ()
    handles: tuple[int, ...] = ()
    inodes: tuple[int, ...] = ()
    grants: tuple[int, ...] = ()
    room: int = 0


@message("fs.tell", Kind.VOLUME)
class FlushNames(Message):
    """Link preallocated files in order until one fails, each with its ``contents`` if these are told, and
    update the times of the ``touched`` directories. Answered by NamesFlushed, or Error: ESTALE if a directory
    is not the client's under this delegation any more, or a file was not preallocated for it.
    """

    updates: tuple[NameUpdate, ...]
    touched: tuple[Touched, ...] = ()
    contents: tuple[Contents, ...] = ()


@message("fs.told", Kind.VOLUME)
class NamesFlushed(Message):
    """All is done. ``files`` are the attributes of the files whose contents came along, in their order; fewer
    if updates had been applied before.
    """

    files: tuple[Attributes, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayedName:
    """A name that was made under an exclusive delegation of an earlier server, which may have it if it was
    ``sent``. The next ``size`` bytes of the payload are the file's contents; its times are in nanoseconds
    since 1970.
    """

    name: bytes
    mode: int
    time: int
    accessed: int
    size: int
    sent: bool


@message("fs.replay", Kind.VOLUME)
class ReplayNames(Message):
    """Make files in a directory that an earlier server had no time for, each whole and in place of none.
    Answered by NamesReplayed.
    """

    directory: int
    files: tuple[ReplayedName, ...]


@message("fs.replayed", Kind.VOLUME)
class NamesReplayed(Message):
    """Reply to ReplayNames: for each file its inode number, and 0; or 0, and the errno for which there is no
    such file: EEXIST if another one has its name, ESTALE if it may have been made and removed since.
    """

    inodes: tuple[int, ...]
    errors: tuple[int, ...]

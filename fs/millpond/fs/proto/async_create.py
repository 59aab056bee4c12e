# SPDX-License-Identifier: Apache-2.0
"""Pure: messages of asynchronous create: directory delegations, preallocated files, and their names."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.fs.vfs.path_api import Attributes
from millpond.wire.messages import Kind, Message, message

MAX_BATCH = 128
"""Most files that one Preallocate makes, and most names that one FlushNames applies."""


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
class Touched:
    """Names were made and removed again in a directory under the client's exclusive delegation
    ``granted``.
    """

    directory: int
    granted: int


@message("fs.prepare", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Preallocate(Message):
    """Preallocate ``count`` files for a directory under the exclusive delegation ``granted``. With 0 the
    server grants the delegation first; an earlier one ends, and its preallocated files are closed. Answered
    by Preallocated.
    """

    node: int
    granted: int
    count: int


@message("fs.prepared", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Preallocated(Message):
    """Unnamed files, each open for reading and writing: nodes, handles, inodes and the grants of their
    attributes, which are alike but for the inode. ``granted`` is the number of the directory's exclusive
    delegation, 0 if it is refused; the payload is the directory's listing if the delegation is new.
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
    """Link preallocated files in order until one fails, and update the times of the ``touched`` directories.
    Answered by Done, or Error: ESTALE if a directory is not the client's under this delegation any more, or a
    file was not preallocated for it.
    """

    updates: tuple[NameUpdate, ...]
    touched: tuple[Touched, ...] = ()

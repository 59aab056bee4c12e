# SPDX-License-Identifier: Apache-2.0
"""Pure: the low-level file-system interface: files by inode number, as FUSE's kernel sees them, and names as
bytes.

A node number stands for the same file as long as it has been looked up and not forgotten, whatever the file's
names are meanwhile. Every error is an OSError with an errno.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NewType, Protocol

from millpond.fs.vfs.lock_types import Family, Lock
from millpond.fs.vfs.path_api import Attributes, DirectoryEntry, Handle, Owner, Statistics, os_error

Node = NewType("Node", int)
ROOT: Final = Node(1)
Buffer = bytes | bytearray | memoryview


abandoned: ContextVar[Callable[[], bool]] = ContextVar("abandoned", default=lambda: False)
"""Returns whether the requester is gone: then an operation that waits for a recall is given up."""


page_writeback: ContextVar[bool] = ContextVar("page_writeback", default=False)
"""True for the kernel's page writeback (FUSE_WRITE_CACHE): the data may be older than this client's lease."""


class NegativeEntry(FileNotFoundError):
    """Negative lookup: ENOENT that the kernel may cache for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(errno.ENOENT, os.strerror(errno.ENOENT))
        self.seconds = seconds


class CacheMode(Enum):
    """Ways a kernel reads and writes an open file: FUSE passthrough, page cache, or direct I/O."""

    PASSTHROUGH = "passthrough"
    CACHED = "page cache"
    DIRECT = "direct"


Now = Literal["now"]
"""In place of a time: the present one (UTIME_NOW)."""


@dataclass(frozen=True, slots=True)
class CachedAttributes:
    """Attributes, and for how many seconds the kernel may cache them unless they are recalled."""

    attributes: Attributes
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """Result of a lookup: a node and its attributes. Each lookup needs its forget. The attributes may be
    cached for ``seconds`` and the name for ``name_seconds``, unless they are recalled.
    """

    node: Node
    attributes: Attributes
    seconds: float = 0.0
    name_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SetAttr:
    """Attributes to set, None for those to keep; times in nanoseconds since 1970."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime: int | Now | None = None
    mtime: int | Now | None = None


class Locking(Protocol):
    """File locks of a tree, of the owners of one mount."""

    def first_conflict(self, node: Node, lock: Lock) -> Lock | None:
        """Return a POSIX lock that conflicts, None if there is none; its ``pid`` is 0 if another mount holds
        it, and its owner means nothing. Raises OSError.
        """

    def lock(self, node: Node, family: Family, lock: Lock) -> int:
        """Lock or unlock, without waiting for other owners. Returns 0, or an errno: EAGAIN if others hold a
        lock that conflicts. Raises OSError.
        """

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Release all locks of this owner. Never fails, and sends no request if there are none."""

    def require(self, node: Node) -> None:
        """Raise OSError (EIO) if an owner has lost a lock of the file and has not closed the file since."""


class ExtendedFs(Protocol):
    """Extended attributes of the files of a tree. Each method raises OSError: EOPNOTSUPP for
    a name that is none of ``user.*``, ENODATA for an attribute that the file has not.
    """

    def get(self, node: Node, name: bytes) -> bytes:
        """Return the value of an extended attribute."""

    def set(self, node: Node, name: bytes, value: bytes, flags: int) -> None:
        """Set an extended attribute; ``flags`` are XATTR_CREATE (1), XATTR_REPLACE (2) or 0."""

    def names(self, node: Node) -> tuple[bytes, ...]:
        """Return the names of a file's extended attributes."""

    def remove(self, node: Node, name: bytes) -> None:
        """Remove an extended attribute."""


AddEntry = Callable[[bytes, int, Node, Sequence[int], float, float], bool]
"""Takes a name; the offset behind it; its node, 0 if it is not looked up; its attributes in the order of
Attributes, of which only inode and the type in the mode count without a node; for how many seconds attributes
and name may be cached. Returns False, without any effect, if there is no room for it."""
UNLISTED: Final = Node(0)
"""In place of a node: the name is listed without being looked up."""


class WriteGathering(Protocol):
    """Writes that are answered before they are done (write-behind)."""

    def add(self, node: Node, flags: int, data: Buffer, offset: int) -> bool:
        """Gather a write to a file that is opened with these ``flags``; never waits. False if it must be
        written by ``InodeFs.write``.
        """

    def add_when_sent(self, node: Node, flags: int, data: Buffer, offset: int) -> bool:
        """Gather a write, once there is room, to a file of which much is gathered; False as ``add``. Raises
        OSError.
        """

    def close_descriptor(self, handle: Handle) -> None:
        """Write what is gathered of an open file of which a descriptor is closed (FUSE_FLUSH). Raises
        OSError, also for what was lost before.
        """


class InodeFs(Protocol):
    """Low-level file system, by node. Each method raises OSError, and nothing else, when it fails."""

    @property
    def locks(self) -> Locking:
        """The file locks of this tree."""

    @property
    def extended(self) -> ExtendedFs:
        """The extended attributes of this tree's files."""

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """Return the file with this name."""

    def walk(self, start: Node, names: Sequence[bytes]) -> FoundEntry:
        """Look up a path of names; no symbolic link on the way is followed. Returns ``start`` for no
        names.
        """

    def forget(self, node: Node, times: int) -> None:
        """Drop ``times`` lookups of a node (FUSE_FORGET). Never fails."""

    def getattr(self, node: Node) -> CachedAttributes:
        """Return the attributes of a file."""

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Set attributes; ``handle`` names the open file through which ftruncate(2) came."""

    def readlink(self, node: Node) -> bytes:
        """Return the target of a symbolic link, as it was stored."""

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Make a file that is neither a directory nor a symbolic link."""

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Make a directory."""

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Make a symbolic link."""

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of a file."""

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int = 0) -> None:
        """Move a name, as renameat2(2) with these flags."""

    def create(
        self, parent: Node, name: bytes, flags: int, mode: int, owner: Owner | None
    ) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file. Raises OSError: ESTALE if the name exists by now, since the kernel
        has not checked whether that file may be opened.
        """

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file."""

    def read(self, handle: Handle, size: int, offset: int) -> Buffer:
        """Return up to ``size`` bytes, fewer at the end of the file."""

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        """Write at ``offset``, or at the file's present end. Returns how many bytes were written."""

    def cache_mode(self, handle: Handle) -> CacheMode:
        """Return how the kernel is to read and write an open file."""

    def descriptor(self, handle: Handle) -> int:
        """Return the descriptor of an open file, valid until release: the backing file for passthrough."""

    def fsync(self, handle: Handle, data_only: bool) -> None:
        """Return when the file, or the directory, is on the flash."""

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """Allocate or free a range of an open file, as fallocate(2) does."""

    def seek(self, handle: Handle, offset: int, whence: int) -> int:
        """Return the offset at which data or a hole begins, as lseek(2) does."""

    def release(self, handle: Handle) -> None:
        """Forget the handle of a file whose last descriptor was closed."""

    def opendir(self, node: Node) -> Handle:
        """Open a directory."""

    def readdir(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """Iterate over the names in a directory behind ``offset``: 0, or that of an entry that was read from
        any open directory of the same node (telldir, seekdir). As POSIX has it: a name that is added or
        removed after the listing began may be listed or not; each other one is listed once.
        """

    def readdirplus(self, handle: Handle, offset: int, add: AddEntry) -> None:
        """Pass the names behind ``offset`` to ``add``, in the order and with the offsets of ``readdir``,
        until it returns False or there are no more; a call may end earlier, but not before the first name.
        Each name that is passed with a node is looked up if ``add`` returns True, and needs its forget.
        """

    def statfs(self) -> Statistics:
        """Return how full the volume is."""


KnownFile = tuple[Node, Node, bytes]
"""A file's node, the node of its directory, its name there."""


class KernelCache(Protocol):
    """The kernel's cache of names, attributes and data, as far as an InodeFs has to invalidate it. A kernel
    that ``prunes`` finds the files that it is to forget by their nodes, earlier ones by their names.
    """

    prunes: bool

    def drop_names(self) -> None:
        """Invalidate all cached names. Never waits."""

    def drop(self, node: int, *, data: bool) -> bool:
        """Invalidate a node's attributes, and with ``data`` its pages; waits for reads under way. Returns
        False if the kernel does not know the node.
        """

    def await_listings(self, directory: int) -> None:
        """Return when the kernel has taken over the names from all replies to READDIRPLUS of a directory; it
        may wait for other operations in that directory.
        """

    def prune(self, files: Sequence[KnownFile]) -> None:
        """Have the kernel forget these files, unless it uses them; it may wait for operations."""


def one_name(name: bytes) -> bytes:
    """Return ``name`` if it is a single valid file name. Raises OSError: EINVAL."""
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise os_error(errno.EINVAL)
    return name

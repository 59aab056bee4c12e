"""Pure: a volume as the kernel sees it: files by number, not by path, and names as bytes.

A number stands for the same file as long as somebody has looked it up and not forgotten it, whatever its
names are meanwhile. Every error is an OSError with an errno.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType, Protocol

from millpond.fs.vfs.lock_types import Family, Lock
from millpond.fs.vfs.path_api import Attributes, DirectoryEntry, Handle, Owner, Statistics, os_error

Node = NewType("Node", int)
ROOT: Final = Node(1)
Buffer = bytes | bytearray | memoryview


may_block: ContextVar[bool] = ContextVar("patient", default=True)
"""Whether an operation may wait for others that hold a lock; if not, it raises WouldWait, undone."""


abandoned: ContextVar[Callable[[], bool]] = ContextVar("abandoned", default=lambda: False)
"""Whether nobody is interested any more in an operation that waits for others: then it is not done."""


page_writeback: ContextVar[bool] = ContextVar("kept_back", default=False)
"""Whether what is written was stored to a mapping some time ago, and may come too late."""


class WouldBlock(Exception):
    """Somebody must give up a lock first, which may take as long as a lease."""


class NegativeEntry(FileNotFoundError):
    """There is no such name; that may be taken for true for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(errno.ENOENT, os.strerror(errno.ENOENT))
        self.seconds = seconds


class CacheMode(Enum):
    """How a kernel reads and writes an open file."""

    KERNEL = "itself, by the file's descriptor"
    KEPT = "keeping what it has read"
    DIRECT = "asking each time"


class Now(Enum):
    """A time that is the present one."""

    NOW = "now"


@dataclass(frozen=True, slots=True)
class CachedAttributes:
    """Attributes, and for how many seconds they may be kept, unless they are recalled."""

    attributes: Attributes
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """What a name stands for. It must be forgotten as often as it was found. ``seconds`` are those for which
    the attributes, ``name_seconds`` those for which the name may be kept, unless they are recalled.
    """

    node: Node
    attributes: Attributes
    seconds: float = 0.0
    name_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SetAttr:
    """Attributes to be set, None for those to be kept; times in nanoseconds since 1970."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime: int | Now | None = None
    mtime: int | Now | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits, by its ``ticket``, which no other that waits has; ``then`` is told 0 or an errno,
    perhaps in another thread.
    """

    ticket: int
    then: Callable[[int], None]


class Locking(Protocol):
    """The file locks of a tree. What ``lock.owner`` says of a holder does not count: it is this mount."""

    def in_the_way(self, node: Node, lock: Lock) -> Lock | None:
        """The first POSIX lock in the way. Raises OSError."""

    def lock(self, node: Node, family: Family, lock: Lock, waiting: Waiting | None) -> int | None:
        """Lock or unlock; 0, an errno, or None: ``waiting`` will be told. Raises OSError and WouldWait."""

    def cancel(self, ticket: int) -> None:
        """It shall wait no longer, and be told EINTR, unless it has its answer already."""

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Unlock all that this owner has. Never fails, and asks nobody if he has nothing."""

    def require(self, node: Node) -> None:
        """Raises OSError: EIO if an owner has lost a lock of the file, and has not closed it since."""


class InodeFs(Protocol):
    """A tree of files. Each method raises OSError, and nothing else, when the operation fails."""

    @property
    def locks(self) -> Locking:
        """The file locks of its files."""

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """The file with this name."""

    def walk(self, start: Node, names: Sequence[bytes]) -> FoundEntry:
        """Where a path of names leads; of the files on the way none is followed. ``start`` for no names."""

    def forget(self, node: Node, times: int) -> None:
        """It was found so often and is of no more interest. Never fails."""

    def getattr(self, node: Node) -> CachedAttributes:
        """The attributes of a file."""

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Change attributes, of a file open for writing by its ``handle``."""

    def readlink(self, node: Node) -> bytes:
        """Where a symbolic link points, as it was stored."""

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
        """Make and open a regular file. Raises OSError: ESTALE if there is one by now, of which the kernel
        has not seen whether it may be opened.
        """

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file."""

    def read(self, handle: Handle, size: int, offset: int) -> Buffer:
        """Up to ``size`` bytes, fewer at the end of the file."""

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        """Write at ``offset``, or at the file's end, wherever that is; how many bytes were written."""

    def access(self, handle: Handle) -> CacheMode:
        """How the kernel has to read and write an open file."""

    def descriptor(self, handle: Handle) -> int:
        """Of an open file, as long as it is open: for the kernel, which then reads and writes itself."""

    def fsync(self, handle: Handle, data_only: bool) -> None:
        """Return when the file, or the directory, is on the flash."""

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """As fallocate(2)."""

    def seek(self, handle: Handle, offset: int, whence: int) -> int:
        """Where data or a hole begins, as lseek(2)."""

    def release(self, handle: Handle) -> None:
        """The last descriptor was closed: forget the handle."""

    def opendir(self, node: Node) -> Handle:
        """Open a directory."""

    def readdir(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """The names in a directory from the one at ``offset`` on, ``.`` and ``..`` first. Those of one open
        directory are the ones that it had when it was last read from 0.
        """

    def statfs(self) -> Statistics:
        """How full the volume is."""


def may_map(flags: int) -> bool:
    """Whether who opens a file so may map it to write: then it changes, and nobody is told."""
    return flags & os.O_ACCMODE == os.O_RDWR


def one_name(name: bytes) -> bytes:
    """``name`` if it is one of a file. Raises OSError: EINVAL."""
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise os_error(errno.EINVAL)
    return name

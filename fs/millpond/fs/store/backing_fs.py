"""Edge: the operations core by number: a Tree over a directory, through descriptors of places in it.

Each file that somebody has looked up has an O_PATH descriptor here, so a number means one file for good:
while it is kept, the file system below cannot give its inode to another.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from millpond.fs.filelocks.local import LocalLocks
from millpond.fs.store.create import (
    SAFE_FLAGS,
    Creator,
    checked,
    entries,
    itself,
    nameless,
    names_are_bytes,
    permissions,
    set_mode,
)
from millpond.fs.store.mmap_writers import open_beside
from millpond.fs.store.space_reservation import SpaceReservation
from millpond.fs.vfs.inode_api import (
    ROOT,
    Buffer,
    CachedAttributes,
    CacheMode,
    FoundEntry,
    Node,
    Now,
    SetAttr,
    may_map,
    one_name,
)
from millpond.fs.vfs.path_api import (
    MAX_TRANSFER,
    DirectoryEntry,
    Handle,
    Owner,
    Statistics,
    attributes,
    os_error,
)
from millpond.linux import syscalls

_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_FLAGS = os.O_ACCMODE | os.O_SYNC | os.O_DSYNC
_CREATE_FLAGS = _KEPT_FLAGS | os.O_TRUNC
_OPENED_HARMLESSLY = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)  # or not at all
_FEW = 10_000  # descriptors: more than there are files found in a second

Key = tuple[int, int]


@dataclass(slots=True)
class InodeRef:
    """A file that was found ``lookups`` times and not yet forgotten."""

    descriptor: int
    key: Key
    lookups: int = 0
    public: bool = False
    unseen: bool = False
    """Whether it may be changed through a map, of which nobody is told."""


@dataclass(slots=True)
class _Open:
    descriptor: int
    entries: list[DirectoryEntry] = field(default_factory=list)


class BackingFs:
    """A Tree over the directory that ``root``, an open descriptor, refers to; the caller keeps owning it.

    ``chown_new`` gives new files to whom they are made for: for real root only. ``public`` is the name in the
    root below which files are public; no name crosses that border (EXDEV), and ``statfs`` tells of what is
    there. What is not public may be kept for ``keep`` seconds: by the only one who changes it. There should
    be at most ``most`` descriptors. Several threads may call at once, but none may use what another one
    forgets or releases.
    """

    def __init__(
        self, root: int, *, chown_new: bool = False, public: bytes | None = None, keep: float = 0.0
    ) -> None:
        self._make = Creator(chown_new=chown_new)
        self._public, self._keep = public, keep
        self._lock = threading.Lock()
        self.most = sys.maxsize
        self._places = {ROOT: InodeRef(root, key_of(os.fstat(root)), 1)}
        self._nodes = {self._places[ROOT].key: ROOT}
        self._numbers = itertools.count(ROOT + 1)
        self._open: dict[Handle, _Open] = {}
        self._handles = itertools.count(1)
        self.locks = LocalLocks()
        self._reserve = SpaceReservation()

    @property
    def top(self) -> str:
        """A path to the directory, for this process."""
        return itself(self._at(ROOT))

    def close(self) -> None:
        """Close all that is open, but not the root."""
        for file in self._open.values():
            os.close(file.descriptor)
        for node, place in self._places.items():
            if node != ROOT:
                os.close(place.descriptor)

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """The file with this name. Those at the top are not kept once descriptors run short: when none are
        left, a kernel forgets all that is below a name that it asks for in vain.
        """
        place = os.open(one_name(name), _PLACE, dir_fd=self._at(parent))
        found = self._found(place, self._below(parent, name))
        return replace(found, name_seconds=0.0) if parent == ROOT and self._left < _FEW else found

    def _below(self, parent: Node, name: bytes) -> bool:
        """Whether what has this name is public."""
        return self.is_public(parent) or (parent == ROOT and name == self._public)

    @property
    def is_full(self) -> bool:
        """Whether there are as many descriptors as there may be."""
        return self._left < 0

    @property
    def _left(self) -> int:
        return self.most - len(self._places) - len(self._open)

    @property
    def is_divided(self) -> bool:
        """Whether only a part of it is public."""
        return self._public is not None

    def hides(self, parent: Node, name: bytes) -> bool:
        """Whether what has this name is nobody's business who sees the public part alone."""
        return self.is_divided and not self._below(parent, name)

    def is_public(self, node: Node) -> bool:
        """Whether it was found in the public part."""
        place = self._places.get(node)
        return place is not None and place.public

    def walk(self, start: Node, names: Sequence[bytes]) -> FoundEntry:
        """Where a path of names leads."""
        here = os.open(itself(self._at(start)), os.O_PATH | os.O_CLOEXEC) if not names else -1
        for name in names:
            at = self._at(start) if here < 0 else here
            try:
                found = os.open(one_name(name), _PLACE, dir_fd=at)
            finally:
                if here >= 0:
                    os.close(here)
            here = found
        public = self.is_public(start) or (bool(names) and self._below(start, names[0]))
        return self._found(here, public)

    def _found(self, descriptor: int, public: bool, unseen: bool = False) -> FoundEntry:
        """The file whose place this is; the descriptor is kept, or closed."""
        try:
            status = os.fstat(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        key = key_of(status)
        with self._lock:
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = Node(next(self._numbers))
                self._places[node] = InodeRef(descriptor, key)
                self._placed(descriptor)
                descriptor = -1
            place = self._places[node]
            place.lookups += 1
            place.public, place.unseen = place.public or public, place.unseen or unseen
        if descriptor >= 0:
            os.close(descriptor)
        return FoundEntry(node, attributes(status), self._seconds(place), 0.0 if place.public else self._keep)

    def _seconds(self, place: InodeRef) -> float:
        return 0.0 if place.public or place.unseen else self._keep

    def forget(self, node: Node, times: int) -> None:
        """It was found so often and is of no more interest."""
        with self._lock:
            place = self._places.get(node)
            if place is None or node == ROOT:
                return
            place.lookups -= times
            if place.lookups > 0:
                return
            self._drop(node, place)
        os.close(place.descriptor)

    def _placed(self, descriptor: int) -> None:
        """A file has a number from now on; with the lock."""

    def _drop(self, node: Node, place: InodeRef) -> None:
        """It has none any more; with the lock."""
        del self._places[node], self._nodes[place.key]

    def inode(self, node: Node) -> int:
        """The number that the file system below has for it."""
        try:
            return self._places[node].key[1]
        except KeyError:
            raise os_error(errno.ESTALE) from None

    def inode_of(self, parent: Node, name: bytes) -> int | None:
        """The number of what has this name; None if nothing has."""
        try:
            return os.stat(one_name(name), dir_fd=self._at(parent), follow_symlinks=False).st_ino
        except FileNotFoundError:
            return None

    def may_read(self, node: Node) -> bool:
        """Whether this process may read it."""
        return os.access(itself(self._at(node)), os.R_OK)

    def touch(self, node: Node) -> None:
        """It has been changed just now."""
        os.utime(itself(self._at(node)))

    def may_name(self, directory: Node) -> bool:
        """Whether this process may make names in a directory, for files of its own, and a client can tell
        which are the same.
        """
        at = self._at(directory)
        may = not self._make.gives_away and os.access(itself(at), os.R_OK | os.W_OK | os.X_OK)
        return may and names_are_bytes(at)

    def _at(self, node: Node) -> int:
        return self._place(node).descriptor

    def _place(self, node: Node) -> InodeRef:
        try:
            return self._places[node]
        except KeyError:
            raise os_error(errno.ESTALE) from None

    @contextlib.contextmanager
    def _held(self, node: Node) -> Iterator[int]:
        """Its place by a descriptor that stays open, even if it is forgotten meanwhile: the number of one
        that was closed may be another file's by the next call.
        """
        with self._lock:  # nothing is closed before it is taken out of the table
            descriptor = os.dup(self._at(node))
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def getattr(self, node: Node) -> CachedAttributes:
        """The attributes of a file."""
        place = self._place(node)
        return CachedAttributes(attributes(os.fstat(place.descriptor)), self._seconds(place))

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Change attributes. The mode comes last: to change the owner takes bits from it."""
        place = self._at(node)
        if changes.size is not None:
            self._truncate(place, changes.size, handle)
        if changes.uid is not None or changes.gid is not None:
            new = checked(Owner(_or_keep(changes.uid), _or_keep(changes.gid)))
            os.chown(itself(place), new.uid, new.gid)
        if changes.mode is not None:
            set_mode(place, permissions(changes.mode & 0o177777))
        if changes.atime is not None or changes.mtime is not None:
            syscalls.set_times(itself(place), _time(changes.atime), _time(changes.mtime))
        return self.getattr(node)

    def _truncate(self, place: int, size: int, handle: Handle | None) -> None:
        if handle is not None:
            os.ftruncate(self._file(handle).descriptor, size)
            return
        if stat.S_IFMT(os.fstat(place).st_mode) not in _OPENED_HARMLESSLY:
            raise os_error(errno.EINVAL)
        descriptor = open_beside(itself(place), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)

    def readlink(self, node: Node) -> bytes:
        """Where a symbolic link points, as it was stored."""
        return os.readlink(b"", dir_fd=self._at(node))

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Make a file that is neither a directory nor a symbolic link."""
        made = self._make.node(self._at(parent), one_name(name), mode, rdev, owner)
        return self._found(made, self._below(parent, name))

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Make a directory."""
        made = self._make.directory(self._at(parent), one_name(name), permissions(mode), owner)
        return self._found(made, self._below(parent, name))

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Make a symbolic link."""
        made = self._make.symlink(self._at(parent), one_name(name), target, owner)
        return self._found(made, self._below(parent, name))

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        directory = self._at(parent)
        self._require_one_side(self.is_public(node), self._below(parent, name))
        os.link(os.fsencode(itself(self._at(node))), one_name(name), dst_dir_fd=directory)
        return self.lookup(parent, name)

    def _require_one_side(self, here: bool, there: bool) -> None:
        if here != there:
            raise os_error(errno.EXDEV)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of a file."""
        os.unlink(one_name(name), dir_fd=self._at(parent))

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        os.rmdir(one_name(name), dir_fd=self._at(parent))

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int = 0) -> None:
        """Move a name, as renameat2(2) with these flags."""
        here, there = self._at(parent), self._at(new_parent)
        self._require_one_side(self._below(parent, name), self._below(new_parent, new_name))
        if flags:
            syscalls.rename(here, one_name(name), there, one_name(new_name), flags)
        else:
            os.rename(one_name(name), one_name(new_name), src_dir_fd=here, dst_dir_fd=there)

    def create(
        self, parent: Node, name: bytes, flags: int, mode: int, owner: Owner | None
    ) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file; ESTALE if there is one by now."""
        kept = flags & _CREATE_FLAGS
        try:
            made = self._make.file(self._at(parent), one_name(name), kept, permissions(mode), owner)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            raise os_error(errno.ESTALE) from None  # the kernel looks again, and whether it may be opened
        try:
            place = os.open(itself(made), os.O_PATH | os.O_CLOEXEC)
            found = self._found(place, self._below(parent, name), may_map(flags))
        except OSError:
            os.close(made)
            raise
        return found, self._opened(made)

    def hold_names(self, parent: Node, count: int) -> int:
        """Keep room for the names of so many files that are prepared, in directories like this one, or of
        fewer; of how many. Raises OSError: why there is none.
        """
        return self._reserve.hold(self._at(parent), count)

    def let_go_names(self, count: int) -> None:
        """So many were given, or will not be."""
        self._reserve.let_go(count)

    def prepare(self, parent: Node) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file without a name, which is to get one in this directory."""
        made = nameless(self._at(parent))
        try:
            found = self._found(os.open(itself(made), os.O_PATH | os.O_CLOEXEC), self.is_public(parent))
        except OSError:
            os.close(made)
            raise
        return found, self._opened(made)

    def give_name(self, node: Node, parent: Node, name: bytes, mode: int, time: int) -> None:
        """To a file that was prepared there, with these permissions, and changed at this ``time``. There is
        room for it, if it was held, until it is let go.
        """
        self._require_one_side(self.is_public(node), self._below(parent, name))
        with self._held(node) as file, self._held(parent) as directory:
            place = itself(file)
            os.chmod(place, mode)  # noqa: PTH101 - a Path would only be taken apart again
            os.utime(place, ns=(time, time))
            link = functools.partial(os.link, os.fsencode(place), one_name(name), dst_dir_fd=directory)
            self._reserve.naming(link)

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file; EPERM for any other."""
        place = self._place(node)
        here = place.descriptor
        if not stat.S_ISREG(os.fstat(here).st_mode):  # before it is opened: that may do something to others
            raise os_error(errno.EPERM)
        place.unseen = place.unseen or may_map(flags)
        return self._opened(open_beside(itself(here), flags & _CREATE_FLAGS | SAFE_FLAGS & ~os.O_NOFOLLOW))

    def _opened(self, descriptor: int) -> Handle:
        handle = Handle(next(self._handles))
        self._open[handle] = _Open(descriptor)
        return handle

    def _file(self, handle: Handle) -> _Open:
        try:
            return self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def access(self, _handle: Handle) -> CacheMode:
        """How the kernel has to read and write an open file."""
        return CacheMode.KERNEL

    def descriptor(self, handle: Handle) -> int:
        """Of an open file, as long as it is open."""
        return self._file(handle).descriptor

    def read(self, handle: Handle, size: int, offset: int) -> bytes:
        """Up to ``size`` bytes, fewer at the end of the file."""
        return os.pread(self._file(handle).descriptor, min(size, MAX_TRANSFER), offset)

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        """Write at ``offset``, or at the file's end, wherever that is by now."""
        return os.pwritev(self._file(handle).descriptor, [data], offset, os.RWF_APPEND if append else 0)

    def fsync(self, handle: Handle, data_only: bool) -> None:
        """Return when the file, or the directory, is on the flash."""
        descriptor = self._file(handle).descriptor
        if data_only:
            os.fdatasync(descriptor)
        else:
            os.fsync(descriptor)

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """As fallocate(2)."""
        syscalls.allocate(self._file(handle).descriptor, mode, offset, length)

    def seek(self, handle: Handle, offset: int, whence: int) -> int:
        """Where data or a hole begins, as lseek(2)."""
        return os.lseek(self._file(handle).descriptor, offset, whence)

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        os.close(self._file(handle).descriptor)
        del self._open[handle]

    def opendir(self, node: Node) -> Handle:
        """Open a directory."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return self._opened(os.open(itself(self._at(node)), flags))

    def readdir(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """The names in a directory from the one at ``offset`` on."""
        directory = self._file(handle)
        if offset == 0:
            dots = [self._dot(directory.descriptor, name) for name in (".", "..")]
            directory.entries = [*dots, *entries(directory.descriptor)]
        found = directory.entries
        return (found[number] for number in range(offset, len(found)))

    def _dot(self, directory: int, name: str) -> DirectoryEntry:
        top = key_of(os.fstat(directory)) == self._places[ROOT].key  # what is above it is nobody's business
        status = os.stat("." if top else name, dir_fd=directory)
        return DirectoryEntry(name, status.st_ino, stat.S_IFDIR)

    def statfs(self) -> Statistics:
        """How full the file system underneath is."""
        root = itself(self._at(ROOT)).encode()
        s = os.statvfs(root + b"/" + self._public if self._public else root)
        return Statistics(
            s.f_bsize, s.f_frsize, s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_namemax
        )


def key_of(status: os.stat_result) -> Key:
    """What tells a file from all others that are there."""
    return status.st_dev, status.st_ino


def _or_keep(number: int | None) -> int:
    return -1 if number is None else number


def _time(time: int | Now | None) -> tuple[int, int]:
    if time is None:
        return 0, syscalls.UTIME_OMIT
    if isinstance(time, Now):
        return 0, syscalls.UTIME_NOW
    return divmod(time, 10**9)

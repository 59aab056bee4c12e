# SPDX-License-Identifier: Apache-2.0
"""Edge: the low-level file system over a backing directory, through O_PATH descriptors.

Each file that has been looked up has an O_PATH descriptor here, so a node means one file for good: while it
is open, the file system below cannot give its inode number to another.
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
    names_are_bytes,
    open_unnamed,
    permissions,
    proc_path,
    set_mode,
)
from millpond.fs.store.mmap_writers import open_past_lease
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
_SAFE_TO_OPEN = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)  # open(2) of these has no side effect, or fails
_SCARCE = 10_000  # descriptors: more than lookups in a second

Key = tuple[int, int]


@dataclass(slots=True)
class InodeRef:
    """Descriptor of a file that was looked up ``lookups`` times and not yet forgotten."""

    descriptor: int
    key: Key
    lookups: int = 0
    public: bool = False
    mmap_writable: bool = False
    """Whether the file may be changed through a mapping, which is not reported."""


@dataclass(slots=True)
class _Open:
    descriptor: int
    entries: list[DirectoryEntry] = field(default_factory=list)


class BackingFs:
    """InodeFs over the directory that ``root``, an open descriptor, refers to; the caller keeps owning it.

    ``chown_new`` gives new files to the owner they are made for: for real root only. ``public`` is the name
    in the root below which files are public; no name crosses that border (EXDEV), and ``statfs`` reports on
    that part. Attributes and names outside of it may be cached for ``cache_seconds``, by the only mount that
    changes them. At most ``max_descriptors`` should be open. Several threads may call at once, but none may
    use a node or handle that another forgets or releases.
    """

    def __init__(
        self, root: int, *, chown_new: bool = False, public: bytes | None = None, cache_seconds: float = 0.0
    ) -> None:
        self._creator = Creator(chown_new=chown_new)
        self._public, self._cache_seconds = public, cache_seconds
        self._lock = threading.Lock()
        self.max_descriptors = sys.maxsize
        self._refs = {ROOT: InodeRef(root, key_of(os.fstat(root)), 1)}
        self._nodes = {self._refs[ROOT].key: ROOT}
        self._numbers = itertools.count(ROOT + 1)
        self._open: dict[Handle, _Open] = {}
        self._handles = itertools.count(1)
        self.locks = LocalLocks()
        self._reservation = SpaceReservation()

    @property
    def top(self) -> str:
        """Path of the backing directory, for this process."""
        return proc_path(self._at(ROOT))

    def close(self) -> None:
        """Close all descriptors but the root."""
        for file in self._open.values():
            os.close(file.descriptor)
        for node, place in self._refs.items():
            if node != ROOT:
                os.close(place.descriptor)

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """Return the file with this name. Names in the root are not cached once descriptors run short: when
        none are left, a kernel forgets all that is below a name whose lookup fails.
        """
        place = os.open(one_name(name), _PLACE, dir_fd=self._at(parent))
        found = self._found(place, self._below(parent, name))
        return (
            replace(found, name_seconds=0.0) if parent == ROOT and self._descriptors_left < _SCARCE else found
        )

    def _below(self, parent: Node, name: bytes) -> bool:
        """Return whether the file with this name is public."""
        return self.is_public(parent) or (parent == ROOT and name == self._public)

    @property
    def is_full(self) -> bool:
        """Whether as many descriptors are open as there may be."""
        return self._descriptors_left < 0

    @property
    def _descriptors_left(self) -> int:
        return self.max_descriptors - len(self._refs) - len(self._open)

    @property
    def is_divided(self) -> bool:
        """Whether only a part of the directory is public."""
        return self._public is not None

    def hides(self, parent: Node, name: bytes) -> bool:
        """Return whether this name is outside the public part, and so hidden from clients."""
        return self.is_divided and not self._below(parent, name)

    def is_public(self, node: Node) -> bool:
        """Return whether the node was found in the public part."""
        place = self._refs.get(node)
        return place is not None and place.public

    def walk(self, start: Node, names: Sequence[bytes]) -> FoundEntry:
        """Look up a path of names."""
        here = os.open(proc_path(self._at(start)), os.O_PATH | os.O_CLOEXEC) if not names else -1
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

    def _found(self, descriptor: int, public: bool, mmap_writable: bool = False) -> FoundEntry:
        """Return the entry of a file; takes over the O_PATH descriptor, or closes it."""
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
                self._refs[node] = InodeRef(descriptor, key)
                self._ref_added(descriptor)
                descriptor = -1
            place = self._refs[node]
            place.lookups += 1
            place.public, place.mmap_writable = place.public or public, place.mmap_writable or mmap_writable
        if descriptor >= 0:
            os.close(descriptor)
        return FoundEntry(
            node, attributes(status), self._seconds(place), 0.0 if place.public else self._cache_seconds
        )

    def _seconds(self, place: InodeRef) -> float:
        return 0.0 if place.public or place.mmap_writable else self._cache_seconds

    def forget(self, node: Node, times: int) -> None:
        """Drop ``times`` lookups of a node."""
        with self._lock:
            place = self._refs.get(node)
            if place is None or node == ROOT:
                return
            place.lookups -= times
            if place.lookups > 0:
                return
            self._ref_dropped(node, place)
        os.close(place.descriptor)

    def _ref_added(self, descriptor: int) -> None:
        """Called with the lock when a file has got a node; for subclasses."""

    def _ref_dropped(self, node: Node, place: InodeRef) -> None:
        """Remove a node; called with the lock."""
        del self._refs[node], self._nodes[place.key]

    def inode(self, node: Node) -> int:
        """Return the inode number that the file system below has for a node."""
        try:
            return self._refs[node].key[1]
        except KeyError:
            raise os_error(errno.ESTALE) from None

    def inode_of(self, parent: Node, name: bytes) -> int | None:
        """Return the inode number of the file with this name; None if there is none."""
        try:
            return os.stat(one_name(name), dir_fd=self._at(parent), follow_symlinks=False).st_ino
        except FileNotFoundError:
            return None

    def may_read(self, node: Node) -> bool:
        """Return whether this process may read the file."""
        return os.access(proc_path(self._at(node)), os.R_OK)

    def touch(self, node: Node) -> None:
        """Set a file's times to the present."""
        os.utime(proc_path(self._at(node)))

    def can_preallocate(self, directory: Node) -> bool:
        """Return whether this process may create files in a directory that compares names by their bytes."""
        at = self._at(directory)
        may = not self._creator.chowns_new and os.access(proc_path(at), os.R_OK | os.W_OK | os.X_OK)
        return may and names_are_bytes(at)

    def _at(self, node: Node) -> int:
        return self._ref(node).descriptor

    def _ref(self, node: Node) -> InodeRef:
        try:
            return self._refs[node]
        except KeyError:
            raise os_error(errno.ESTALE) from None

    @contextlib.contextmanager
    def _pinned(self, node: Node) -> Iterator[int]:
        """Duplicate a node's descriptor, so that it stays open even if the node is forgotten meanwhile: the
        number of a closed one may be another file's by the next call.
        """
        with self._lock:  # a descriptor leaves the table before it is closed
            descriptor = os.dup(self._at(node))
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def getattr(self, node: Node) -> CachedAttributes:
        """Return the attributes of a file."""
        place = self._ref(node)
        return CachedAttributes(attributes(os.fstat(place.descriptor)), self._seconds(place))

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Set attributes. The mode comes last: to change the owner clears bits of it."""
        place = self._at(node)
        if changes.size is not None:
            self._truncate(place, changes.size, handle)
        if changes.uid is not None or changes.gid is not None:
            new = checked(Owner(_or_keep(changes.uid), _or_keep(changes.gid)))
            os.chown(proc_path(place), new.uid, new.gid)
        if changes.mode is not None:
            set_mode(place, permissions(changes.mode & 0o177777))
        if changes.atime is not None or changes.mtime is not None:
            syscalls.set_times(proc_path(place), _time(changes.atime), _time(changes.mtime))
        return self.getattr(node)

    def _truncate(self, place: int, size: int, handle: Handle | None) -> None:
        if handle is not None:
            os.ftruncate(self._file(handle).descriptor, size)
            return
        if stat.S_IFMT(os.fstat(place).st_mode) not in _SAFE_TO_OPEN:
            raise os_error(errno.EINVAL)
        descriptor = open_past_lease(proc_path(place), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)

    def readlink(self, node: Node) -> bytes:
        """Return the target of a symbolic link, as it was stored."""
        return os.readlink(b"", dir_fd=self._at(node))

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Make a file that is neither a directory nor a symbolic link."""
        made = self._creator.node(self._at(parent), one_name(name), mode, rdev, owner)
        return self._found(made, self._below(parent, name))

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Make a directory."""
        made = self._creator.directory(self._at(parent), one_name(name), permissions(mode), owner)
        return self._found(made, self._below(parent, name))

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Make a symbolic link."""
        made = self._creator.symlink(self._at(parent), one_name(name), target, owner)
        return self._found(made, self._below(parent, name))

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        directory = self._at(parent)
        self._require_one_side(self.is_public(node), self._below(parent, name))
        os.link(os.fsencode(proc_path(self._at(node))), one_name(name), dst_dir_fd=directory)
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
        """Make and open a regular file; ESTALE if the name exists by now."""
        kept = flags & _CREATE_FLAGS
        try:
            made = self._creator.file(self._at(parent), one_name(name), kept, permissions(mode), owner)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            raise os_error(errno.ESTALE) from None  # the kernel looks it up, and checks permissions
        try:
            place = os.open(proc_path(made), os.O_PATH | os.O_CLOEXEC)
            found = self._found(place, self._below(parent, name), may_map(flags))
        except OSError:
            os.close(made)
            raise
        return found, self._opened(made)

    def reserve_names(self, parent: Node, count: int) -> int:
        """Reserve room for the names of ``count`` preallocated files, in directories like this one. Returns
        for how many there is room. Raises OSError: the reason why there is none.
        """
        return self._reservation.hold(self._at(parent), count)

    def release_names(self, count: int) -> None:
        """Release the reservation of names that were linked, or will not be."""
        self._reservation.release(count)

    def create_unnamed(self, parent: Node) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file without a name (O_TMPFILE), to be linked in this directory later."""
        made = open_unnamed(self._at(parent))
        try:
            found = self._found(os.open(proc_path(made), os.O_PATH | os.O_CLOEXEC), self.is_public(parent))
        except OSError:
            os.close(made)
            raise
        return found, self._opened(made)

    def link_unnamed(self, node: Node, parent: Node, name: bytes, mode: int, time: int) -> None:
        """Link an unnamed file, with these permissions and times. A reservation for the name is used if there
        is no other room; it stays until it is released.
        """
        self._require_one_side(self.is_public(node), self._below(parent, name))
        with self._pinned(node) as file, self._pinned(parent) as directory:
            place = proc_path(file)
            os.chmod(place, mode)  # noqa: PTH101 - a Path would only be taken apart again
            os.utime(place, ns=(time, time))
            link = functools.partial(os.link, os.fsencode(place), one_name(name), dst_dir_fd=directory)
            self._reservation.link(link)

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file; EPERM for any other type."""
        place = self._ref(node)
        here = place.descriptor
        if not stat.S_ISREG(os.fstat(here).st_mode):  # before open(2), which has side effects on a FIFO
            raise os_error(errno.EPERM)
        place.mmap_writable = place.mmap_writable or may_map(flags)
        return self._opened(
            open_past_lease(proc_path(here), flags & _CREATE_FLAGS | SAFE_FLAGS & ~os.O_NOFOLLOW)
        )

    def _opened(self, descriptor: int) -> Handle:
        handle = Handle(next(self._handles))
        self._open[handle] = _Open(descriptor)
        return handle

    def _file(self, handle: Handle) -> _Open:
        try:
            return self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def cache_mode(self, _handle: Handle) -> CacheMode:
        """Return how the kernel is to read and write an open file."""
        return CacheMode.PASSTHROUGH

    def descriptor(self, handle: Handle) -> int:
        """Return the descriptor of an open file, valid until release."""
        return self._file(handle).descriptor

    def read(self, handle: Handle, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes, fewer at the end of the file."""
        return os.pread(self._file(handle).descriptor, min(size, MAX_TRANSFER), offset)

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        """Write at ``offset``, or at the file's present end."""
        return os.pwritev(self._file(handle).descriptor, [data], offset, os.RWF_APPEND if append else 0)

    def fsync(self, handle: Handle, data_only: bool) -> None:
        """Return when the file, or the directory, is on the flash."""
        descriptor = self._file(handle).descriptor
        if data_only:
            os.fdatasync(descriptor)
        else:
            os.fsync(descriptor)

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """Allocate or free a range of an open file, as fallocate(2) does."""
        syscalls.allocate(self._file(handle).descriptor, mode, offset, length)

    def seek(self, handle: Handle, offset: int, whence: int) -> int:
        """Return the offset at which data or a hole begins, as lseek(2) does."""
        return os.lseek(self._file(handle).descriptor, offset, whence)

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        os.close(self._file(handle).descriptor)
        del self._open[handle]

    def opendir(self, node: Node) -> Handle:
        """Open a directory."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return self._opened(os.open(proc_path(self._at(node)), flags))

    def readdir(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """Iterate over the names in a directory, from the one at ``offset`` on."""
        directory = self._file(handle)
        if offset == 0:
            dots = [self._dot(directory.descriptor, name) for name in (".", "..")]
            directory.entries = [*dots, *entries(directory.descriptor)]
        found = directory.entries
        return (found[number] for number in range(offset, len(found)))

    def _dot(self, directory: int, name: str) -> DirectoryEntry:
        top = key_of(os.fstat(directory)) == self._refs[ROOT].key  # hides the directory above the root
        status = os.stat("." if top else name, dir_fd=directory)
        return DirectoryEntry(name, status.st_ino, stat.S_IFDIR)

    def statfs(self) -> Statistics:
        """Return how full the file system below is."""
        root = proc_path(self._at(ROOT)).encode()
        s = os.statvfs(root + b"/" + self._public if self._public else root)
        return Statistics(
            s.f_bsize, s.f_frsize, s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_namemax
        )


def key_of(status: os.stat_result) -> Key:
    """Return the device and inode number, which tell a file from all others that exist."""
    return status.st_dev, status.st_ino


def _or_keep(number: int | None) -> int:
    return -1 if number is None else number


def _time(time: int | Now | None) -> tuple[int, int]:
    if time is None:
        return 0, syscalls.UTIME_OMIT
    if isinstance(time, Now):
        return 0, syscalls.UTIME_NOW
    return divmod(time, 10**9)

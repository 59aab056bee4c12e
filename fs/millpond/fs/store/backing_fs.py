# SPDX-License-Identifier: Apache-2.0
"""Edge: the low-level file system over a backing directory, through O_PATH descriptors.

Each file that has been looked up has an O_PATH descriptor here, so a node means one file for good: while it
is open, the file system below cannot give its inode number to another.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from millpond.fs.store.create import (
    SAFE_FLAGS,
    Announce,
    Creator,
    checked,
    names_are_bytes,
    open_unnamed,
    proc_path,
    set_mode,
    set_times,
)
from millpond.fs.store.descriptors import DescriptorUse, InodeRef, OpenRef, drop
from millpond.fs.store.directories import list_from
from millpond.fs.store.extended import BackingExtended
from millpond.fs.store.file_locks import FileLocks
from millpond.fs.store.identity import FileIdentity, Key, key_of
from millpond.fs.store.layout import main_device
from millpond.fs.store.mmap_writers import open_past_lease
from millpond.fs.store.quota import BLOCK_SIZE, NAME_SIZE, Quota, Usage
from millpond.fs.store.usage import public_usage, statistics
from millpond.fs.vfs.inode_api import (
    ROOT,
    AddEntry,
    Buffer,
    CachedAttributes,
    CacheMode,
    FoundEntry,
    Node,
    SetAttr,
    one_name,
)
from millpond.fs.vfs.path_api import MAX_TRANSFER, DirectoryEntry, Handle, Owner, Statistics, os_error
from millpond.linux import syscalls

_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_FLAGS = os.O_ACCMODE | os.O_SYNC | os.O_DSYNC
_CREATE_FLAGS = _KEPT_FLAGS | os.O_TRUNC
_TAKES_NOTHING = 0x02 | 0x08 | 0x20  # fallocate(2): punch a hole, collapse or insert a range
_SAFE_TO_OPEN = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)  # open(2) of these has no side effect, or fails


class BackingFs:
    """InodeFs over the directory that ``root``, an open descriptor, refers to; the caller keeps owning it.

    ``chown_new`` gives new files to the owner they are made for: for real root only. All files are public, or
    those below the name ``public`` in the root: then no name crosses that border (EXDEV), and ``statfs``
    reports on that part. ``limit`` is its quota in bytes. ``plain`` is as of Creator. At most
    ``max_descriptors`` should be open. Several threads may call at once: an operation that is under way goes
    on with its file when another forgets it.
    """

    def __init__(
        self,
        root: int,
        *,
        chown_new: bool = False,
        public: bytes | None = None,
        plain: bool = False,
        limit: int | None = None,
    ) -> None:
        self._creator = Creator(chown_new=chown_new, plain=plain)
        self.new_owner = self._creator.owner
        self._public, self._lock = public, threading.Lock()
        self.max_descriptors = self.last_descriptor = sys.maxsize
        self.identity = FileIdentity(main_device(root, public))
        self._refs = {ROOT: InodeRef(root, key_of(os.fstat(root)), 1, public is None)}
        self._nodes = {self._refs[ROOT].key: ROOT}
        self._open: dict[Handle, OpenRef] = {}
        self._numbers, self._handles = itertools.count(ROOT + 1), itertools.count(1)
        self.locks = FileLocks(self)
        self.quota = Quota(limit, self.usage)
        self.extended = BackingExtended(self.pinned, self.is_public, self.quota.require)

    @property
    def top(self) -> str:
        """Path of the backing directory, for this process."""
        return proc_path(self._refs[ROOT].descriptor)

    def close(self) -> None:
        """Close all descriptors but the root."""
        for file in self._open.values():
            os.close(file.descriptor)
        for node, place in self._refs.items():
            if node != ROOT:
                os.close(place.descriptor)

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """Return the file with this name. A kernel forgets all that is below a name in the root whose lookup
        fails: such lookups fail beyond ``last_descriptor``, where an operation may need more than are left.
        """
        with self.pinned(parent) as directory:
            place = os.open(one_name(name), _PLACE, dir_fd=directory)
        if parent == ROOT and place > self.last_descriptor:
            os.close(place)  # a new descriptor has the lowest free number
            raise os_error(errno.EMFILE)
        return self._found(place, self._below(parent, name))

    def _below(self, parent: Node, name: bytes) -> bool:
        """Return whether the file with this name is public."""
        return self.is_public(parent) or (parent == ROOT and name == self._public)

    @property
    def is_full(self) -> bool:
        """Whether as many descriptors are open as there may be."""
        return len(self._refs) + len(self._open) > self.max_descriptors

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
        with self.pinned(start) as place:
            here = os.open(proc_path(place), os.O_PATH | os.O_CLOEXEC)
        for name in names:
            try:
                found = os.open(one_name(name), _PLACE, dir_fd=here)
            finally:
                os.close(here)
            here = found
        public = self.is_public(start) or (bool(names) and self._below(start, names[0]))
        return self._found(here, public)

    def _found(self, descriptor: int, public: bool) -> FoundEntry:
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
                descriptor = -1
            place = self._refs[node]
            place.lookups += 1
            place.public = place.public or public
        if descriptor >= 0:
            os.close(descriptor)
        return FoundEntry(node, self.identity.attributes(status))

    def forget(self, node: Node, times: int) -> None:
        """Drop ``times`` lookups of a node."""
        with self._lock:
            place = self._refs.get(node)
            if place is None or node == ROOT:
                return
            place.lookups -= times
            if place.lookups > 0:
                return
            del self._refs[node], self._nodes[place.key]
            unused = drop(place)
        if unused:
            os.close(place.descriptor)

    def usage(self) -> Usage:
        """Return the bytes and the number of the public files, those included that have no name any more and
        that a client keeps, if only by a lock. Raises OSError.
        """
        used, files = public_usage(Path(self.top))
        nameless = dict[Key, int]()
        for held in [*list(self._refs.values()), *list(self._open.values())]:
            with contextlib.suppress(OSError):  # forgotten or closed meanwhile
                status = os.fstat(held.descriptor)
                if not status.st_nlink:
                    nameless[key_of(status)] = status.st_blocks * 512
        return used + sum(nameless.values()), files + len(nameless)

    def knows(self, node: Node) -> bool:
        """Return whether a node was looked up and not forgotten."""
        return node in self._refs

    def compares_bytes(self, directory: Node) -> bool:
        """Return whether names in a directory are the same only if their bytes are; False if unknown."""
        with contextlib.suppress(OSError), self.pinned(directory) as at:
            return names_are_bytes(at)
        return False

    def path_of(self, node: Node) -> str:
        """Return the path of a file below the root, for a log. Raises OSError."""
        with self.pinned(node) as file:
            top, path = (os.readlink(place) for place in (self.top, proc_path(file)))  # noqa: PTH115
        return path.removeprefix(top).removeprefix("/") or "/"

    def inode(self, node: Node) -> int:
        """Return the number by which a node's file is known everywhere."""
        return self.identity.number(self._ref(node).key)

    def nodes_of(self, numbers: Collection[int] | None) -> list[Node]:
        """Return the nodes of those files that are known by these numbers; of all if ``numbers`` is None."""
        if numbers is None:
            return list(self._refs)
        keys = {self.identity.key(number) for number in numbers}
        if None in keys:
            keys |= {key for key in list(self._nodes) if self.identity.number(key) in numbers}
        return [node for key in keys if key and (node := self._nodes.get(key))]

    def inode_of(self, parent: Node, name: bytes) -> int | None:
        """Return the number of the file with this name; None if there is none."""
        try:
            with self.pinned(parent) as directory:
                status = os.stat(one_name(name), dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return self.identity.number(key_of(status))

    def may_read(self, node: Node) -> bool:
        """Return whether this process may read the file."""
        with self.pinned(node) as file:
            return os.access(proc_path(file), os.R_OK)

    def _ref(self, node: Node) -> InodeRef:
        try:
            return self._refs[node]
        except KeyError:
            raise os_error(errno.ESTALE) from None

    def pinned(self, node: Node) -> DescriptorUse:
        """Return a context in which the node's descriptor is not closed, whoever forgets the node."""
        with self._lock:
            return DescriptorUse(self._lock, self._ref(node))

    def _opened_file(self, handle: Handle) -> DescriptorUse:
        """Return a context in which the descriptor of an open file is not closed, whoever releases it."""
        with self._lock:
            return DescriptorUse(self._lock, self._file(handle))

    def getattr(self, node: Node) -> CachedAttributes:
        """Return the attributes of a file."""
        with self.pinned(node) as file:
            return self._attributes(file)

    def _attributes(self, descriptor: int) -> CachedAttributes:
        return CachedAttributes(self.identity.attributes(os.fstat(descriptor)))

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Set attributes. The mode comes last: to change the owner clears bits of it."""
        with self.pinned(node) as place:
            if changes.size is not None:
                self._truncate(place, changes.size, handle)
            if changes.uid is not None or changes.gid is not None:
                new = checked(Owner(*(-1 if each is None else each for each in (changes.uid, changes.gid))))
                os.chown(proc_path(place), new.uid, new.gid)
            if changes.mode is not None:
                set_mode(place, self._creator.permissions(changes.mode & 0o177777))
            if changes.atime is not None or changes.mtime is not None:
                set_times(place, changes.atime, changes.mtime)
            return self._attributes(place)

    def _truncate(self, place: int, size: int, handle: Handle | None) -> None:
        if handle is not None:
            with self._opened_file(handle) as file:
                os.ftruncate(file, size)
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
        with self.pinned(node) as link:
            return os.readlink(b"", dir_fd=link)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Make a file that is neither a directory nor a symbolic link."""
        self.quota.require(NAME_SIZE)
        with self.pinned(parent) as directory:
            made = self._creator.node(directory, one_name(name), mode, rdev, owner)
        return self._found(made, self._below(parent, name))

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Make a directory."""
        self.quota.require(NAME_SIZE + BLOCK_SIZE)
        with self.pinned(parent) as directory:
            made = self._creator.directory(directory, one_name(name), mode, owner)
        return self._found(made, self._below(parent, name))

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Make a symbolic link."""
        self.quota.require(NAME_SIZE + BLOCK_SIZE)
        with self.pinned(parent) as directory:
            made = self._creator.symlink(directory, one_name(name), target, owner)
        return self._found(made, self._below(parent, name))

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        self._require_one_side(self.is_public(node), self._below(parent, name))
        self.quota.require(NAME_SIZE)
        with self.pinned(node) as file, self.pinned(parent) as directory:
            os.link(os.fsencode(proc_path(file)), one_name(name), dst_dir_fd=directory)
        self.quota.note_move()
        return self.lookup(parent, name)

    def _require_one_side(self, here: bool, there: bool) -> None:
        if here != there:
            raise os_error(errno.EXDEV)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of a file."""
        with self.pinned(parent) as directory:
            os.unlink(one_name(name), dir_fd=directory)

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        with self.pinned(parent) as directory:
            os.rmdir(one_name(name), dir_fd=directory)

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int = 0) -> None:
        """Move a name, as renameat2(2) with these flags."""
        self._require_one_side(self._below(parent, name), self._below(new_parent, new_name))
        with self.pinned(parent) as here, self.pinned(new_parent) as there:
            if flags:
                syscalls.rename(here, one_name(name), there, one_name(new_name), flags)
            else:
                os.rename(one_name(name), one_name(new_name), src_dir_fd=here, dst_dir_fd=there)
        self.quota.note_move()

    def create(
        self,
        parent: Node,
        name: bytes,
        flags: int,
        mode: int,
        owner: Owner | None,
        announce: Announce | None = None,
    ) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file; ESTALE if the name exists by now. It gets its name within
        ``announce``, where the file system makes files without one.
        """
        kept = flags & _CREATE_FLAGS
        self.quota.require(NAME_SIZE)
        try:
            with self.pinned(parent) as directory:
                new = one_name(name), kept, mode, owner, announce
                made = self._creator.file(directory, *new)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            raise os_error(errno.ESTALE) from None  # the kernel looks it up, and checks permissions
        try:
            place = os.open(proc_path(made), os.O_PATH | os.O_CLOEXEC)
            found = self._found(place, self._below(parent, name))
        except OSError:
            os.close(made)
            raise
        return found, self._opened(made, found.node)

    def create_unnamed(self, parent: Node) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file without a name (O_TMPFILE), to be linked in this directory later.
        Raises OSError: EOPNOTSUPP where there is none.
        """
        with self.pinned(parent) as directory:
            made = open_unnamed(directory, os.O_RDWR, 0o600)
        if made < 0:
            raise os_error(errno.EOPNOTSUPP)
        try:
            found = self._found(os.open(proc_path(made), os.O_PATH | os.O_CLOEXEC), self.is_public(parent))
        except OSError:
            os.close(made)
            raise
        return found, self._opened(made, found.node)

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file; EPERM for any other type."""
        with self.pinned(node) as here:
            if not stat.S_ISREG(os.fstat(here).st_mode):  # before open(2), which has side effects on a FIFO
                raise os_error(errno.EPERM)
            kept = flags & _CREATE_FLAGS | SAFE_FLAGS & ~os.O_NOFOLLOW
            return self._opened(open_past_lease(proc_path(here), kept), node)

    def _opened(self, descriptor: int, node: Node) -> Handle:
        handle = Handle(next(self._handles))
        self._open[handle] = OpenRef(descriptor, node)
        return handle

    def _file(self, handle: Handle) -> OpenRef:
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

    def duplicate(self, handle: Handle) -> int:
        """Return a new descriptor of an open file, to be closed by the caller."""
        with self._opened_file(handle) as file:
            return os.dup(file)

    def read(self, handle: Handle, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes, fewer at the end of the file."""
        with self._opened_file(handle) as file:
            return os.pread(file, min(size, MAX_TRANSFER), offset)

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        """Write at ``offset``, or at the file's present end."""
        with self._opened_file(handle) as file:
            self.quota.require_growth(file, None if append else offset, len(data))
            return os.pwritev(file, [data], offset, os.RWF_APPEND if append else 0)

    def fsync(self, handle: Handle, data_only: bool) -> None:
        """Return when the file, or the directory, is on the flash."""
        with self._opened_file(handle) as file:
            if data_only:
                os.fdatasync(file)
            else:
                os.fsync(file)

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """Allocate or free a range of an open file, as fallocate(2) does."""
        with self._opened_file(handle) as file:
            if not mode & _TAKES_NOTHING:
                self.quota.require_growth(file, offset, length)
            syscalls.allocate(file, mode, offset, length)

    def seek(self, handle: Handle, offset: int, whence: int) -> int:
        """Return the offset at which data or a hole begins, as lseek(2) does."""
        with self._opened_file(handle) as file:
            return os.lseek(file, offset, whence)

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        with self._lock:
            file = self._file(handle)
            del self._open[handle]
            unused = drop(file)
        if unused:
            os.close(file.descriptor)

    def opendir(self, node: Node) -> Handle:
        """Open a directory."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with self.pinned(node) as directory:
            return self._opened(os.open(proc_path(directory), flags), node)

    def readdir(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """Iterate over the names in a directory behind ``offset``."""
        with self._opened_file(handle) as directory:
            yield from list_from(directory, offset, self.identity, self._refs[ROOT].key)

    def readdirplus(self, _handle: Handle, _offset: int, _add: AddEntry) -> None:
        """Raise OSError: EOPNOTSUPP, since a device's kernel asks for no attributes with a listing."""
        raise os_error(errno.EOPNOTSUPP)

    def node_of(self, handle: Handle) -> Node:
        """Return the node of an open file or directory. Raises OSError: EBADF."""
        return self._file(handle).node

    def statfs(self) -> Statistics:
        """Return how full the quota is, or the file system below if that is fuller."""
        root = self.top.encode()
        return self.quota.clipped(statistics(root + b"/" + self._public if self._public else root))

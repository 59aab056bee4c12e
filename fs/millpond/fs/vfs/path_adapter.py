# SPDX-License-Identifier: Apache-2.0
"""Pure: the operations of an inode-based tree by path, for bindings and programs that work by path."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from millpond.fs.vfs.bulk_api import BulkFs, FileRead, SmallFile
from millpond.fs.vfs.inode_api import ROOT, ExtendedFs, FoundEntry, InodeFs, Node, SetAttr
from millpond.fs.vfs.path_api import (
    Attributes,
    DirectoryEntry,
    Handle,
    Owner,
    Statistics,
    components,
    os_error,
)

_TRIES = 10


class PathAdapter:
    """The files of ``tree`` by path. Each operation walks its path anew: no name is cached, and no symbolic
    link followed. Each method raises OSError, and nothing else, when it fails.
    """

    def __init__(self, tree: InodeFs) -> None:
        self._tree = tree
        self._open: dict[Handle, tuple[Node, bool]] = {}

    def _walk(self, path: str) -> FoundEntry:
        return self._tree.walk(ROOT, [_bytes(name) for name in components(path)])

    @contextlib.contextmanager
    def _at(self, path: str) -> Iterator[FoundEntry]:
        """Look up the path; the entry is valid until the end of the block."""
        found = self._walk(path)
        try:
            yield found
        finally:
            self._tree.forget(found.node, 1)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[Node, bytes]]:
        """Look up the directory of a path's last name; yields its node and that name."""
        names = components(path)
        if not names:
            raise os_error(errno.EBUSY)  # the root has no name
        with self._at("/".join(names[:-1])) as found:
            yield found.node, _bytes(names[-1])

    def _made(self, found: FoundEntry) -> None:
        self._tree.forget(found.node, 1)

    def getattr(self, path: str) -> Attributes:
        """Return the attributes of a file; of a symbolic link, its own."""
        with self._at(path) as found:
            return found.attributes

    def readdir(self, path: str) -> tuple[DirectoryEntry, ...]:
        """Return all names in a directory but ``.`` and ``..``."""
        with self._at(path) as found:
            handle = self._tree.opendir(found.node)
            try:
                return tuple(e for e in self._tree.readdir(handle, 0) if e.name not in (".", ".."))
            finally:
                self._tree.release(handle)

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link, as it was stored."""
        with self._at(path) as found:
            return os.fsdecode(self._tree.readlink(found.node))

    def mknod(self, path: str, mode: int, owner: Owner | None = None, rdev: int = 0) -> None:
        """Make a file of any type that mknod(2) can; only root of the machine can make devices (EPERM)."""
        with self._parent(path) as (parent, name):
            self._made(self._tree.mknod(parent, name, mode, rdev, owner))

    def mkdir(self, path: str, mode: int, owner: Owner | None = None) -> None:
        """Make a directory."""
        with self._parent(path) as (parent, name):
            self._made(self._tree.mkdir(parent, name, mode, owner))

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""
        with self._parent(path) as (parent, name):
            self._tree.unlink(parent, name)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        with self._parent(path) as (parent, name):
            self._tree.rmdir(parent, name)

    def symlink(self, target: str, path: str, owner: Owner | None = None) -> None:
        """Make a symbolic link at ``path`` that holds ``target`` as it is."""
        with self._parent(path) as (parent, name):
            self._made(self._tree.symlink(parent, name, _bytes(target), owner))

    def rename(self, old: str, new: str) -> None:
        """Move a name, replacing what ``new`` was."""
        with self._parent(old) as (parent, name), self._parent(new) as (new_parent, new_name):
            self._tree.rename(parent, name, new_parent, new_name)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name."""
        with self._at(old) as found, self._parent(new) as (parent, name):
            self._made(self._tree.link(found.node, parent, name))

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits; EOPNOTSUPP for a symbolic link."""
        with self._at(path) as found:
            if stat.S_ISLNK(found.attributes.mode):
                raise os_error(errno.EOPNOTSUPP, path)
            self._tree.setattr(found.node, SetAttr(mode=mode))

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 keeps one."""
        with self._at(path) as found:
            self._tree.setattr(found.node, SetAttr(uid=_id(uid), gid=_id(gid)))

    def truncate(self, path: str, size: int) -> None:
        """Cut or extend a file to ``size`` bytes."""
        with self._at(path) as found:
            self._tree.setattr(found.node, SetAttr(size=size))

    def utimens(self, path: str, atime: int, mtime: int) -> None:
        """Set the times, in nanoseconds."""
        with self._at(path) as found:
            self._tree.setattr(found.node, SetAttr(atime=atime, mtime=mtime))

    @contextlib.contextmanager
    def extended(self, path: str) -> Iterator[tuple[ExtendedFs, Node]]:
        """Yield what has the extended attributes of a file, and its node there."""
        with self._at(path) as found:
            yield self._tree.extended, found.node

    def open(self, path: str, flags: int, mode: int = 0, owner: Owner | None = None) -> Handle:
        """Open a regular file; create it as ``flags`` say. EISDIR, ELOOP or EPERM for anything else. Flags
        that count: access mode, O_CREAT, EXCL, TRUNC, APPEND, SYNC, DSYNC.
        """
        if flags & os.O_CREAT:
            node, handle = self._created(path, flags, mode, owner)
        else:
            node, handle = self._opened(path, flags)
        self._open[handle] = node, bool(flags & os.O_APPEND)
        return handle

    def _created(self, path: str, flags: int, mode: int, owner: Owner | None) -> tuple[Node, Handle]:
        for _ in range(_TRIES):
            if not flags & os.O_EXCL:
                with contextlib.suppress(FileNotFoundError):
                    return self._opened(path, flags & ~os.O_CREAT)
            with self._parent(path) as (parent, name):
                try:
                    found, handle = self._tree.create(parent, name, flags, mode, owner)
                except OSError as error:
                    if error.errno != errno.ESTALE:  # another process has made the file meanwhile
                        raise
                else:
                    return found.node, handle
        raise os_error(errno.ESTALE, path)

    def _opened(self, path: str, flags: int) -> tuple[Node, Handle]:
        found = self._walk(path)
        try:
            _require_regular(found, path)
            return found.node, self._tree.open(found.node, flags)
        except OSError:
            self._tree.forget(found.node, 1)
            raise

    def read(self, handle: Handle, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes, fewer at the end of the file."""
        self._file(handle)
        return bytes(self._tree.read(handle, size, offset))

    def write(self, handle: Handle, data: bytes, offset: int) -> int:
        """Write at ``offset``, or at the file's end if it was opened with O_APPEND."""
        _, append = self._file(handle)
        return self._tree.write(handle, data, offset, append=append)

    def fsync(self, handle: Handle, data_only: bool = False) -> None:
        """Return when the file is on the flash."""
        self._file(handle)
        self._tree.fsync(handle, data_only)

    def release(self, handle: Handle) -> None:
        """Forget the handle of a file whose last descriptor was closed."""
        node, _ = self._file(handle)
        del self._open[handle]
        self._tree.release(handle)
        self._tree.forget(node, 1)

    def statfs(self) -> Statistics:
        """Return how full the volume is."""
        return self._tree.statfs()

    def ftruncate(self, handle: Handle, size: int) -> None:
        """Cut or extend an open file to ``size`` bytes."""
        node, _ = self._file(handle)
        self._tree.setattr(node, SetAttr(size=size), handle)

    def fgetattr(self, handle: Handle) -> Attributes:
        """Return the attributes of an open file."""
        node, _ = self._file(handle)
        return self._tree.getattr(node).attributes

    def _file(self, handle: Handle) -> tuple[Node, bool]:
        try:
            return self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None


class BulkPathAdapter(PathAdapter):
    """PathAdapter with the operations of ``bulk`` by path. ``root`` is written before a path for users."""

    def __init__(self, tree: InodeFs, bulk: BulkFs, root: str = "") -> None:
        super().__init__(tree)
        self._bulk, self._root = bulk, root

    def shown(self, path: str) -> str:
        """Return the path as a user writes it."""
        return f"{self._root}{path}"

    def list_attributes(self, path: str) -> Iterator[tuple[str, Attributes]]:
        """Iterate over all names in a directory but ``.`` and ``..``, with attributes."""
        names = [_bytes(name) for name in components(path)]
        return ((os.fsdecode(name), found) for name, found in self._bulk.list(ROOT, names))

    def read_small(self, folder: str, names: Sequence[str]) -> dict[str, FileRead]:
        """Return the small regular files of these names in a directory that can be read."""
        with self._at(folder) as at:
            found = self._bulk.read(at.node, [_bytes(name) for name in names])
            return {os.fsdecode(file.name): file for file in found}

    def store_small(self, folder: str, files: Sequence[SmallFile]) -> Sequence[int]:
        """Store small files in a directory, each whole or not at all. Returns an errno for each."""
        with self._at(folder) as at:
            return self._bulk.store(at.node, files)


def _require_regular(found: FoundEntry, path: str) -> None:
    mode = found.attributes.mode
    if stat.S_ISDIR(mode):
        raise os_error(errno.EISDIR, path)
    if stat.S_ISLNK(mode):
        raise os_error(errno.ELOOP, path)


def _bytes(name: str) -> bytes:
    try:
        return os.fsencode(name)
    except UnicodeEncodeError:
        raise os_error(errno.EINVAL) from None


def _id(number: int) -> int | None:
    return None if number == -1 else number

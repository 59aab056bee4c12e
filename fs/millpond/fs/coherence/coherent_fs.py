"""Edge: a Tree whose changes are announced first, so that nobody goes on with what he keeps of a file."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.filelocks.local import RoutedLocks
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.mmap_writers import MmapWriters
from millpond.fs.vfs.inode_api import Buffer, CachedAttributes, CacheMode, FoundEntry, Locking, Node, SetAttr
from millpond.fs.vfs.path_api import DirectoryEntry, Handle, Owner, os_error

if TYPE_CHECKING:  # whoever guards otherwise, as the device's own mount does, needs no master
    from millpond.fs.coherence.manager import DelegationManager

log = logging.getLogger(__name__)
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Revoking(Protocol):
    """A change that has begun."""

    def revoke(self, *inodes: int) -> None:
        """Return once nobody else keeps these, too. Raises WouldWait and OSError."""


class DelegationBreaker(Protocol):
    """Announces the changes of one of those who share a volume."""

    def change(self, *directories: int, inodes: tuple[int, ...] = ()) -> AbstractContextManager[Revoking]:
        """Around a change of these directories, by nobody else at the same time, and of other files. Raises
        WouldWait and OSError.
        """

    def settle(self, inode: int) -> bool:
        """Before this one looks at a directory: return once nobody else has it exclusively; False if it is
        certain that nobody had. Raises WouldWait and OSError.
        """

    def begin_writing(self, inode: int, *, anyway: bool = False) -> bool:
        """This one's kernel is to write the file itself; False if it may not, unless ``anyway``. Within a
        change of it.
        """

    def end_writing(self, inode: int) -> None:
        """It writes the file no longer."""


@dataclass(frozen=True, slots=True)
class ClientDelegationBreaker:
    """Of one client of the master."""

    master: DelegationManager
    holder: Holder

    def change(self, *directories: int, inodes: tuple[int, ...] = ()) -> AbstractContextManager[Revoking]:
        """Around a change of these."""
        return self.master.change(self.holder, *directories, inodes=inodes)

    def settle(self, inode: int) -> bool:
        """Return once no other client has it exclusively."""
        return self.master.settle(self.holder, inode)

    def begin_writing(self, _inode: int, *, anyway: bool = False) -> bool:  # noqa: ARG002
        """All that a client writes is seen."""
        return False

    def end_writing(self, inode: int) -> None:
        """It never began."""


class CoherentFs:
    """``tree`` with the changes of its public part announced to ``guard``; a Tree itself. With ``by_kernel``,
    files open for writing are the kernel's to write, where the guard lets it. The file locks of the public
    part are ``locks``, if they are shared.
    """

    def __init__(
        self,
        tree: BackingFs,
        guard: DelegationBreaker,
        *,
        by_kernel: bool = False,
        locks: Locking | None = None,
    ) -> None:
        self._tree, self._guard, self._by_kernel = tree, guard, by_kernel
        self._open: dict[Handle, Node] = {}
        self.locks: Locking = RoutedLocks(tree.is_public, locks, tree.locks) if locks else tree.locks
        self._of: dict[Node, set[Handle]] = {}
        self._lock = threading.Lock()
        self._by_daemon: set[Handle] = set()
        self._by_the_kernel: dict[Handle, int] = {}
        self._mapped = MmapWriters()
        self._listed: dict[Handle, Node] = {}
        self.forget, self.readlink, self.statfs = tree.forget, tree.readlink, tree.statfs
        self.read = tree.read
        self.descriptor, self.fsync, self.seek = tree.descriptor, tree.fsync, tree.seek

    def settle(self, node: Node) -> bool:
        """Return once nobody else has this directory exclusively; False if it is certain that nobody had."""
        return self._tree.is_public(node) and self._guard.settle(self._tree.inode(node))

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """The file with this name."""
        self.settle(parent)
        return self._as_it_is(self._tree.lookup(parent, name))

    def _as_it_is(self, found: FoundEntry) -> FoundEntry:
        """A directory that has just been found may be another's."""
        if not stat.S_ISDIR(found.attributes.mode):
            return found
        try:
            if not self.settle(found.node):
                return found
            return replace(found, attributes=self._tree.getattr(found.node).attributes)
        except BaseException:
            self._tree.forget(found.node, 1)
            raise

    def walk(self, start: Node, names: Sequence[bytes]) -> FoundEntry:
        """Where a path of names leads."""
        if not names:
            self.settle(start)
            return self._tree.walk(start, names)
        at = start
        for name in names:
            try:
                found = self.lookup(at, name)
            finally:
                if at != start:
                    self._tree.forget(at, 1)
            at = found.node
        return found

    def getattr(self, node: Node) -> CachedAttributes:
        """The attributes of a file."""
        self.settle(node)
        return self._tree.getattr(node)

    def opendir(self, node: Node) -> Handle:
        """Open a directory."""
        handle = self._tree.opendir(node)
        self._listed[handle] = node
        return handle

    def readdir(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """The names in a directory from the one at ``offset`` on."""
        if offset == 0 and handle in self._listed:
            self.settle(self._listed[handle])
        return self._tree.readdir(handle, offset)

    @contextlib.contextmanager
    def _changing(self, *places: tuple[Node, bytes], inodes: tuple[int, ...] = ()) -> Iterator[None]:
        """Around a change of what these names in directories stand for. What is in the private part is
        nobody else's.
        """
        shared = [(node, name) for node, name in places if self._tree.is_public(node)]
        if not shared:
            yield
            return
        before = self._behind(shared)
        directories = [self._tree.inode(node) for node, _ in shared]
        with self._guard.change(*directories, inodes=(*inodes, *before)) as change:
            if others := set(self._behind(shared)) - set(before):  # now that nobody changes them
                change.revoke(*others)
            yield

    def _behind(self, places: Sequence[tuple[Node, bytes]]) -> tuple[int, ...]:
        found = (self._tree.inode_of(node, name) for node, name in places)
        return tuple(inode for inode in found if inode is not None)

    @contextlib.contextmanager
    def _revoked(self, node: Node) -> Iterator[None]:
        """Around a change of the file itself."""
        if not self._tree.is_public(node):
            yield
            return
        with self._guard.change(inodes=(self._tree.inode(node),)):
            yield

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Change attributes."""
        with self._revoked(node):
            return self._tree.setattr(node, changes, handle)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Make a file that is neither a directory nor a symbolic link."""
        with self._changing((parent, name)):
            return self._tree.mknod(parent, name, mode, rdev, owner)

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Make a directory."""
        with self._changing((parent, name)):
            return self._tree.mkdir(parent, name, mode, owner)

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Make a symbolic link."""
        with self._changing((parent, name)):
            return self._tree.symlink(parent, name, target, owner)

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        with self._changing((parent, name), inodes=(self._tree.inode(node),)):
            return self._tree.link(node, parent, name)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of a file."""
        with self._changing((parent, name)):
            self._tree.unlink(parent, name)

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        with self._changing((parent, name)):
            self._tree.rmdir(parent, name)

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int = 0) -> None:
        """Move a name."""
        with self._changing((parent, name), (new_parent, new_name)):
            self._tree.rename(parent, name, new_parent, new_name, flags)

    def create(
        self, parent: Node, name: bytes, flags: int, mode: int, owner: Owner | None
    ) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file."""
        with self._changing((parent, name)):
            found, handle = self._tree.create(parent, name, flags, mode, owner)
            self._opened(found.node, handle, flags)
        return found, handle

    def prepare(self, parent: Node) -> tuple[FoundEntry, Handle]:
        """Make and open a file without a name, of which nobody else knows."""
        found, handle = self._tree.prepare(parent)
        self._opened(found.node, handle, os.O_RDWR)
        return found, handle

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file."""
        if flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY:
            handle = self._tree.open(node, flags)
            self._opened(node, handle, flags)
            return handle
        with self._revoked(node):
            handle = self._tree.open(node, flags)
            self._opened(node, handle, flags)
        return handle

    def _opened(self, node: Node, handle: Handle, flags: int) -> None:
        """In the same way as by others who have it open: the kernel knows no other (EIO)."""
        self._open[handle] = node
        if not (self._by_kernel and self._tree.is_public(node)):
            return
        with self._lock:
            others = self._of.setdefault(node, set())
            by_daemon = bool(others) and others <= self._by_daemon
            others.add(handle)
            if by_daemon:
                self._by_daemon.add(handle)
        if flags & os.O_ACCMODE != os.O_RDONLY and not by_daemon:
            self._write_by_kernel(node, handle)

    def _write_by_kernel(self, node: Node, handle: Handle) -> None:
        """Unless the guard refuses, and nobody else has it open by now whom the kernel serves itself."""
        inode = self._tree.inode(node)
        if not self._guard.begin_writing(inode):
            with self._lock:
                if self._of[node] == {handle}:
                    self._by_daemon.add(handle)
                    return
            self._guard.begin_writing(inode, anyway=True)
        self._by_the_kernel[handle] = inode

    def access(self, handle: Handle) -> CacheMode:
        """How the kernel has to read and write an open file."""
        return CacheMode.DIRECT if handle in self._by_daemon else CacheMode.KERNEL

    def write(
        self,
        handle: Handle,
        data: Buffer,
        offset: int,
        *,
        append: bool = False,
        unless: Callable[[], bool] = lambda: False,
    ) -> int:
        """Write at ``offset``, or at the file's end. Raises OSError: EIO ``unless`` it may, once others have
        given up what they keep.
        """
        with self._revoked(self._node(handle)):
            if unless():
                raise os_error(errno.EIO)
            return self._tree.write(handle, data, offset, append=append)

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """As fallocate(2)."""
        with self._revoked(self._node(handle)):
            self._tree.allocate(handle, mode, offset, length)

    def _node(self, handle: Handle) -> Node:
        try:
            return self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        self._tree.release(handle)
        self._listed.pop(handle, None)
        node = self._open.pop(handle, None)
        with self._lock:
            self._by_daemon.discard(handle)
            if node in self._of:
                self._of[node].discard(handle)
                if not self._of[node]:
                    del self._of[node]
        if (inode := self._by_the_kernel.pop(handle, None)) is not None and node is not None:
            self._end_writing(node, inode)

    def _end_writing(self, node: Node, inode: int) -> None:
        """Once nobody has it mapped, either."""
        try:
            looking = self._tree.open(node, os.O_RDONLY)
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                log.warning("a file may be mapped, and cannot be looked at: %s", error.strerror)
                return  # nobody is granted it any more
            self._guard.end_writing(inode)
            return

        def over() -> None:
            self._tree.release(looking)
            self._guard.end_writing(inode)

        self._mapped.closed(inode, self._tree.descriptor(looking), over)

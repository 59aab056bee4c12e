# SPDX-License-Identifier: Apache-2.0
"""Edge: a file system that recalls other clients' delegations before each change."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.bulk_files import store_files
from millpond.fs.store.create import Announce
from millpond.fs.store.directories import list_with_lookups
from millpond.fs.store.mmap_writers import MmapWriters
from millpond.fs.vfs.bulk_api import SmallFile
from millpond.fs.vfs.inode_api import (
    AddEntry,
    Buffer,
    CachedAttributes,
    CacheMode,
    FoundEntry,
    Locking,
    Node,
    SetAttr,
)
from millpond.fs.vfs.path_api import Handle, Owner, os_error

if TYPE_CHECKING:  # the device's own mount runs without a manager
    from millpond.fs.coherence.manager import DelegationManager

log = logging.getLogger(__name__)
_CANNOT_LOOK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)


class Revoking(Protocol):
    """A write intent that has begun."""

    def recall(self, *inodes: int) -> None:
        """Add these inodes to the intent and wait until no other client holds a delegation of them. Raises
        WouldBlock and OSError.
        """


class DelegationBreaker(Protocol):
    """Announces the changes of one client, or of the device's mount, to the delegation manager."""

    def write_intent(
        self, *directories: int, inodes: tuple[int, ...] = ()
    ) -> AbstractContextManager[Revoking]:
        """Hold a write intent for a block: on these directories, which no other intent changes meanwhile, and
        on other files. Raises WouldBlock and OSError.
        """

    def recall_writer(self, inode: int) -> bool:
        """Recall another client's write delegation of a file that was just found, and wait. False: there
        certainly was none. Raises WouldBlock and OSError.
        """

    def begin_writing(self, inode: int, *, force: bool = False) -> bool:
        """Register that this side's kernel is to write the file by passthrough. False if it may not, unless
        ``force``. Called within a write intent on the file.
        """

    def try_writing(self, inode: int) -> bool | None:
        """Register the same without a write intent, which takes one message. None, with nothing registered,
        if an intent is needed, since a delegation has to be recalled first.
        """

    def end_writing(self, inode: int) -> None:
        """Report that this side's kernel writes the file no longer."""


@dataclass(frozen=True, slots=True)
class ClientDelegationBreaker:
    """DelegationBreaker of one client of the delegation manager."""

    delegations: DelegationManager
    holder: Holder

    def write_intent(
        self, *directories: int, inodes: tuple[int, ...] = ()
    ) -> AbstractContextManager[Revoking]:
        """Hold a write intent for a block."""
        return self.delegations.write_intent(self.holder, *directories, inodes=inodes)

    def recall_writer(self, inode: int) -> bool:
        """Recall another client's write delegation of this file."""
        return self.delegations.recall_writer(self.holder, inode)

    def begin_writing(self, _inode: int, *, force: bool = False) -> bool:  # noqa: ARG002
        """Return False: a client's writes all go through the server."""
        return False

    def try_writing(self, _inode: int) -> bool | None:
        """Return None: no client's kernel writes files."""
        return None

    def end_writing(self, inode: int) -> None:
        """Do nothing: no passthrough write ever began."""


class CoherentFs:
    """InodeFs over ``tree`` that announces changes to ``breaker``. With ``passthrough``, the kernel writes
    files that are open for writing itself, where the breaker allows it. ``locks`` are the file locks, if they
    are shared with others.
    """

    def __init__(
        self,
        tree: BackingFs,
        breaker: DelegationBreaker,
        *,
        passthrough: bool = False,
        locks: Locking | None = None,
    ) -> None:
        self._tree, self._breaker, self._passthrough = tree, breaker, passthrough
        self._open: dict[Handle, Node] = {}
        self.locks: Locking = locks or tree.locks
        self._handles_of: dict[Node, set[Handle]] = {}
        self._lock = threading.Lock()
        self._direct: set[Handle] = set()
        self._passthrough_inodes: dict[Handle, int] = {}
        self._mapped = MmapWriters()
        self.extended = tree.extended.within(self._file_intent)
        self.forget, self.readlink, self.statfs = tree.forget, tree.readlink, tree.statfs
        self.opendir, self.readdir, self.read = tree.opendir, tree.readdir, tree.read
        self.descriptor, self.fsync, self.seek = tree.descriptor, tree.fsync, tree.seek

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """Return the file with this name, as it is once its host has sent what it has gathered."""
        found = self._tree.lookup(parent, name)
        if not self._tree.is_public(found.node):
            return found
        try:
            if not self._breaker.recall_writer(self._tree.inode(found.node)):
                return found
            return replace(found, attributes=self._tree.getattr(found.node).attributes)
        except BaseException:
            self._tree.forget(found.node, 1)
            raise

    def walk(self, start: Node, names: Sequence[bytes]) -> FoundEntry:
        """Look up a path of names."""
        if not names:
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
        """Return the attributes of a file."""
        return self._tree.getattr(node)

    def readdirplus(self, handle: Handle, offset: int, add: AddEntry) -> None:
        """List a directory with attributes."""
        list_with_lookups(self, self._tree.directory_of(handle), handle, offset, add)

    @contextlib.contextmanager
    def _name_intent(self, *places: tuple[Node, bytes], inodes: tuple[int, ...] = ()) -> Iterator[None]:
        """Hold a write intent on these directories and on the files that these names in them stand for."""
        before = self._inodes_of(places)
        directories = [self._tree.inode(node) for node, _ in places]
        with self._breaker.write_intent(*directories, inodes=(*inodes, *before)) as change:
            if others := set(self._inodes_of(places)) - set(before):  # looked up again under the intent
                change.recall(*others)
            yield

    def _inodes_of(self, places: Sequence[tuple[Node, bytes]]) -> tuple[int, ...]:
        found = (self._tree.inode_of(node, name) for node, name in places)
        return tuple(inode for inode in found if inode is not None)

    def _file_intent(self, node: Node) -> AbstractContextManager[Revoking]:
        """Hold a write intent on the file itself for a block."""
        return self._breaker.write_intent(inodes=(self._tree.inode(node),))

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Change attributes."""
        with self._file_intent(node):
            return self._tree.setattr(node, changes, handle)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Make a file that is neither a directory nor a symbolic link."""
        with self._name_intent((parent, name)):
            return self._tree.mknod(parent, name, mode, rdev, owner)

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Make a directory."""
        with self._name_intent((parent, name)):
            return self._tree.mkdir(parent, name, mode, owner)

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Make a symbolic link."""
        with self._name_intent((parent, name)):
            return self._tree.symlink(parent, name, target, owner)

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        with self._name_intent((parent, name), inodes=(self._tree.inode(node),)):
            return self._tree.link(node, parent, name)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of a file."""
        with self._name_intent((parent, name)):
            self._tree.unlink(parent, name)

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        with self._name_intent((parent, name)):
            self._tree.rmdir(parent, name)

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int = 0) -> None:
        """Move a name."""
        with self._name_intent((parent, name), (new_parent, new_name)):
            self._tree.rename(parent, name, new_parent, new_name, flags)

    def create(
        self,
        parent: Node,
        name: bytes,
        flags: int,
        mode: int,
        owner: Owner | None,
        announce: Announce | None = None,
    ) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file; ``announce`` as of BackingFs."""
        with self._name_intent((parent, name)):
            found, handle = self._tree.create(parent, name, flags, mode, owner, announce)
            self._add_open(found.node, handle, flags)
        return found, handle

    def store_files(self, parent: Node, files: Sequence[SmallFile]) -> list[int]:
        """Store small files whole. Returns an errno for each. Nothing is announced, and nothing waited for,
        before they are written: until then no other client can know of them.
        """

        def naming(names: Sequence[bytes]) -> AbstractContextManager[None]:
            return self._name_intent(*((parent, name) for name in names))

        return store_files(self._tree, parent, files, naming)

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file."""
        handle = self._open_at_once(node, flags)
        if handle is None:
            with self._file_intent(node):
                handle = self._tree.open(node, flags)
                self._add_open(node, handle, flags)
        return handle

    def _open_at_once(self, node: Node, flags: int) -> Handle | None:
        """Open a file without a write intent: to read it, or where no client has a delegation that would have
        to be recalled. None if it takes an intent.
        """
        allowed, inode = None, self._tree.inode(node)
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            allowed = (
                None if flags & os.O_TRUNC or not self._passthrough else self._breaker.try_writing(inode)
            )
            if allowed is None:
                return None
        try:
            handle = self._tree.open(node, flags)
        except BaseException:
            if allowed:
                self._breaker.end_writing(inode)
            raise
        self._add_open(node, handle, flags, allowed)
        return handle

    def _add_open(self, node: Node, handle: Handle, flags: int, allowed: bool | None = None) -> None:
        """Note an open file, and choose its cache mode: the same as that of the file's other handles, since
        the kernel refuses a mix (EIO). ``allowed`` is the breaker's answer, if it was asked.
        """
        self._open[handle] = node
        if not self._passthrough:
            return
        with self._lock:
            others = self._handles_of.setdefault(node, set())
            by_daemon = bool(others) and others <= self._direct
            others.add(handle)
            if by_daemon:
                self._direct.add(handle)
        if by_daemon and allowed:
            self._breaker.end_writing(self._tree.inode(node))
        elif flags & os.O_ACCMODE != os.O_RDONLY and not by_daemon:
            self._begin_passthrough(node, handle, allowed)

    def _begin_passthrough(self, node: Node, handle: Handle, allowed: bool | None) -> None:
        """Register the kernel as a writer. If the breaker refuses, the daemon writes (DIRECT), unless another
        handle of the file is in passthrough by now.
        """
        inode = self._tree.inode(node)
        if not (self._breaker.begin_writing(inode) if allowed is None else allowed):
            with self._lock:
                if self._handles_of[node] == {handle}:
                    self._direct.add(handle)
                    return
            self._breaker.begin_writing(inode, force=True)
        self._passthrough_inodes[handle] = inode

    def cache_mode(self, handle: Handle) -> CacheMode:
        """Return how the kernel is to read and write an open file."""
        return CacheMode.DIRECT if handle in self._direct else CacheMode.PASSTHROUGH

    def write(
        self,
        handle: Handle,
        data: Buffer,
        offset: int,
        *,
        append: bool = False,
        is_stale: Callable[[], bool] = lambda: False,
        then: SetAttr | None = None,
    ) -> int:
        """Write at ``offset``, or at the file's end, and set attributes ``then`` if all is written. Raises
        OSError: EIO if ``is_stale``, which is asked once all delegations are recalled.
        """
        node = self._node(handle)
        with self._file_intent(node):
            if is_stale():
                raise os_error(errno.EIO)
            count = self._tree.write(handle, data, offset, append=append)
            if then and count == len(data):
                self._tree.setattr(node, then)
            return count

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """Allocate or free a range of an open file, as fallocate(2) does."""
        with self._file_intent(self._node(handle)):
            self._tree.allocate(handle, mode, offset, length)

    def _node(self, handle: Handle) -> Node:
        try:
            return self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        self._tree.release(handle)
        node = self._open.pop(handle, None)
        with self._lock:
            self._direct.discard(handle)
            if node in self._handles_of:
                self._handles_of[node].discard(handle)
                if not self._handles_of[node]:
                    del self._handles_of[node]
        if (inode := self._passthrough_inodes.pop(handle, None)) is not None and node is not None:
            self._end_writing(node, inode)

    def _end_writing(self, node: Node, inode: int) -> None:
        """Report the end of passthrough writes once the file is not mapped for writing either."""
        try:
            looking = self._tree.open(node, os.O_RDONLY)
        except OSError as error:
            if error.errno in _CANNOT_LOOK:
                log.warning("cannot find out whether a file is still mapped: %s", error.strerror)
                return  # the file stays undelegated
            self._breaker.end_writing(inode)
            return

        def over() -> None:
            self._tree.release(looking)
            self._breaker.end_writing(inode)

        if not self._mapped.closed(inode, self._tree.descriptor(looking), over):
            self._tree.release(looking)  # the file stays undelegated

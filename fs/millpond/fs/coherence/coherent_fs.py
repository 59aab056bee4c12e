# SPDX-License-Identifier: Apache-2.0
"""Edge: a file system that recalls other clients' delegations before each change."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.bulk_files import store_files
from millpond.fs.store.create import Announce
from millpond.fs.vfs.bulk_api import SmallFile
from millpond.fs.vfs.inode_api import Buffer, CachedAttributes, CacheMode, FoundEntry, Locking, Node, SetAttr
from millpond.fs.vfs.path_api import Handle, Owner, os_error

P = ParamSpec("P")
R = TypeVar("R")
WriteIntents = Callable[..., AbstractContextManager[Callable[..., None]]]
"""Holds a write intent for a block: on directories, which no other intent changes meanwhile, and on other
files ``inodes``. Yields what adds more of these, and waits until no other client holds a delegation of them.
Raises OSError."""


class CoherentFs:
    """InodeFs over ``tree`` whose changes are announced: each has a write intent of ``intents``.
    ``recall_writer`` recalls another client's write delegation of a file that was just found, and waits;
    False: there certainly was none. ``locks`` are the file locks, if they are shared with others.
    """

    def __init__(
        self,
        tree: BackingFs,
        intents: WriteIntents,
        recall_writer: Callable[[int], bool],
        locks: Locking | None = None,
    ) -> None:
        self._tree, self._intents, self._recall_writer = tree, intents, recall_writer
        self.locks: Locking = locks or tree.locks
        self.extended = tree.extended.within(self._file_intent)
        self.forget, self.readlink, self.statfs = tree.forget, tree.readlink, tree.statfs
        self.opendir, self.readdir, self.read = tree.opendir, tree.readdir, tree.read
        self.descriptor, self.fsync, self.seek = tree.descriptor, tree.fsync, tree.seek
        self.getattr, self.readdirplus = tree.getattr, tree.readdirplus
        self.cache_mode: Callable[[Handle], CacheMode] = tree.cache_mode
        self.mknod, self.mkdir = self._announced(tree.mknod), self._announced(tree.mkdir)
        self.symlink = self._announced(tree.symlink)
        self.unlink, self.rmdir = self._announced(tree.unlink), self._announced(tree.rmdir)

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """Return the file with this name, as it is once its host has sent what it has gathered."""
        found = self._tree.lookup(parent, name)
        if not self._tree.is_public(found.node):
            return found
        try:
            if not self._recall_writer(self._tree.inode(found.node)):
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

    @contextlib.contextmanager
    def _name_intent(self, *places: tuple[Node, bytes], inodes: tuple[int, ...] = ()) -> Iterator[None]:
        """Hold a write intent on these directories and on the files that these names in them stand for."""
        before = self._inodes_of(places)
        directories = [self._tree.inode(node) for node, _ in places]
        with self._intents(*directories, inodes=(*inodes, *before)) as recall:
            if others := set(self._inodes_of(places)) - set(before):  # looked up again under the intent
                recall(*others)
            yield

    def _inodes_of(self, places: Sequence[tuple[Node, bytes]]) -> tuple[int, ...]:
        found = (self._tree.inode_of(node, name) for node, name in places)
        return tuple(inode for inode in found if inode is not None)

    def _announced(
        self, change: Callable[Concatenate[Node, bytes, P], R]
    ) -> Callable[Concatenate[Node, bytes, P], R]:
        """Return a change of one name that holds a write intent meanwhile."""

        @functools.wraps(change)
        def announced(parent: Node, name: bytes, /, *rest: P.args, **more: P.kwargs) -> R:
            with self._name_intent((parent, name)):
                return change(parent, name, *rest, **more)

        return announced

    def _file_intent(self, node: Node, **more: bool) -> AbstractContextManager[object]:
        """Hold a write intent on the file itself for a block."""
        return self._intents(inodes=(self._tree.inode(node),), **more)

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Change attributes."""
        with self._file_intent(node):
            return self._tree.setattr(node, changes, handle)

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        with self._name_intent((parent, name), inodes=(self._tree.inode(node),)):
            return self._tree.link(node, parent, name)

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
        with self._file_intent(node) if flags & os.O_TRUNC else contextlib.nullcontext():
            handle = self._tree.open(node, flags)
            self._add_open(node, handle, flags)
        return handle

    def _add_open(self, node: Node, handle: Handle, flags: int) -> None:
        """Note an open file."""

    def write(
        self,
        handle: Handle,
        data: Buffer,
        offset: int,
        *,
        append: bool = False,
        reclaim: bool = False,
        is_stale: Callable[[], bool] = lambda: False,
        then: SetAttr | None = None,
    ) -> int:
        """Write at ``offset``, or at the file's end, and set attributes ``then`` if all is written. Raises
        OSError: EIO if ``is_stale``, which is asked once all delegations are recalled. ``reclaim`` as of
        DelegationManager.
        """
        node = self._tree.node_of(handle)
        with self._file_intent(node, **({"reclaim": True} if reclaim else {})):
            if is_stale():
                raise os_error(errno.EIO)
            count = self._tree.write(handle, data, offset, append=append)
            if then and count == len(data):
                self._tree.setattr(node, then)
            return count

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """Allocate or free a range of an open file, as fallocate(2) does."""
        with self._file_intent(self._tree.node_of(handle)):
            self._tree.allocate(handle, mode, offset, length)

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        self._tree.release(handle)

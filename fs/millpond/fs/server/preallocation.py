# SPDX-License-Identifier: Apache-2.0
"""Edge: files preallocated for one client, which get their names when the client flushes them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from millpond.fs.coherence.coherent_fs import CoherentFs
from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto import async_create as n
from millpond.fs.proto.async_create import (
    MAX_BATCH,
    MAX_TIME,
    ROOM,
    NameUpdate,
    Preallocate,
    Preallocated,
    Touched,
)
from millpond.fs.proto.dirents import pack_entries
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import Buffer, FoundEntry, Node
from millpond.fs.vfs.path_api import Attributes, DirectoryEntry, Handle, os_error, within

log = logging.getLogger(__name__)
_MAX_PREALLOCATED = 1024  # of one client
_MAX_NAMES = 10_000  # in a directory delegated exclusively: the grant lists them all
_MAX_ENTRY_BYTES = 264  # bytes of a name in a directory
_MIN_FREE_BYTES = 64 << 20  # on the flash, below which nothing is preallocated: others need the rest
_MIN_FREE_FILES = 1024  # likewise
Keep = Callable[[FoundEntry, Handle], int]
Close = Callable[[Node, Handle], None]
_Contents = tuple[memoryview, int, int]
_Made = tuple[FoundEntry, Handle, int]
"""A preallocated file, its handle, and the grant of its attributes."""


@dataclass(frozen=True, slots=True)
class _File:
    """A preallocated file, with room reserved for its name in the directory with this inode, and for a little
    that it may hold.
    """

    parent: Node
    directory: int
    handle: Handle


class PreallocatedFiles:
    """Unnamed files of one client. ``keep`` notes that the client knows a file and has it open, and grants
    its attributes; raises OSError. ``close`` undoes that, unless the client has.
    """

    def __init__(
        self,
        tree: BackingFs,
        coherent: CoherentFs,
        delegations: DelegationManager,
        holder: Holder,
        keep: Keep,
        close: Close,
    ) -> None:
        self._tree, self._coherent, self._register, self._close_and_forget = tree, coherent, keep, close
        self._delegations, self._holder = delegations, holder
        self._files: dict[Node, _File] = {}
        self._parents: Counter[Node] = Counter()
        self._last_serial = 0
        self._flush_lock = threading.Lock()
        self._lock, self._closed = threading.Lock(), False

    @property
    def count(self) -> int:
        """Number of files that have no name yet."""
        return len(self._files)

    def is_pinned(self, node: Node) -> bool:
        """Return whether names may still be flushed in this directory, which must not be forgotten then."""
        return node in self._parents

    def answer(self, request: Preallocate, node_of: Callable[[int], Node]) -> tuple[Preallocated, bytes]:
        """Perform a Preallocate request. Returns the reply and its payload. Raises OSError."""
        with self._pinned(Node(request.node)):
            node = node_of(request.node)
            if request.granted:
                return self._preallocate(node, request.granted, request.count), b""
            return self._grant_exclusive(node, request.count)

    @contextlib.contextmanager
    def _pinned(self, directory: Node) -> Iterator[None]:
        """Keep the directory from being forgotten while its first files are being preallocated."""
        with self._lock:
            self._parents[directory] += 1
        try:
            yield
        finally:
            with self._lock:
                self._unpin(directory)

    def _unpin(self, directory: Node) -> None:
        self._parents[directory] -= 1
        self._parents = +self._parents

    def _grant_exclusive(self, node: Node, count: int) -> tuple[Preallocated, bytes]:
        """Grant an exclusive delegation of the directory, with its listing and first preallocated files;
        refuse if anything speaks against it.
        """
        within(count, 1, MAX_BATCH)
        inode = self._tree.inode(node)
        granted = self._delegations.grant_exclusive(self._holder, inode) if self._may_grant(node) else 0
        if not granted:
            return Preallocated(0), b""
        self._close_former(inode)
        try:
            if (names := self._list_names(node)) is not None:
                prepared = self._preallocate(node, granted, count)
                if prepared.nodes:
                    return prepared, pack_entries(names)
        except OSError as error:
            log.debug("no exclusive delegation of a directory: %s", error)
        self._delegations.downgrade(self._holder, inode)
        return Preallocated(0), b""

    def _close_former(self, directory: int) -> None:
        """Close the files preallocated under an earlier delegation of the directory: they can get no name
        now.
        """
        for node, file in list(self._files.items()):
            if file.directory == directory:
                self._close_and_forget(node, file.handle)

    def _may_grant(self, node: Node) -> bool:
        """Return whether names can be made in the directory, and there is room to spare."""
        return self._tree.is_public(node) and self._tree.can_preallocate(node) and self._has_room()

    def _has_room(self) -> bool:
        s = self._tree.statfs()
        return (
            s.available * s.fragment_size >= _MIN_FREE_BYTES
            and s.files_free >= _MIN_FREE_FILES
            and not self._tree.is_full
        )

    def _list_names(self, node: Node) -> list[DirectoryEntry] | None:
        """Return all names in a directory; None if they are too many."""
        if self._tree.getattr(node).attributes.size > _MAX_NAMES * _MAX_ENTRY_BYTES:
            return None  # listing them would take long
        handle = self._tree.opendir(node)
        try:
            found = [entry for entry in self._tree.readdir(handle, 0) if entry.name not in (".", "..")]
        finally:
            self._tree.release(handle)
        return found if len(found) <= _MAX_NAMES else None

    def _preallocate(self, node: Node, granted: int, count: int) -> Preallocated:
        """Preallocate up to ``count`` files, as there is room. Raises OSError: ESTALE if the directory is not
        the client's under this delegation, or the reason why there is not even one.
        """
        within(count, 1, MAX_BATCH)
        if not self._delegations.holds_exclusive(self._holder, self._tree.inode(node), granted):
            raise os_error(errno.ESTALE)
        count = min(count, _MAX_PREALLOCATED - len(self._files)) if self._has_room() else 0
        held = self._tree.reserve_names(node, count)
        made: list[_Made] = []
        try:
            while len(made) < held and not self._tree.is_full:
                made.append(self._create_one(node))
        except OSError:
            if not made:
                raise
        finally:
            self._tree.release_names(held - len(made))
        return _preallocated_reply(granted, made, self._tree.reservation.contents)

    def _create_one(self, directory: Node) -> _Made:
        """Create one unnamed file, for whose name room is reserved. Raises OSError."""
        inode = self._tree.inode(directory)
        found, handle = self._coherent.create_unnamed(directory)
        try:
            granted = self._register(found, handle)
            self._add(found.node, _File(directory, inode, handle))
        except OSError:  # the client never learns of it
            self._close_and_forget(found.node, handle)
            raise
        return found, handle, granted

    def _add(self, node: Node, file: _File) -> None:
        with self._lock:
            if self._closed:
                raise os_error(errno.ESTALE)
            self._files[node] = file
            self._parents[file.parent] += 1

    def _remove(self, node: Node) -> None:
        """Remove a file that has its name now, or will get none."""
        with self._lock:
            if (file := self._files.pop(node, None)) is None:
                return
            self._unpin(file.parent)
        self._tree.release_names(1)

    def close(self) -> None:
        """Release all reservations of a client that is gone."""
        with self._lock:
            self._closed, left = True, list(self._files)
        for node in left:
            self._remove(node)

    def forget(self, node: Node, handle: Handle) -> None:
        """Forget a preallocated file that the client has closed without naming it."""
        if (file := self._files.get(node)) and file.handle == handle:
            self._remove(node)

    def answer_flush(
        self, request: n.FlushNames, payload: Buffer, node_of: Callable[[int], Node]
    ) -> n.NamesFlushed:
        """Perform a FlushNames request, with the contents in its payload. Raises OSError."""
        if len(request.contents) > MAX_BATCH:
            raise os_error(errno.EMSGSIZE)
        filled = self.flush(
            request.updates, node_of, request.touched, _unpack_contents(request.contents, payload)
        )
        return n.NamesFlushed(tuple(self._tree.getattr(node).attributes for node in filled))

    def flush(
        self,
        names: Sequence[NameUpdate],
        node_of: Callable[[int], Node],
        touched: Sequence[Touched] = (),
        contents: Mapping[int, _Contents] | None = None,
        *,
        changed_next: Node | None = None,
    ) -> list[Node]:
        """Give preallocated files their names, with their contents by serial number, and update the times of
        the ``touched`` directories. No time is kept of the file ``changed_next``, whose data follows. Returns
        the files that had contents. Raises OSError.
        """
        if max(len(names), len(touched)) > MAX_BATCH:
            raise os_error(errno.EMSGSIZE)
        filled: list[Node] = []
        if not (names or touched):
            return filled
        with self._flush_lock:
            new = [each for each in names if each.serial > self._last_serial]
            places: list[NameUpdate | Touched] = [*new, *touched]
            directories = {node: node_of(node) for node in {each.directory for each in places}}
            inodes = {number: self._tree.inode(node) for number, node in directories.items()}
            grants = {inodes[each.directory]: each.granted for each in places}
            with self._delegations.flushing(self._holder, grants):
                for each in new:
                    what = (contents or {}).get(each.serial)
                    self._link(each, directories[each.directory], inodes[each.directory], what)
                    filled += [Node(each.node)] if what else []
                    if each.node != changed_next:
                        self._keep_time(Node(each.node), what[2] if what else each.time)
                for one in touched:
                    self._tree.touch(directories[one.directory])
        return filled

    def _link(self, naming: NameUpdate, directory: Node, inode: int, what: _Contents | None) -> None:
        """Give one file its name, once its contents are written: others never see it without them."""
        node = Node(naming.node)
        file = self._files.get(node)
        if file is None or file.directory != inode:
            raise os_error(errno.ESTALE)
        time = within(naming.time, 0, MAX_TIME)
        data, accessed, _ = what or (b"", time, time)
        if len(data) > self._tree.reservation.contents:
            raise os_error(errno.EFBIG)
        if data:
            self._tree.fill(file.handle, data)
        mode = within(naming.mode, 0, 0o777)
        self._tree.link_unnamed(node, directory, naming.name, mode, time, within(accessed, 0, MAX_TIME))
        self._remove(node)
        self._last_serial = naming.serial

    def _keep_time(self, node: Node, changed: int) -> None:
        """Have hosts be told this change time of a file that nobody else can change yet."""
        with self._tree.pinned(node) as place:
            self._tree.identity.times.keep(os.fstat(place), changed)


def _unpack_contents(contents: Sequence[n.Contents], payload: Buffer) -> dict[int, _Contents]:
    """Return each file's contents, access and change time by the serial number of its name. Raises OSError:
    EINVAL if the payload is of another length.
    """
    left, found = memoryview(payload), {}
    for each in contents:
        size = within(each.size, 0, len(left))
        found[each.serial] = left[:size], each.accessed, each.changed
        left = left[size:]
    if left:
        raise os_error(errno.EINVAL)
    return found


def _preallocated_reply(granted: int, made: Sequence[_Made], room: int) -> Preallocated:
    attributes: Attributes | None = None
    for found, *_ in made:
        attributes = replace(found.attributes, inode=0)
    return Preallocated(
        granted,
        attributes,
        tuple(found.node for found, *_ in made),
        tuple(handle for _, handle, *_ in made),
        tuple(found.attributes.inode for found, *_ in made),
        tuple(number for _, _, number in made),
        min(room, ROOM),
    )

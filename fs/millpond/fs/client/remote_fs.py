"""Edge: a Tree that lies on a device, reached over connections that may be lost and dialled again."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from millpond.base.deadline import Deadline
from millpond.fs.client.async_create import AsyncCreate
from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.client.cache.invalidation import Invalidation
from millpond.fs.client.cache.small_files import MOST, SmallFileCache, wanted
from millpond.fs.client.file_locks import over_lanes
from millpond.fs.client.open_dirs import OpenDirectories
from millpond.fs.client.open_files import OpenFile, OpenFiles, Told, may_keep
from millpond.fs.client.prefetcher import Prefetcher
from millpond.fs.client.readahead import Readahead
from millpond.fs.client.rpc import AbsentName, Dial
from millpond.fs.client.rpc_pool import RpcCall, RpcPool, now
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.setattr import set_attributes
from millpond.fs.vfs.inode_api import (
    Buffer,
    CachedAttributes,
    CacheMode,
    FoundEntry,
    NegativeEntry,
    Node,
    SetAttr,
    may_block,
    one_name,
)
from millpond.fs.vfs.path_api import (
    MAX_TRANSFER,
    Attributes,
    DirectoryEntry,
    Handle,
    Owner,
    Statistics,
    os_error,
)
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
_DEFAULT_SECONDS = 15.0
_REFUSED_SECONDS = 15.0
_MOMENT = 0.001
_EXCHANGE = 2  # RENAME_EXCHANGE


class LeaseKeeper(Protocol):
    """Keeps up the lease."""

    def await_lease(self, file: CachedInode) -> None:
        """Return once there is a lease, or the file is recalled. Raises WouldWait and OSError."""

    def drop_soon(self, file: CachedInode) -> None:
        """With the book's lock: have dropped what is about to be told of a file, which may not be kept."""


class RemoteFs:
    """The Tree behind the connections that ``dial`` makes; ``timeout`` is in seconds for each operation.

    A lost connection is dialled again at the next operation, and within one: nothing is done twice. If the
    server has forgotten this client, most likely because it was started again, EIO says of what may not be
    repeated that nobody knows whether it was done, and files are found and opened again when they are next
    used: ESTALE if their name means another file by now. ETIMEDOUT when the time is up.

    What the server grants is kept as long as a ``keeper`` keeps up the lease. Threads may call at once.
    """

    def __init__(self, dial: Dial, timeout: float = _DEFAULT_SECONDS) -> None:
        self.lanes = RpcPool(dial, timeout)
        self._book, self._lock = self.lanes.book, self.lanes.lock
        self._files = OpenFiles(self.lanes)
        self.locks = over_lanes(self.lanes)
        self._contents = SmallFileCache()
        self.naming = AsyncCreate(self.lanes, self._files, lambda: self.keeper is not None)
        self._directories = OpenDirectories(self.lanes, self._seconds, self.naming.settle)
        self.fetching = Prefetcher(self.lanes, self._contents, self._directories.listing)
        self._ahead = Readahead(dial, self.lanes.client, timeout, self.lanes.meter)
        self.keeper: LeaseKeeper | None = None

    def close(self) -> None:
        """Hang up; what was open is closed by the server."""
        self.naming.close()
        self._ahead.close()
        self.fetching.close()
        self.locks.close()
        self.lanes.close()
        self._files.clear()

    def _file(self, node: Node) -> CachedInode:
        file = self._book.file(node)
        file.seen = True
        return file

    def _seconds(self, file: CachedInode) -> float:
        return self._book.seconds(file, now())

    def _brief_seconds(self, file: CachedInode) -> float:
        """Of its attributes."""
        return self.naming.seconds(file, self._seconds(file))

    def _as_found(self, file: CachedInode, parent: CachedInode, attributes: Attributes) -> FoundEntry:
        """With the lock: what is told of a file that was found."""
        self._book.use(file)
        seconds = self._brief_seconds(file) if file.attributes is attributes else 0.0
        name_seconds = self._seconds(parent) if parent.names.get(file.name) == file.node else 0.0
        return FoundEntry(file.node, attributes, seconds, name_seconds)

    def _learned(
        self,
        reply: p.FoundIs,
        parent: CachedInode,
        name: bytes,
        since: int,
        memory: int,
        contents: bytes = b"",
    ) -> FoundEntry:
        with self._lock:
            file = self._book.found(reply, parent, name, since=since, memory=memory)
            if contents and self._book.counts(file, reply.granted, since=since):
                self._contents.keep(file, contents)
            return self._as_found(file, parent, file.attributes or reply.attributes)

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """The file with this name."""
        directory = self._file(parent)
        deadline = self.lanes.deadline() if directory.fresh else None
        if deadline:
            self.naming.granting.expect(directory, deadline)
        with self._lock:
            known = self.naming.stands_for(directory, one_name(name))
            if known is None:
                raise NegativeEntry(self._seconds(directory))
            if isinstance(known, CachedInode) and known.attributes and self._brief_seconds(known):
                return self._as_found(known, directory, known.attributes)
        return self._walk(directory, (name,), deadline)

    def _walk(
        self, start: CachedInode, names: tuple[bytes, ...], deadline: Deadline | None = None
    ) -> FoundEntry:
        deadline = self.naming.settle(deadline=deadline)
        path = b"/".join(names)
        most = wanted(start) if self.keeper else 0
        with self.lanes.turn(deadline) as turn:
            try:
                reply, data = turn.ask(
                    lambda: p.Walk(turn.remote(start), names, most), p.FoundIs, repeat=True, limit=most
                )
            except AbsentName as absent:
                with self._lock:
                    self._book.learn_name(start, path, None, absent.granted, since=turn.since)
                    kept = path in start.names
                raise NegativeEntry(self._seconds(start) if kept else 0.0) from None
            return self._learned(reply, start, path, turn.since, turn.memory, bytes(data))

    def walk(self, start: Node, names: Sequence[bytes]) -> FoundEntry:
        """Where a path of names leads."""
        directory = self._file(start)
        if names:
            return self._walk(directory, tuple(one_name(name) for name in names))
        known = self.getattr(start)
        with self._lock:
            self._book.use(directory)
        return FoundEntry(start, known.attributes, known.seconds)

    def forget(self, node: Node, times: int) -> None:
        """It was found so often and is of no more interest."""
        with self._lock:
            if file := self._book.known(node):
                self.naming.forget(file, times)
            self._book.forget(node, times)
            if not self._book.lease_end:
                self._book.forget_idle()

    def getattr(self, node: Node) -> CachedAttributes:
        """The attributes of a file."""
        with self._lock:
            file = self._file(node)
            if file.attributes and (seconds := self._brief_seconds(file)):
                return CachedAttributes(file.attributes, seconds)
            untold = self.naming.names.concern(file)
        with self.lanes.turn(self.naming.settle() if untold else None) as turn:
            reply, _ = turn.ask(lambda: p.GetAttributes(turn.remote(file)), p.AttributesAre, repeat=True)
        return self._now_known(file, reply, turn.since)

    def _now_known(self, file: CachedInode, reply: p.AttributesAre, since: int) -> CachedAttributes:
        with self._lock:
            if self._book.learn(file, reply.attributes, reply.granted, since=since):
                self.naming.asked(file)
            seconds = self._seconds(file) if file.attributes is reply.attributes else 0.0
        return CachedAttributes(reply.attributes, seconds)

    def _changing(self, *files: CachedInode) -> Invalidation:
        return Invalidation(self._book, self._lock, self._drop, files)

    def _drop(self, file: CachedInode) -> None:
        self._ahead.drop(file)
        self._contents.drop(file)

    def _after(self, change: Invalidation, file: CachedInode, told: p.AttributesAre | None) -> None:
        if told:
            with self._lock:
                change.learn(file, told)

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Change attributes."""
        file = self._file(node)
        opened = None if handle is None else self._files.get(handle)
        deadline = self.naming.settle(file)
        if (changes.mode, changes.uid, changes.gid) != (None, None, None):
            self.naming.let_go(file)
        with self._changing(file) as change, self.lanes.turn(deadline) as turn:

            def prepare() -> Message:
                remote = None if opened is None else self._files.remote(turn, opened)
                return set_attributes(turn.remote(file), changes, remote)

            reply, _ = turn.ask(prepare, p.AttributesAre, repeat=True)
        self._after(change, file, reply)
        return CachedAttributes(reply.attributes)  # the kernel asks again, once nothing is under way

    def readlink(self, node: Node) -> bytes:
        """Where a symbolic link points, as it was stored."""
        file = self._file(node)
        if file.target is None:  # which never changes
            with self.lanes.turn() as turn:
                reply, _ = turn.ask(lambda: p.ReadLink(turn.remote(file)), p.Link, repeat=True)
            file.target = reply.target
        return file.target

    def _make(
        self, parent: Node, name: bytes, request: Callable[[RpcCall, int], Message], *also: CachedInode
    ) -> FoundEntry:
        directory = self._file(parent)
        deadline = self.naming.settle()
        with self._changing(directory, *also) as change, self.lanes.turn(deadline) as turn:
            one_name(name)
            reply, _ = turn.ask(lambda: request(turn, turn.remote(directory)), p.FoundIs, repeat=False)
        return self._now_there(reply, directory, name, change, turn.memory)

    def _now_there(
        self, reply: p.FoundIs, parent: CachedInode, name: bytes, change: Invalidation, memory: int
    ) -> FoundEntry:
        """What was just made."""
        with self._lock:
            parent.names.pop(name, None)
            if reply.directory:
                change.learn(parent, reply.directory)
            file = self._book.found(reply, parent, name, since=change.since, memory=memory)
            self.naming.named(parent, name, is_there=True)
            return self._as_found(file, parent, file.attributes or reply.attributes)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Make a file that is neither a directory nor a symbolic link."""
        return self._make(parent, name, lambda _, into: p.MakeNode(into, name, mode, owner, rdev))

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Make a directory."""
        found = self._make(parent, name, lambda _, into: p.MakeDirectory(into, name, mode, owner))
        with self._lock:
            self._book.file(found.node).fresh = True
        return found

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Make a symbolic link."""
        return self._make(parent, name, lambda _, into: p.MakeSymlink(into, name, target, owner))

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        file = self._file(node)
        return self._make(parent, name, lambda turn, into: p.MakeLink(turn.remote(file), into, name), file)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of a file."""
        directory = self._file(parent)
        with self._lock:
            if removed := self.naming.unlink(directory, name):
                self._book.unname(directory, name, removed.file)
                removed.file.attributes = removed.attributes
                return
        self._remove(parent, name, lambda into: p.Unlink(into, one_name(name)))

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        self._remove(parent, name, lambda into: p.RemoveDirectory(into, one_name(name)))

    def _remove(self, parent: Node, name: bytes, request: Callable[[int], Message]) -> None:
        directory = self._file(parent)
        deadline = self.naming.settle()
        with self._lock:
            removed = self._book.named(directory, name)
        with self._changing(directory) as change, self.lanes.turn(deadline) as turn:
            reply, _ = turn.ask(lambda: request(turn.remote(directory)), p.Changed, repeat=False)
        with self._lock:
            self._book.unname(directory, name, removed)
            self.naming.named(directory, name, is_there=False)
            for told in reply.directories:
                change.learn(directory, told)
                self._book.learn_name(directory, name, None, told.granted, since=change.since)

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int = 0) -> None:
        """Move a name, as renameat2(2) with these flags."""
        here, there = self._file(parent), self._file(new_parent)
        one_name(name), one_name(new_name)
        deadline = self.naming.settle()
        with self._lock:
            one, other = self._book.named(here, name), self._book.named(there, new_name)
        with self._changing(here, there) as change, self.lanes.turn(deadline) as turn:

            def prepare() -> Message:
                return p.Rename(turn.remote(here), name, turn.remote(there), new_name, flags)

            reply, _ = turn.ask(prepare, p.Changed, repeat=False)
        with self._lock:
            self._book.unname(there, new_name, other)
            self._book.unname(here, name, one)
            is_there = bool(flags & _EXCHANGE) or (one is not None and one is other)
            self.naming.named(here, name, is_there=is_there)  # of one file's two names both stay
            self.naming.named(there, new_name, is_there=True)
            if one:  # for who has to find it again
                self._book.place(one, there, new_name)
            if other and flags & _EXCHANGE:
                self._book.place(other, here, name)
            for directory, told in zip((here, there), reply.directories, strict=False):
                change.learn(directory, told)

    def create(
        self, parent: Node, name: bytes, flags: int, mode: int, owner: Owner | None
    ) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file."""
        directory, deadline = self._file(parent), self.lanes.deadline()
        if made := self.naming.create(directory, one_name(name), flags, mode, deadline):
            with self._lock:
                return self._as_found(made.file, directory, made.attributes), made.handle
        self.naming.settle(deadline=deadline)
        with self._changing(directory) as change, self.lanes.turn(deadline) as turn:

            def prepare() -> Message:
                keeps = bool(self.keeper) and may_keep(flags)
                return p.Create(turn.remote(directory), one_name(name), flags, mode, owner, keeps)

            reply, _ = turn.ask(prepare, p.Opened, repeat=False)
            if reply.found is None:
                raise os_error(errno.EIO)
        found = self._now_there(reply.found, directory, name, change, turn.memory)
        return found, self._files.add(self._book.file(found.node), flags, reply, turn.memory)

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file; for reading without a word to the server, if that is sure to succeed."""
        file = self._file(node)
        if self.keeper and flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY:
            with self._lock:
                if file.readable and self._seconds(file):
                    return self._files.add_silently(file, flags)
        deadline = self.naming.settle(file)
        changing = self._changing(file) if flags & os.O_TRUNC else contextlib.nullcontext()
        with changing, self.lanes.turn(deadline) as turn:
            keeps = bool(self.keeper) and may_keep(flags)
            reply, _ = turn.ask(lambda: p.Open(turn.remote(file), flags, keeps), p.Opened, repeat=True)
            return self._files.add(file, flags, reply, turn.memory)

    def named_open(self, files: Sequence[CachedInode]) -> None:
        """The server may have been told by now that these are open."""
        self._files.named_open(files)

    def access(self, handle: Handle) -> CacheMode:
        """How the kernel has to read and write an open file."""
        return CacheMode.DIRECT if self._files.get(handle).direct else CacheMode.KEPT

    def read(self, handle: Handle, size: int, offset: int) -> Buffer:
        """Up to ``size`` bytes, fewer at the end of the file."""
        if self.keeper and self.access(handle) is CacheMode.KEPT:
            return self._read_to_keep(handle, min(size, MAX_TRANSFER), offset)
        return self._read(handle, min(size, MAX_TRANSFER), offset, keep=False)[1]

    def _read(self, handle: Handle, size: int, offset: int, *, keep: bool) -> tuple[p.Data, memoryview]:
        def request(remote: int) -> Message:
            return p.Read(remote, size, offset, keep)

        opened = self._files.get(handle)
        if opened.silent and keep:
            with self.lanes.turn() as turn:
                return turn.ask(
                    lambda: p.ReadFile(turn.remote(opened.file), size, offset),
                    p.Data,
                    repeat=True,
                    limit=max(0, size),
                )
        return self._files.ask(handle, request, p.Data, limit=max(0, size))

    def _read_to_keep(self, handle: Handle, size: int, offset: int) -> Buffer:
        """What is read is kept until it is recalled, and so it is not read before it is granted."""
        assert self.keeper
        opened = self._files.get(handle)
        file = opened.file
        if (ready := self._ready(handle, opened, size, offset)) is not None:
            return ready
        end = now() + _REFUSED_SECONDS
        while now() < end:
            since = self._book.changes
            reply, data = self._read(handle, size, offset, keep=True)
            with self._lock:
                file.has_data = True
                if self._book.learn(file, None, reply.granted, since=since) and self._seconds(file):
                    return data
                if reply.unseen:
                    self.keeper.drop_soon(file)
                if file.recalling:  # who recalls it looks again whether there is anything to drop
                    file.uncovered = True
                    return data
            self.keeper.await_lease(file)
            time.sleep(_MOMENT)  # the server is about to hear that it was given up
        raise os_error(errno.ETIMEDOUT)

    def _ready(self, handle: Handle, opened: OpenFile, size: int, offset: int) -> Buffer | None:
        """What is here already, if it still may be kept."""
        with self._lock:
            file, known = opened.file, opened.file.attributes
            parent = self._book.parent(file)
            if known is None or not self._seconds(file):
                return None
            if parent and offset == 0 and known.size <= MOST:
                self.fetching.note_small_read(parent)
            if (data := self._contents.take(file, size, offset)) is not None:
                file.has_data = True
                return data
        if known.size > MOST:
            self._files.tell(handle)
            return self._take(handle, opened, size, offset, known.size)
        return None

    def _take(self, handle: Handle, opened: OpenFile, size: int, offset: int, end: int) -> Buffer | None:
        """What was read ahead. Only who cannot wait has no rival for its buffer."""
        since = self._book.changes
        found = None if may_block.get() else self._ahead.take(handle, opened, size, offset, end)
        if found is None:
            return None
        with self._lock:
            opened.file.has_data = True
            counts = self._book.learn(opened.file, None, found[0], since=since)
            if counts and self._seconds(opened.file):
                return found[1]
        self._ahead.drop(opened.file)
        return None

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        """Write at ``offset``, or at the file's end, wherever that is."""
        body, file = memoryview(data)[:MAX_TRANSFER], self._files.get(handle).file

        def write(told: Told, deadline: Deadline) -> int:
            with self._changing(file) as change:
                reply = self._files.write(handle, body, offset, append=append, told=told, deadline=deadline)
            self._after(change, file, reply.file)
            return reply.count

        return self.naming.along(file, write)

    def descriptor(self, _handle: Handle) -> int:
        """It is on the device."""
        raise os_error(errno.EOPNOTSUPP)

    def fsync(self, handle: Handle, data_only: bool) -> None:
        """Return when the file, or the directory, is on the flash."""
        deadline = self.naming.settle()
        if handle in self._directories:
            self._files.sync_directory(handle, deadline)
        else:
            self._files.sync(handle, data_only, deadline)

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """As fallocate(2)."""
        opened = self._files.get(handle)
        deadline = self.naming.settle(opened.file)

        def request(remote: int) -> Message:
            return p.Allocate(remote, mode, offset, length)

        with self._changing(opened.file) as change:
            reply, _ = self._files.ask(handle, request, p.AttributesAre, deadline=deadline)
        self._after(change, opened.file, reply)

    def seek(self, handle: Handle, offset: int, whence: int) -> int:
        """Where data or a hole begins, as lseek(2)."""
        return self._files.ask(handle, lambda remote: p.Seek(remote, offset, whence), p.OffsetIs)[0].offset

    def release(self, handle: Handle) -> None:
        """Forget the handle."""
        if handle in self._directories:
            self._directories.close(handle)
            self._files.release_directory(handle)
            return
        self._ahead.forget(handle)
        closed = self.naming.closed(self._files.get(handle))
        self._files.release(handle, silently=closed)

    def opendir(self, node: Node) -> Handle:
        """Open a directory."""
        file, handle = self._file(node), self._directories.open(node)
        self._files.add_directory(handle, file)
        return handle

    def readdir(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """The names in a directory from the one at ``offset`` on."""
        return self._directories.read(handle, offset)

    def statfs(self) -> Statistics:
        """How full the volume is."""
        with self.lanes.turn(self.naming.settle()) as turn:
            return turn.ask(p.GetStatistics, p.StatisticsAre, repeat=True)[0].statistics

# SPDX-License-Identifier: Apache-2.0
"""Edge: implements InodeFs for a volume on a device, over connections that may be lost and dialled again."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from millpond.fs.client.bulk_files import RemoteBulk
from millpond.fs.client.cache.blocks import MOST, BlockCache, wanted
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.invalidation import Invalidation
from millpond.fs.client.connection import AbsentName, Dial
from millpond.fs.client.extended import RemoteExtended
from millpond.fs.client.file_locks import RemoteLocks
from millpond.fs.client.listing.open_dirs import OpenDirectories
from millpond.fs.client.open_files import OpenFiles, may_keep
from millpond.fs.client.prefetcher import Prefetcher
from millpond.fs.client.readahead import Readahead
from millpond.fs.client.reader import Reader
from millpond.fs.client.session import Call, Session, now
from millpond.fs.client.write_behind import WriteBehind
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import (
    Buffer,
    CachedAttributes,
    CacheMode,
    FoundEntry,
    NegativeEntry,
    Node,
    SetAttr,
    one_name,
)
from millpond.fs.vfs.path_api import (
    MAX_TRANSFER,
    Attributes,
    Handle,
    Owner,
    Statistics,
    os_error,
)
from millpond.wire.messages import Message

if TYPE_CHECKING:
    from millpond.fs.client.callbacks import CallbackChannel

DEFAULT_SECONDS = 900.0  # a slow flash takes minutes to sync what the memory held
_EXCHANGE = 2  # RENAME_EXCHANGE


class RemoteFs:
    """The InodeFs of the volume that ``dial`` reaches. ``timeout`` is how many seconds an operation may take
    while the server answers keep-alives; one that answers nothing for 15 s (or ``timeout``) has stopped.

    A lost connection is dialled again at the next operation, and within one: nothing is done twice. If the
    server has lost this client's session, most likely because it was restarted, an operation that may not be
    repeated and may have been done raises EIO; files are looked up and opened again when they are next used:
    ESTALE if their name means another file by now. ETIMEDOUT when the time is up, EINTR when the program
    that waits has received a signal.

    Granted state is cached as long as a ``backchannel`` renews the lease. Threads may call at once.
    """

    def __init__(self, dial: Dial, timeout: float = DEFAULT_SECONDS) -> None:
        self.backchannel: CallbackChannel | None = None
        self.session = Session(dial, timeout, self._on_invalidate)
        self.meter, self._inodes, self._lock = self.session.meter, self.session.inodes, self.session.lock
        self.files = OpenFiles(self.session)
        self._blocks = BlockCache()
        self.write_behind = WriteBehind(
            self.session, self.files, self._data_invalidation, self._cache_written, self._on_lost
        )
        self.extended = RemoteExtended(self.session)
        self.locks = RemoteLocks(self.session, self.write_behind.flush)
        self._directories = OpenDirectories(self.session, self._ttl)
        self.readdir, self.readdirplus = self._directories.read, self._directories.read_plus
        self._prefetcher = Prefetcher(self.session, self._blocks, self._directories.listing)
        self._readahead = Readahead(self.session, self._blocks)
        self._reader = Reader(self.session, self.files, self._blocks, self._prefetcher, self._readahead)
        self.bulk = RemoteBulk(self.session, self._invalidation)

    def close(self) -> None:
        """Disconnect; the server closes the files that were open."""
        self.write_behind.close()
        self._prefetcher.close()
        self.session.close()
        self.files.clear()

    @property
    def is_used(self) -> bool:
        """Whether a file or a directory is open."""
        return bool(len(self.files) or len(self._directories))

    def attend(self, backchannel: CallbackChannel) -> None:
        """Cache from now on what the server grants, as long as the backchannel renews the lease."""
        self.backchannel = backchannel

    def _on_invalidate(self, files: Sequence[CachedInode]) -> None:
        if self.backchannel:
            self.backchannel.invalidated(files)

    def _on_lost(self, file: CachedInode) -> None:
        if self.backchannel:
            self.backchannel.drop_soon(file)

    def _file(self, node: Node) -> CachedInode:
        file = self._inodes.file(node)
        file.seen = True
        return file

    def _ttl(self, file: CachedInode) -> float:
        return self._inodes.ttl(file, now())

    def _entry(self, file: CachedInode, parent: CachedInode, attributes: Attributes) -> FoundEntry:
        """With the lock: count a lookup of a file and return its entry for the kernel."""
        self._inodes.use(file)
        seconds = self._ttl(file) if file.attributes == attributes else 0.0
        name_seconds = self._ttl(parent) if parent.names.get(file.name) == file.node else 0.0
        return FoundEntry(file.node, attributes, seconds, name_seconds)

    def _cache_found(
        self,
        reply: p.FoundIs,
        parent: CachedInode,
        name: bytes,
        since: int,
        verifier: int,
        contents: bytes = b"",
    ) -> FoundEntry:
        with self._lock:
            file = self._inodes.insert(reply, parent, name, since=since, verifier=verifier)
            if contents and self._inodes.may_cache(file, reply.granted, since=since):
                self._blocks.keep_whole(file, contents)
            return self._entry(file, parent, file.attributes or reply.attributes)

    def path_of(self, node: Node) -> str:
        """Return the path by which a file was last found, for a log. Raises OSError."""
        with self._lock:
            return os.fsdecode(b"/".join(self._inodes.path(self._inodes.file(node)))) or "/"

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """Return the file of a name, from the cache if it is valid."""
        directory = self._file(parent)
        with self._lock:
            known = self._inodes.lookup(directory, one_name(name), now())
            if known is None:
                raise NegativeEntry(self._ttl(directory))
            if isinstance(known, CachedInode) and known.attributes and self._ttl(known):
                return self._entry(known, directory, known.attributes)
        return self._walk(directory, (name,))

    def _walk(self, start: CachedInode, names: tuple[bytes, ...]) -> FoundEntry:
        found = self._walk_once(start, names)
        if (file := self._inodes.get(found.node)) and file.gathered:  # the server lacks data
            self.forget(found.node, 1)
            self.write_behind.flush(file)
            found = self._walk_once(start, names)
        return found

    def _walk_once(self, start: CachedInode, names: tuple[bytes, ...]) -> FoundEntry:
        path = b"/".join(names)
        most = wanted(start) if self.backchannel else 0
        with self.session.call() as call:
            try:
                reply, data = call.ask(
                    lambda: p.Walk(call.remote(start), names, most), p.FoundIs, idempotent=True, limit=most
                )
            except AbsentName as absent:
                with self._lock:
                    self._inodes.learn_name(start, path, None, absent.granted, since=call.since)
                    kept = path in start.names
                raise NegativeEntry(self._ttl(start) if kept else 0.0) from None
            return self._cache_found(reply, start, path, call.since, call.verifier, bytes(data))

    def walk(self, start: Node, names: Sequence[bytes]) -> FoundEntry:
        """Return the file at the end of a path of names."""
        directory = self._file(start)
        if names:
            return self._walk(directory, tuple(one_name(name) for name in names))
        known = self.getattr(start)
        with self._lock:
            self._inodes.use(directory)
        return FoundEntry(start, known.attributes, known.seconds)

    def forget(self, node: Node, times: int) -> None:
        """Drop ``times`` of the kernel's lookups of a node."""
        with self._lock:
            self._inodes.forget(node, times)
            if not self._inodes.lease_end:
                self._inodes.forget_idle()

    def getattr(self, node: Node) -> CachedAttributes:
        """Return the attributes of a file, from the cache if they are valid."""
        file = self._file(node)
        self.write_behind.flush(file)
        with self._lock:
            if file.attributes and (seconds := self._ttl(file)):
                return CachedAttributes(file.attributes, seconds)
        with self.session.call() as call:
            reply, _ = call.ask(lambda: p.GetAttributes(call.remote(file)), p.AttributesAre, idempotent=True)
        return self._cache_attributes(file, reply, call.since)

    def _cache_attributes(self, file: CachedInode, reply: p.AttributesAre, since: int) -> CachedAttributes:
        with self._lock:
            self._inodes.learn(file, reply.attributes, reply.granted, since=since)
            seconds = self._ttl(file) if file.attributes is reply.attributes else 0.0
        return CachedAttributes(reply.attributes, seconds)

    def _invalidation(self, *files: CachedInode) -> Invalidation:
        return Invalidation(self._inodes, self._lock, self._readahead.drop, files)

    def _data_invalidation(self, file: CachedInode, *, keeps_data: bool = False) -> Invalidation:
        drop = (lambda _file: None) if keeps_data else self._readahead.drop
        return Invalidation(self._inodes, self._lock, drop, (file,), data_only=True)

    def _cache_written(
        self, change: Invalidation, file: CachedInode, changed: p.AttributesAre | None, whole: Buffer
    ) -> None:
        """Cache what a reply says of a file, and ``whole``, if that is all that the file holds."""
        change.learn_reply(file, changed)
        with self._lock:
            is_current = changed is not None and file.attributes is changed.attributes
            if is_current and changed and 0 < len(whole) == changed.attributes.size <= MOST:
                self._blocks.keep_whole(file, bytes(whole))

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Change attributes."""
        file = self._file(node)
        opened = None if handle is None else self.files.get(handle)
        if attributes := self.write_behind.set(file, changes):
            return CachedAttributes(attributes)
        self.write_behind.flush(file)
        keeps = changes.size is None
        with self._data_invalidation(file, keeps_data=keeps) as change, self.session.call() as call:

            def prepare() -> Message:
                remote = None if opened is None else self.files.remote(call, opened)
                return p.SetAttributes(call.remote(file), changes, remote)

            reply, _ = call.ask(prepare, p.AttributesAre, idempotent=True)
        change.learn_reply(file, reply)
        return CachedAttributes(reply.attributes)  # no TTL: the kernel asks again once nothing is under way

    def readlink(self, node: Node) -> bytes:
        """Return the target of a symbolic link, as it was stored."""
        file = self._file(node)
        if file.target is None:  # a link's target never changes
            with self.session.call() as call:
                reply, _ = call.ask(lambda: p.ReadLink(call.remote(file)), p.Link, idempotent=True)
            file.target = reply.target
        return file.target

    def _create(
        self, parent: Node, name: bytes, request: Callable[[Call, int], Message], *also: CachedInode
    ) -> FoundEntry:
        directory = self._file(parent)
        with self._invalidation(directory, *also) as change, self.session.call() as call:
            one_name(name)
            reply, _ = call.ask(lambda: request(call, call.remote(directory)), p.FoundIs, idempotent=False)
        return self._cache_created(reply, directory, name, change, call.verifier)

    def _cache_created(
        self, reply: p.FoundIs, parent: CachedInode, name: bytes, change: Invalidation, verifier: int
    ) -> FoundEntry:
        """Cache the file that the server has just created and return its entry."""
        with self._lock:
            parent.names.pop(name, None)
            if reply.directory:
                change.learn(parent, reply.directory)
            file = self._inodes.insert(reply, parent, name, since=change.since, verifier=verifier)
            if reply.empty and file.attributes is reply.attributes:
                file.names, file.complete = {}, True
            return self._entry(file, parent, file.attributes or reply.attributes)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Create a file that is neither a directory nor a symbolic link."""
        return self._create(parent, name, lambda _, into: p.Make(into, name, mode, owner, rdev))

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Create a directory."""
        kind = stat.S_IFDIR | stat.S_IMODE(mode)
        return self._create(parent, name, lambda _, into: p.Make(into, name, kind, owner))

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Create a symbolic link."""
        kind = stat.S_IFLNK | 0o777
        return self._create(parent, name, lambda _, into: p.Make(into, name, kind, owner, target=target))

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        file = self._file(node)
        self.write_behind.flush(file)
        return self._create(parent, name, lambda call, into: p.MakeLink(call.remote(file), into, name), file)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of a file."""
        self._remove(parent, name, is_directory=False)

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        self._remove(parent, name, is_directory=True)

    def _remove(self, parent: Node, name: bytes, *, is_directory: bool) -> None:
        directory = self._file(parent)
        one_name(name)
        with self._lock:
            removed = self._inodes.last_known(directory, name)
        with self._invalidation(directory) as change, self.session.call() as call:
            reply, _ = call.ask(
                lambda: p.Remove(call.remote(directory), name, is_directory), p.Changed, idempotent=False
            )
        with self._lock:
            self._inodes.remove_name(directory, name, removed)
            for changed in reply.directories:
                change.learn(directory, changed)
                self._inodes.learn_name(directory, name, None, changed.granted, since=change.since)

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int = 0) -> None:
        """Move a name, as renameat2(2) with these flags."""
        here, there = self._file(parent), self._file(new_parent)
        one_name(name), one_name(new_name)
        with self._lock:
            one, other = self._inodes.last_known(here, name), self._inodes.last_known(there, new_name)
        with self._invalidation(here, there) as change, self.session.call() as call:

            def prepare() -> Message:
                return p.Rename(call.remote(here), name, call.remote(there), new_name, flags)

            reply, _ = call.ask(prepare, p.Changed, idempotent=False)
        with self._lock:
            self._inodes.remove_name(there, new_name, other)
            self._inodes.remove_name(here, name, one)
            here.complete = there.complete = False
            if one:  # the location for a later lookup by path
                self._inodes.set_location(one, there, new_name)
            if other and flags & _EXCHANGE:
                self._inodes.set_location(other, here, name)
            for directory, changed in zip((here, there), reply.directories, strict=False):
                change.learn(directory, changed)

    def create(
        self, parent: Node, name: bytes, flags: int, mode: int, owner: Owner | None
    ) -> tuple[FoundEntry, Handle]:
        """Create and open a regular file."""
        directory = self._file(parent)
        with self._invalidation(directory) as change, self.session.call() as call:

            def prepare() -> Message:
                keeps = bool(self.backchannel) and may_keep(flags)
                gathers = bool(self.backchannel) and self.write_behind.may_begin(flags, mode)
                return p.Create(call.remote(directory), one_name(name), flags, mode, owner, keeps, gathers)

            reply, _ = call.ask(prepare, p.Opened, idempotent=False)
            if reply.found is None:
                raise os_error(errno.EIO)
        found = self._cache_created(reply.found, directory, name, change, call.verifier)
        file = self._inodes.file(found.node)
        handle = self.files.add(file, flags, reply, call.verifier)
        if reply.gathers:
            file.linked = True
            self.write_behind.begin(file, handle, reply.found.granted)
        return found, handle

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file; locally for reading, if the cache shows that this is sure to succeed."""
        file = self._file(node)
        if self.backchannel and flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY:
            if not file.remote:
                self._find_listed(file)
            with self._lock:
                if file.readable and self._ttl(file):
                    return self.files.add_local(file, flags)
        self.write_behind.flush(file)
        changing = self._data_invalidation(file) if flags & os.O_TRUNC else contextlib.nullcontext()
        with changing, self.session.call() as call:
            keeps = bool(self.backchannel) and may_keep(flags)
            reply, _ = call.ask(lambda: p.Open(call.remote(file), flags, keeps), p.Opened, idempotent=True)
            return self.files.add(file, flags, reply, call.verifier)

    def _find_listed(self, file: CachedInode) -> None:
        """Look a file up that was only listed until now, with its contents if these are likely to be read."""
        with self._lock:
            parent = self._inodes.parent(file)
        if parent:
            with contextlib.suppress(OSError):  # the server is asked to open it, and says why not
                self.forget(self._walk(parent, (file.name,)).node, 1)

    def cache_mode(self, handle: Handle) -> CacheMode:
        """Return how the kernel reads and writes an open file."""
        return CacheMode.DIRECT if self.files.get(handle).direct else CacheMode.CACHED

    def read(self, handle: Handle, size: int, offset: int) -> Buffer:
        """Return up to ``size`` bytes, fewer at the end of the file."""
        self.write_behind.flush(self.files.get(handle).file)
        granted = self.cache_mode(handle) is CacheMode.CACHED
        return self._reader.read(
            handle, min(size, MAX_TRANSFER), offset, self.backchannel if granted else None
        )

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        """Write at ``offset``, or at the file's end, wherever that is; return the bytes written."""
        body, file = memoryview(data)[:MAX_TRANSFER], self.files.get(handle).file
        self.write_behind.flush(file)
        self.write_behind.report(handle)
        with self._data_invalidation(file) as change:
            reply = self.files.write(handle, body, offset, append=append)
        change.learn_reply(file, reply.file)
        return reply.count

    def descriptor(self, _handle: Handle) -> int:
        """Raise OSError: EOPNOTSUPP, since the file is on the device."""
        raise os_error(errno.EOPNOTSUPP)

    def fsync(self, handle: Handle, data_only: bool) -> None:
        """Return when the file, or the directory, is on the flash."""
        if handle in self._directories:
            self.files.sync_directory(self._directories.get(handle))
        else:
            self.write_behind.flush(self.files.get(handle).file)
            self.files.sync(handle, data_only)

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """Allocate space, as fallocate(2)."""
        opened = self.files.get(handle)
        self.write_behind.flush(opened.file)

        def request(remote: int) -> Message:
            return p.Allocate(remote, mode, offset, length)

        with self._data_invalidation(opened.file) as change:
            reply, _ = self.files.ask(handle, request, p.AttributesAre)
        change.learn_reply(opened.file, reply)

    def seek(self, handle: Handle, offset: int, whence: int) -> int:
        """Return where data or a hole begins, as lseek(2)."""
        self.write_behind.flush(self.files.get(handle).file)
        return self.files.ask(handle, lambda remote: p.Seek(remote, offset, whence), p.OffsetIs)[0].offset

    def release(self, handle: Handle) -> None:
        """Forget the handle."""
        if handle in self._directories:
            self._directories.close(handle)
            return
        self._readahead.forget(handle)
        self.write_behind.end(self.files.get(handle).file, handle)
        self.files.release(handle)

    def opendir(self, node: Node) -> Handle:
        """Open a directory."""
        return self._directories.open(self._file(node))

    def statfs(self) -> Statistics:
        """Return how full the volume is."""
        with self.session.call() as call:
            return call.ask(p.GetStatistics, p.StatisticsAre, idempotent=True)[0].statistics

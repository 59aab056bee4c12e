# SPDX-License-Identifier: Apache-2.0
"""Edge: performs each request of a client on a volume."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from millpond.base.errors import ProtocolError
from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto import extended as x
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.server.directories import DirectoryHandlers, Reply
from millpond.fs.store.bulk_files import read_small
from millpond.fs.store.identity import key_of
from millpond.fs.vfs.inode_api import Buffer, FoundEntry, Node, SetAttr
from millpond.fs.vfs.path_api import MAX_TRANSFER, Handle, os_error, within
from millpond.fs.vfs.xattr_names import MAX_LIST, MAX_VALUE
from millpond.wire.channel import FileSlice
from millpond.wire.messages import Message

_LARGE = 1 << 16
_MAX_OFFSET = (1 << 63) - 1
_MAX_TIME = (1 << 40) * 10**9  # 34,000 years, within any file system's own clamp
_CREATE_FLAGS = os.O_ACCMODE | os.O_EXCL | os.O_TRUNC | os.O_SYNC | os.O_DSYNC
_DONE: Reply = (p.Done(), b"")


_PERFORMERS: dict[type[Message], Callable[..., Reply]] = {}
P = TypeVar("P", bound=Callable[..., Reply])


def _performs(kind: type[Message]) -> Callable[[P], P]:
    """Return a decorator of the method that performs requests of this kind."""

    def register(method: P) -> P:
        _PERFORMERS[kind] = method
        return method

    return register


class RequestHandlers(DirectoryHandlers):
    """Handlers of the requests of one client. Threads may call at once."""

    def _parent_and_grant(self, number: int) -> tuple[Node, int]:
        """Return a directory that is about to be changed, and a grant from before: a later change by others
        recalls the attributes in the reply.
        """
        node = self._writable_node(number)
        return node, self._grant_read(node)

    def _created_reply(self, made: FoundEntry, parent: Node, granted: int) -> p.FoundIs:
        return replace(self._found_reply(made, granted), directory=self._attributes_after(parent, granted))

    def _attributes_after(self, node: Node, granted: int) -> p.AttributesAre | None:
        """Return a node's attributes after a change; None if they cannot be read, since the change is done in
        any case.
        """
        try:
            return p.AttributesAre(self._backing.getattr(node).attributes, granted)
        except OSError:
            return None

    def _done(self, operation: Callable[..., None], *arguments: object) -> Reply:
        operation(*arguments)
        return _DONE

    def do(self, request: Message, payload: Buffer) -> Reply:
        """Perform a request. Raises OSError; ProtocolError if it is none of a volume's."""
        perform = _PERFORMERS.get(type(request))
        if perform is None:
            raise ProtocolError(f"'{request.NAME}' is no request to a volume")
        return perform(self, request, payload)

    @_performs(p.Walk)
    def _(self, request: p.Walk, _payload: Buffer) -> Reply:
        start = self._node(request.start)
        named = self._grant_read(start) if len(request.names) == 1 else 0
        try:
            walked = self._walk(start, request.names, again=request.again)
            found = self._found_reply(walked, named)
        except FileNotFoundError:
            return p.Error(errno.ENOENT, named), b""
        if found.readable and 0 < found.attributes.size <= min(request.contents, MAX_TRANSFER):
            return found, self._read_whole(Node(found.node), found.attributes.size)
        return found, b""

    def _read_whole(self, node: Node, size: int) -> bytes:
        """Return the whole of a file, nothing if that fails."""
        try:
            handle = self._backing.open(node, os.O_RDONLY)
        except OSError:
            return b""
        try:
            data = bytes(self._backing.read(handle, size + 1, 0))
        finally:
            self._backing.release(handle)
        return data if len(data) == size else b""

    @_performs(f.FetchMany)
    def _(self, request: f.FetchMany, _payload: Buffer) -> Reply:
        most, batch = within(request.contents, 0, MAX_TRANSFER // 2), f.Batch()
        directory = self._node(request.directory)
        named = self._grant_read(directory) if request.delegated else 0
        for looked, name in enumerate(request.names):
            if not batch.has_room(most):
                return f.Fetched(looked), batch.packed()
            if request.delegated:
                self._fetch(batch, looked, directory, name, named, most)
            else:
                self._read_into(batch, looked, directory, name, most)
        return f.Fetched(len(request.names)), batch.packed()

    def _fetch(
        self, batch: f.Batch, number: int, directory: Node, name: bytes, named: int, most: int
    ) -> None:
        """Add one name's lookup and its contents to the batch; nothing if there is no such name. All is read
        after it is granted, as for Walk.
        """
        try:
            found = self._found_reply(self._walk(directory, (name,)), named)
        except OSError:
            return
        whole = found.readable and 0 < found.attributes.size <= most
        batch.add(number, found, self._read_whole(Node(found.node), found.attributes.size) if whole else b"")

    def _read_into(self, batch: f.Batch, number: int, directory: Node, name: bytes, most: int) -> None:
        """Add a small file to the batch as it is now, without a node; nothing if it cannot be read."""
        if self._backing.hides(directory, name):
            return
        if inode := self._backing.inode_of(directory, name):
            self._delegations.recall_writer(self.holder, inode)
        if found := read_small(self._backing, directory, name, most):
            batch.add(number, p.FoundIs(0, found.attributes), found.data)

    @_performs(c.StoreFiles)
    def _(self, request: c.StoreFiles, payload: Buffer) -> Reply:
        files = c.unpack_files(payload)
        directory = self._writable_node(request.directory)
        return c.FilesStored(tuple(self._coherent.store_files(directory, files))), b""

    @_performs(p.Forget)
    def _(self, request: p.Forget, _payload: Buffer) -> Reply:
        for number in request.nodes:
            self._forget(Node(number))
        return _DONE

    @_performs(p.GetAttributes)
    def _(self, request: p.GetAttributes, _payload: Buffer) -> Reply:
        return self._attributes(self._node(request.node)), b""

    def _attributes(self, node: Node) -> p.AttributesAre:
        granted = self._grant_read(node)
        return p.AttributesAre(self._backing.getattr(node).attributes, granted)

    @_performs(p.SetAttributes)
    def _(self, request: p.SetAttributes, _payload: Buffer) -> Reply:
        node = self._writable_node(request.node)
        handle = None if request.handle is None else self._handle(request.handle)
        if handle is not None and self._node_of(handle) != node:
            raise os_error(errno.EBADF)
        self._coherent.setattr(node, _checked(request.changes), handle)
        return self._attributes(node), b""

    @_performs(c.ReadDirectoryPlus)
    def _(self, request: c.ReadDirectoryPlus, _payload: Buffer) -> Reply:
        start = self._node(request.node)
        if not request.path:
            granted = 0 if request.names_only else self._grant_read(start)
            return self._page(start, request, granted)
        found = self._walk(start, request.path)
        try:
            return self._page(found.node, request, 0)
        finally:
            self._backing.forget(found.node, 1)

    @_performs(c.ReturnUnused)
    def _(self, request: c.ReturnUnused, _payload: Buffer) -> Reply:
        self._delegations.return_unused(self.holder, zip(request.inodes, request.grants, strict=False))
        return _DONE

    @_performs(p.ReadLink)
    def _(self, request: p.ReadLink, _payload: Buffer) -> Reply:
        return p.Link(self._coherent.readlink(self._node(request.node))), b""

    @_performs(p.Make)
    def _(self, request: p.Make, _payload: Buffer) -> Reply:
        mode, name, owner = within(request.mode, 0, 0o177777), request.name, request.owner
        parent, granted = self._parent_and_grant(request.parent)
        if stat.S_ISDIR(mode):
            made = self._coherent.mkdir(parent, name, stat.S_IMODE(mode), owner)
            found = self._created_reply(made, parent, granted)
            return replace(found, empty=bool(found.granted) and self._is_empty(made.node)), b""
        if stat.S_ISLNK(mode):
            made = self._coherent.symlink(parent, name, request.target, owner)
        else:
            made = self._coherent.mknod(parent, name, mode, request.rdev, owner)
        return self._created_reply(made, parent, granted), b""

    @_performs(p.MakeLink)
    def _(self, request: p.MakeLink, _payload: Buffer) -> Reply:
        parent, granted = self._parent_and_grant(request.parent)
        made = self._coherent.link(self._node(request.node), parent, request.name)
        return self._created_reply(made, parent, granted), b""

    @_performs(p.Remove)
    def _(self, request: p.Remove, _payload: Buffer) -> Reply:
        parent, granted = self._parent_and_grant(request.parent)
        remove = self._coherent.rmdir if request.is_directory else self._coherent.unlink
        remove(parent, request.name)
        return self._changed((parent, granted))

    @_performs(p.Rename)
    def _(self, request: p.Rename, _payload: Buffer) -> Reply:
        one, other = self._parent_and_grant(request.parent), self._parent_and_grant(request.new_parent)
        names = (request.name, other[0], request.new_name)
        self._coherent.rename(one[0], *names, within(request.flags, 0, 7))
        return self._changed(one, other)

    def _changed(self, *directories: tuple[Node, int]) -> Reply:
        known = [self._attributes_after(node, granted) for node, granted in directories]
        return p.Changed(tuple(one for one in known if one) if all(known) else ()), b""

    @_performs(p.Create)
    def _(self, request: p.Create, _payload: Buffer) -> Reply:
        self._require_room()
        self._await_device(request.cached)
        flags = request.flags & _CREATE_FLAGS
        parent, granted = self._parent_and_grant(request.parent)
        made, handle = self._create(parent, request, flags)
        try:
            direct = self._add_open(handle, made.node, request.cached)
        except OSError:
            self._backing.forget(made.node, 1)
            raise
        try:
            found = self._created_reply(made, parent, granted)
            return p.Opened(handle, direct, found, handle in self._gathering), b""
        except OSError:  # the client never learns of the handle
            self._close_and_forget(made.node, handle)
            raise

    def _create(self, parent: Node, request: p.Create, flags: int) -> tuple[FoundEntry, Handle]:
        """Create and open a file, with a write delegation from before anybody else can find it if the client
        wants that, and it can be.
        """
        granted: list[int] = []

        @contextlib.contextmanager
        def grant(status: os.stat_result) -> Iterator[None]:
            inode = self._backing.identity.number(key_of(status))
            if self._delegations.grant_write(self.holder, inode):
                granted.append(inode)
            try:
                yield
            except BaseException:  # before the file is closed: another may have its number then
                self._forget_grants(granted)
                raise

        announce = grant if request.gathers else None
        try:
            made = self._coherent.create(parent, request.name, flags, request.mode, request.owner, announce)
        except BaseException:
            self._forget_grants(granted)
            raise
        for inode in granted:
            self._gathering[made[1]] = inode
        return made

    def _forget_grants(self, inodes: list[int]) -> None:
        while inodes:
            self._delegations.forget(self.holder, inodes.pop())

    def _await_device(self, cached: bool) -> None:
        """Wait for the device's report before anything is done."""
        if cached:
            self._delegations.await_device()

    @_performs(p.Open)
    def _(self, request: p.Open, _payload: Buffer) -> Reply:
        self._require_room()
        self._await_device(request.cached)
        node = self._node(request.node)
        flags = within(request.flags, 0, (1 << 31) - 1) & _CREATE_FLAGS & ~os.O_EXCL
        handle = self._open(node, flags, again=request.again)
        return p.Opened(handle, self._add_open(handle, node, request.cached)), b""

    def _open(self, node: Node, flags: int, *, again: bool) -> Handle:
        """Open a file; ``again``, for a client that has had it open, also if its owner, the server, may not
        open it any more: as long as that takes its permissions are others.
        """
        try:
            return self._coherent.open(node, flags)
        except PermissionError as error:
            if not again or error.errno != errno.EACCES:
                raise
        mode = stat.S_IMODE(self._backing.getattr(node).attributes.mode)
        self._coherent.setattr(node, SetAttr(mode=mode | stat.S_IRUSR | stat.S_IWUSR))
        try:
            return self._coherent.open(node, flags)
        finally:
            self._coherent.setattr(node, SetAttr(mode=mode))

    @_performs(p.Read)
    def _(self, request: p.Read, _payload: Buffer) -> Reply:
        handle = self._handle(request.handle)
        offset = within(request.offset, 0, _MAX_OFFSET)
        size = min(within(request.size, 0, _MAX_OFFSET), MAX_TRANSFER)
        node, wanted = self._node_of(handle), request.want_delegation
        head = self._grant_data(node, at_once=request.at_once) if wanted else p.Data()
        return head, self._read_range(handle, size, offset)

    def _grant_data(self, node: Node, *, at_once: bool = False) -> p.Data:
        if not self._backing.is_public(node):
            return p.Data()
        inode = self._backing.inode(node)
        grant = self._delegations.grant_read if at_once else self._delegations.grant_data
        granted = grant(self.holder, inode)
        return p.Data(granted, device_writes=not granted and self._delegations.is_written(inode))

    @_performs(p.ReadFile)
    def _(self, request: p.ReadFile, _payload: Buffer) -> Reply:
        node, offset = self._node(request.node), within(request.offset, 0, _MAX_OFFSET)
        size = min(within(request.size, 0, _MAX_OFFSET), MAX_TRANSFER)
        head = self._grant_data(node)
        handle = self._backing.open(node, os.O_RDONLY)
        try:
            return head, self._read_range(handle, size, offset)
        finally:
            self._backing.release(handle)

    def _read_range(self, handle: Handle, size: int, offset: int) -> bytes | FileSlice:
        """Return a range of an open file; a large one as a FileSlice, to be sent by sendfile(2) and its
        descriptor then closed.
        """
        if size >= _LARGE:
            descriptor = self._backing.duplicate(handle)
            size = max(0, min(size, os.fstat(descriptor).st_size - offset))
            if size >= _LARGE:
                return FileSlice(descriptor, offset, size)
            os.close(descriptor)
        return bytes(self._coherent.read(handle, size, offset))

    @_performs(p.Write)
    def _(self, request: p.Write, payload: Buffer) -> Reply:
        handle, offset = self._handle(request.handle), within(request.offset, 0, _MAX_OFFSET)
        node = self._node_of(handle)
        granted = self._grant_read(node)

        def is_stale() -> bool:
            return request.late and self._delegations.is_stale(self.holder, self._backing.inode(node))

        then = _checked(request.then) if request.then else None
        how = {"append": request.append, "reclaim": request.reclaim}
        count = self._coherent.write(handle, payload, offset, **how, is_stale=is_stale, then=then)
        if request.last:
            self._end_gathering(handle)
        return p.Written(count, self._attributes_after(node, granted)), b""

    @_performs(p.Sync)
    def _(self, request: p.Sync, _payload: Buffer) -> Reply:
        return self._done(self._coherent.fsync, self._handle(request.handle), request.data_only)

    @_performs(p.SyncDirectory)
    def _(self, request: p.SyncDirectory, _payload: Buffer) -> Reply:
        handle = self._coherent.opendir(self._node(request.node))
        try:
            self._coherent.fsync(handle, False)
        finally:
            self._coherent.release(handle)
        return _DONE

    @_performs(p.Allocate)
    def _(self, request: p.Allocate, _payload: Buffer) -> Reply:
        handle = self._handle(request.handle)
        where = within(request.offset, 0, _MAX_OFFSET), within(request.length, 0, _MAX_OFFSET)
        node = self._node_of(handle)
        self._coherent.allocate(handle, within(request.mode, 0, 0xFF), *where)
        return self._attributes(node), b""

    @_performs(p.Seek)
    def _(self, request: p.Seek, _payload: Buffer) -> Reply:
        handle, offset = self._handle(request.handle), within(request.offset, 0, _MAX_OFFSET)
        return p.OffsetIs(self._coherent.seek(handle, offset, within(request.whence, 0, 4))), b""

    @_performs(p.Release)
    def _(self, request: p.Release, _payload: Buffer) -> Reply:
        return self._done(self._release, request.handle)

    @_performs(x.GetXattr)
    def _(self, request: x.GetXattr, _payload: Buffer) -> Reply:
        return x.XattrIs(), self._coherent.extended.get(self._node(request.node), request.name)

    @_performs(x.ListXattrs)
    def _(self, request: x.ListXattrs, _payload: Buffer) -> Reply:
        node = self._node(request.node)
        known = self._attributes(node)  # before the names: a change of these recalls them
        names = x.pack_names(self._coherent.extended.names(node))
        if len(names) > MAX_LIST:
            raise os_error(errno.E2BIG)
        attributes = replace(known.attributes, bare=not names)
        return x.XattrsAre(p.AttributesAre(attributes, known.granted)), names

    @_performs(x.SetXattr)
    def _(self, request: x.SetXattr, payload: Buffer) -> Reply:
        node = self._node(request.node)
        if len(payload) > MAX_VALUE:
            raise os_error(errno.E2BIG)
        self._coherent.extended.set(node, request.name, bytes(payload), within(request.flags, 0, 3))
        return self._attributes(node), b""

    @_performs(x.RemoveXattr)
    def _(self, request: x.RemoveXattr, _payload: Buffer) -> Reply:
        node = self._node(request.node)
        self._coherent.extended.remove(node, request.name)
        return self._attributes(node), b""

    @_performs(p.Closed)
    def _(self, request: p.Closed, _payload: Buffer) -> Reply:
        return self._done(self._delegations.report_open, self.holder, request.inode, False)

    @_performs(r.GetLock)
    def _(self, request: r.GetLock, _payload: Buffer) -> Reply:
        return self.locks.get(self._node(request.file), request), b""

    @_performs(r.SetLock)
    def _(self, request: r.SetLock, _payload: Buffer) -> Reply:
        return self.locks.set(self._node(request.file), request), b""

    @_performs(r.ReleaseLocks)
    def _(self, request: r.ReleaseLocks, _payload: Buffer) -> Reply:
        return self._done(self.locks.release, request)

    @_performs(r.GetLockEpoch)
    def _(self, request: r.GetLockEpoch, _payload: Buffer) -> Reply:
        answer = self.locks.epoch()
        if request.known == answer.epoch:
            self._delegations.restored_locks(self.holder)
        return answer, b""

    @_performs(p.Ping)
    def _(self, _request: p.Ping, _payload: Buffer) -> Reply:
        return _DONE

    @_performs(p.GetStatistics)
    def _(self, _request: p.GetStatistics, _payload: Buffer) -> Reply:
        return p.StatisticsAre(self._coherent.statfs()), b""


def _checked(changes: SetAttr) -> SetAttr:
    """Return the changes. Raises OSError: EINVAL for values that no file can have."""
    within(changes.size or 0, 0, _MAX_OFFSET)
    within(changes.mode or 0, 0, 0o177777)
    for time in (changes.atime, changes.mtime):
        if isinstance(time, int):
            within(time, -_MAX_TIME, _MAX_TIME)
    return changes

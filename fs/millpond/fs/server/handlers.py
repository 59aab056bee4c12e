"""Edge: how each request of a client is done on a volume."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import singledispatchmethod
from typing import Any

from millpond.base.errors import ProtocolError
from millpond.fs.proto import async_create as n
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.dirents import pack_entries
from millpond.fs.proto.setattr import asked_changes
from millpond.fs.server.client_state import ROOT_INODE, ClientState
from millpond.fs.vfs.inode_api import ROOT, Buffer, FoundEntry, Node
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, Handle, os_error, within
from millpond.wire.channel import FileSlice
from millpond.wire.messages import Message

Reply = tuple[Message, bytes | FileSlice]
_LARGE = 1 << 16
_MAX_OFFSET = (1 << 63) - 1
_CREATE_FLAGS = os.O_ACCMODE | os.O_EXCL | os.O_TRUNC | os.O_SYNC | os.O_DSYNC
_DONE: Reply = (p.Done(), b"")


class RequestHandlers(ClientState):
    """The requests of one client on ``tree``, whose locks ``master`` has. Threads may call at once."""

    def _directory(self, number: int) -> tuple[Node, int]:
        """One to be changed, and its grant of before: others' changes after it recall what the reply says."""
        node = self._changing(number)
        return node, self._share(node)

    def _found(self, found: FoundEntry, named: int = 0) -> p.FoundIs:
        """The client knows the file from now on. Its attributes are looked at once they are granted."""
        self._keep(found.node)
        granted = self._share(found.node)
        attributes = self._plain.getattr(found.node).attributes if granted else found.attributes
        readable = bool(granted) and self._may_read(found.node, attributes)
        return p.FoundIs(found.node, attributes, granted, named, readable)

    def _made(self, made: FoundEntry, parent: Node, granted: int) -> p.FoundIs:
        return replace(self._found(made, granted), directory=self._now(parent, granted))

    def _now(self, node: Node, granted: int) -> p.AttributesAre | None:
        """How a file is after a change, which was done in any case."""
        try:
            return p.AttributesAre(self._plain.getattr(node).attributes, granted)
        except OSError:
            return None

    def _may_read(self, node: Node, attributes: Attributes) -> bool:
        return stat.S_ISREG(attributes.mode) and self._plain.may_read(node)

    def _done(self, operation: Callable[..., None], *arguments: object) -> Reply:
        operation(*arguments)
        return _DONE

    def do(self, request: Message, payload: Buffer) -> Reply:
        """``perform``, found at once: a singledispatchmethod makes a function for each call."""
        kind: Any = type(request)
        return _performer(kind)(self, request, payload)

    @singledispatchmethod
    def perform(self, request: Message, _payload: Buffer) -> Reply:
        """Do what the client asks for. Raises OSError; ProtocolError if it is no request; WouldWait."""
        raise ProtocolError(f"'{request.NAME}' is no request to a volume")

    @perform.register
    def _(self, request: p.Walk, _payload: Buffer) -> Reply:
        start = self._node(request.start)
        named = self._share(start) if len(request.names) == 1 else 0
        try:
            found = self._found(self._walked(start, request.names), named)
        except FileNotFoundError:
            return p.Error(errno.ENOENT, named), b""
        if found.readable and 0 < found.attributes.size <= min(request.contents, MAX_TRANSFER):
            return found, self._whole(Node(found.node), found.attributes.size)
        return found, b""

    def _walked(self, start: Node, names: tuple[bytes, ...]) -> FoundEntry:
        if names and self._plain.hides(start, names[0]):
            raise os_error(errno.ENOENT)
        return self._tree.walk(start, names)

    def _whole(self, node: Node, size: int) -> bytes:
        """All of a file; nothing if that does not succeed."""
        try:
            handle = self._plain.open(node, os.O_RDONLY)
        except OSError:
            return b""
        try:
            data = bytes(self._plain.read(handle, size + 1, 0))
        finally:
            self._plain.release(handle)
        return data if len(data) == size else b""

    @perform.register
    def _(self, request: f.Fetch, _payload: Buffer) -> Reply:
        most, batch, looked = within(request.contents, 0, MAX_TRANSFER // 2), f.Batch(), 0
        for number, names in zip(request.directories, request.names, strict=False):
            directory = self._node(number)
            named = self._share(directory)
            for name in names:
                if not batch.has_room(most):
                    return f.Fetched(looked), batch.packed()
                self._fetch(batch, looked, directory, name, named, most)
                looked += 1
        return f.Fetched(looked), batch.packed()

    def _fetch(
        self, batch: f.Batch, number: int, directory: Node, name: bytes, named: int, most: int
    ) -> None:
        """Nothing, if there is no such name. All is looked at once it is granted, as for Walk."""
        try:
            found = self._found(self._walked(directory, (name,)), named)
        except OSError:
            return
        whole = found.readable and 0 < found.attributes.size <= most
        batch.add(number, found, self._whole(Node(found.node), found.attributes.size) if whole else b"")

    @perform.register
    def _(self, request: p.Forget, _payload: Buffer) -> Reply:
        for number in request.nodes:
            self._forget(Node(number))
        return _DONE

    @perform.register
    def _(self, request: p.GetAttributes, _payload: Buffer) -> Reply:
        node = self._node(request.node)
        self._tree.settle(node)
        return self._attributes(node), b""

    def _attributes(self, node: Node) -> p.AttributesAre:
        granted = self._share(node)
        return p.AttributesAre(self._plain.getattr(node).attributes, granted)

    @perform.register
    def _(self, request: p.SetAttributes, _payload: Buffer) -> Reply:
        node = self._changing(request.node)
        handle = None if request.handle is None else self._own(request.handle)
        if handle is not None and self._behind(handle) != node:
            raise os_error(errno.EBADF)
        self._tree.setattr(node, asked_changes(request), handle)
        return self._attributes(node), b""

    @perform.register
    def _(self, request: p.ReadDirectory, _payload: Buffer) -> Reply:
        node = self._node(request.node)
        granted = self._share(node)
        handle = self._tree.opendir(node)
        try:
            found = (entry for entry in self._tree.readdir(handle, 0) if self._shows(node, entry.name))
            listing = pack_entries(found)
        finally:
            self._tree.release(handle)
        if len(listing) > p.MAX_LISTING:
            raise os_error(errno.EOVERFLOW)
        return p.Entries(granted), listing

    def _shows(self, node: Node, name: str) -> bool:
        return name not in (".", "..") and (node != ROOT or not self._plain.hides(node, os.fsencode(name)))

    @perform.register
    def _(self, request: p.ReadLink, _payload: Buffer) -> Reply:
        return p.Link(self._tree.readlink(self._node(request.node))), b""

    @perform.register
    def _(self, request: p.MakeNode, _payload: Buffer) -> Reply:
        mode = within(request.mode, 0, 0o177777)
        parent, granted = self._directory(request.parent)
        made = self._tree.mknod(parent, request.name, mode, request.rdev, request.owner)
        return self._made(made, parent, granted), b""

    @perform.register
    def _(self, request: p.MakeDirectory, _payload: Buffer) -> Reply:
        parent, granted = self._directory(request.parent)
        made = self._tree.mkdir(parent, request.name, request.mode, request.owner)
        return self._made(made, parent, granted), b""

    @perform.register
    def _(self, request: p.MakeSymlink, _payload: Buffer) -> Reply:
        parent, granted = self._directory(request.parent)
        made = self._tree.symlink(parent, request.name, request.target, request.owner)
        return self._made(made, parent, granted), b""

    @perform.register
    def _(self, request: p.MakeLink, _payload: Buffer) -> Reply:
        parent, granted = self._directory(request.parent)
        made = self._tree.link(self._node(request.node), parent, request.name)
        return self._made(made, parent, granted), b""

    @perform.register
    def _(self, request: p.Unlink, _payload: Buffer) -> Reply:
        parent, granted = self._directory(request.parent)
        self._tree.unlink(parent, request.name)
        return self._changed((parent, granted))

    @perform.register
    def _(self, request: p.RemoveDirectory, _payload: Buffer) -> Reply:
        parent, granted = self._directory(request.parent)
        self._tree.rmdir(parent, request.name)
        return self._changed((parent, granted))

    @perform.register
    def _(self, request: p.Rename, _payload: Buffer) -> Reply:
        one, other = self._directory(request.parent), self._directory(request.new_parent)
        names = (request.name, other[0], request.new_name)
        self._tree.rename(one[0], *names, within(request.flags, 0, 7))
        return self._changed(one, other)

    def _changed(self, *directories: tuple[Node, int]) -> Reply:
        known = [self._now(node, granted) for node, granted in directories]
        return p.Changed(tuple(one for one in known if one) if all(known) else ()), b""

    @perform.register
    def _(self, request: p.Create, _payload: Buffer) -> Reply:
        self._require_room()
        self._await_device(request.keeps)
        flags = request.flags & _CREATE_FLAGS
        parent, granted = self._directory(request.parent)
        made, handle = self._tree.create(parent, request.name, flags, request.mode, request.owner)
        try:
            direct = self._opened(handle, made.node, request.keeps)
        except OSError:
            self._plain.forget(made.node, 1)
            raise
        try:
            return p.Opened(handle, direct, self._made(made, parent, granted)), b""
        except OSError:  # the client does not hear of it
            self._close_and_forget(made.node, handle)
            raise

    def _await_device(self, keeps: bool) -> None:
        """Before anything is done: who may not wait for it asks again elsewhere."""
        if keeps:
            self._master.await_device()

    @perform.register
    def _(self, request: p.Open, _payload: Buffer) -> Reply:
        self._require_room()
        self._await_device(request.keeps)
        node = self._node(request.node)
        handle = self._tree.open(node, within(request.flags, 0, (1 << 31) - 1) & _CREATE_FLAGS & ~os.O_EXCL)
        return p.Opened(handle, self._opened(handle, node, request.keeps)), b""

    @perform.register
    def _(self, request: p.Read, _payload: Buffer) -> Reply:
        handle = self._own(request.handle)
        offset = within(request.offset, 0, _MAX_OFFSET)
        size = min(within(request.size, 0, _MAX_OFFSET), MAX_TRANSFER)
        head = self._share_data(self._behind(handle)) if request.shared else p.Data()
        return head, self._part(handle, size, offset)

    def _share_data(self, node: Node) -> p.Data:
        if not self._plain.is_public(node):
            return p.Data()
        inode = self._plain.inode(node)
        granted = self._master.share_data(self.holder, inode)
        return p.Data(granted, unseen=not granted and self._master.is_written(inode))

    @perform.register
    def _(self, request: p.ReadFile, _payload: Buffer) -> Reply:
        node, offset = self._node(request.node), within(request.offset, 0, _MAX_OFFSET)
        size = min(within(request.size, 0, _MAX_OFFSET), MAX_TRANSFER)
        head = self._share_data(node)
        handle = self._plain.open(node, os.O_RDONLY)
        try:
            return head, self._part(handle, size, offset)
        finally:
            self._plain.release(handle)

    def _part(self, handle: Handle, size: int, offset: int) -> bytes | FileSlice:
        """What is read; a larger part is to be sent from where it lies, and its descriptor then closed."""
        if size >= _LARGE:
            descriptor = self._tree.descriptor(handle)
            size = max(0, min(size, os.fstat(descriptor).st_size - offset))
            if size >= _LARGE:
                return FileSlice(os.dup(descriptor), offset, size)
        return bytes(self._tree.read(handle, size, offset))

    @perform.register
    def _(self, request: p.Write, payload: Buffer) -> Reply:
        handle, offset = self._own(request.handle), within(request.offset, 0, _MAX_OFFSET)
        self._preparing.tell(request.told, self._changing)
        node = self._behind(handle)
        granted = self._share(node)

        def is_late() -> bool:
            return request.kept_back and self._master.is_late(self.holder, self._plain.inode(node))

        count = self._tree.write(handle, payload, offset, append=request.append, unless=is_late)
        return p.Written(count, self._now(node, granted)), b""

    @perform.register
    def _(self, request: p.Sync, _payload: Buffer) -> Reply:
        return self._done(self._tree.fsync, self._own(request.handle), request.data_only)

    @perform.register
    def _(self, request: p.SyncDirectory, _payload: Buffer) -> Reply:
        handle = self._tree.opendir(self._node(request.node))
        try:
            self._tree.fsync(handle, False)
        finally:
            self._tree.release(handle)
        return _DONE

    @perform.register
    def _(self, request: p.Allocate, _payload: Buffer) -> Reply:
        handle = self._own(request.handle)
        where = within(request.offset, 0, _MAX_OFFSET), within(request.length, 0, _MAX_OFFSET)
        node = self._behind(handle)
        self._tree.allocate(handle, within(request.mode, 0, 0xFF), *where)
        return self._attributes(node), b""

    @perform.register
    def _(self, request: p.Seek, _payload: Buffer) -> Reply:
        handle, offset = self._own(request.handle), within(request.offset, 0, _MAX_OFFSET)
        return p.OffsetIs(self._tree.seek(handle, offset, within(request.whence, 0, 4))), b""

    @perform.register
    def _(self, request: p.Release, _payload: Buffer) -> Reply:
        return self._done(self._release, request.handle)

    @perform.register
    def _(self, request: n.Preallocate, _payload: Buffer) -> Reply:
        self._require_room(request.count)
        return self._preparing.answer(request, self._changing)

    @perform.register
    def _(self, request: n.FlushNames, _payload: Buffer) -> Reply:
        return self._done(self._preparing.tell, request.told, self._changing, request.touched)

    @perform.register
    def _(self, request: p.Closed, _payload: Buffer) -> Reply:
        return self._done(self._master.says_closed, self.holder, request.inode)

    @perform.register
    def _(self, request: r.OfFile, _payload: Buffer) -> Reply:
        inode = self._plain.inode(self._node(request.file))
        return self._master.files.perform(self.holder, inode, request), b""

    @perform.register
    def _(self, request: r.LockRequest, _payload: Buffer) -> Reply:
        return self._master.files.perform(self.holder, ROOT_INODE, request), b""

    @perform.register
    def _(self, _request: p.GetStatistics, _payload: Buffer) -> Reply:
        return p.StatisticsAre(self._tree.statfs()), b""


@functools.cache
def _performer(kind: type[Message]) -> Callable[[RequestHandlers, Message, Buffer], Reply]:
    dispatcher: singledispatchmethod[Reply] = vars(RequestHandlers)["perform"]
    return dispatcher.dispatcher.dispatch(kind)

"""Edge: how each request of a client is done on a volume, and what the client has open there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from functools import singledispatchmethod

from millpond.fs import protocol as p
from millpond.fs.volume import Handle, Volume, failure
from millpond.wire.errors import ProtocolError
from millpond.wire.message import Message

Reply = tuple[Message, bytes]
_MOST_FILES = 4096  # that one client may have open: descriptors are for all of them
_DONE: Reply = (p.Done(), b"")


class Requests:
    """The requests of one client. ``payload`` is what came behind the present one."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._handles: set[Handle] = set()
        self.payload = b""

    def release_all(self) -> None:
        """Close what the client left open."""
        for handle in self._handles:
            with contextlib.suppress(OSError):  # nobody is left to hear of it
                self._volume.release(handle)
        self._handles.clear()

    def _own(self, number: int) -> Handle:
        handle = Handle(number)
        if handle not in self._handles:
            raise failure(errno.EBADF)
        return handle

    def _done(self, operation: Callable[..., None], *arguments: object) -> Reply:
        operation(*arguments)
        return _DONE

    @singledispatchmethod
    def perform(self, request: Message) -> Reply:
        """Do what the client asks for. Raises OSError; ProtocolError if it is no request."""
        raise ProtocolError(f"'{request.NAME}' is no request to a volume")

    @perform.register
    def _(self, request: p.GetAttributes) -> Reply:
        return p.AttributesAre(self._volume.getattr(os.fsdecode(request.path))), b""

    @perform.register
    def _(self, request: p.ReadDirectory) -> Reply:
        listing = p.pack_entries(self._volume.readdir(os.fsdecode(request.path)))
        if len(listing) > p.MAX_LISTING:
            raise failure(errno.EOVERFLOW)
        return p.Entries(), listing

    @perform.register
    def _(self, request: p.ReadLink) -> Reply:
        return p.Link(os.fsencode(self._volume.readlink(os.fsdecode(request.path)))), b""

    @perform.register
    def _(self, request: p.MakeNode) -> Reply:
        path = os.fsdecode(request.path)
        return self._done(self._volume.mknod, path, request.mode, request.owner, request.rdev)

    @perform.register
    def _(self, request: p.MakeDirectory) -> Reply:
        return self._done(self._volume.mkdir, os.fsdecode(request.path), request.mode, request.owner)

    @perform.register
    def _(self, request: p.Unlink) -> Reply:
        return self._done(self._volume.unlink, os.fsdecode(request.path))

    @perform.register
    def _(self, request: p.RemoveDirectory) -> Reply:
        return self._done(self._volume.rmdir, os.fsdecode(request.path))

    @perform.register
    def _(self, request: p.MakeSymlink) -> Reply:
        target, path = os.fsdecode(request.target), os.fsdecode(request.path)
        return self._done(self._volume.symlink, target, path, request.owner)

    @perform.register
    def _(self, request: p.Rename) -> Reply:
        return self._done(self._volume.rename, os.fsdecode(request.old), os.fsdecode(request.new))

    @perform.register
    def _(self, request: p.MakeLink) -> Reply:
        return self._done(self._volume.link, os.fsdecode(request.old), os.fsdecode(request.new))

    @perform.register
    def _(self, request: p.ChangeMode) -> Reply:
        return self._done(self._volume.chmod, os.fsdecode(request.path), request.mode)

    @perform.register
    def _(self, request: p.ChangeOwner) -> Reply:
        return self._done(self._volume.chown, os.fsdecode(request.path), request.uid, request.gid)

    @perform.register
    def _(self, request: p.Truncate) -> Reply:
        return self._done(self._volume.truncate, os.fsdecode(request.path), request.size)

    @perform.register
    def _(self, request: p.SetTimes) -> Reply:
        return self._done(self._volume.utimens, os.fsdecode(request.path), request.atime, request.mtime)

    @perform.register
    def _(self, request: p.Open) -> Reply:
        if len(self._handles) >= _MOST_FILES:
            raise failure(errno.EMFILE)
        handle = self._volume.open(os.fsdecode(request.path), request.flags, request.mode, request.owner)
        self._handles.add(handle)
        return p.Opened(handle, self._volume.fgetattr(handle).inode), b""

    @perform.register
    def _(self, request: p.Read) -> Reply:
        return p.Data(), self._volume.read(self._own(request.handle), request.size, request.offset)

    @perform.register
    def _(self, request: p.Write) -> Reply:
        return p.Written(self._volume.write(self._own(request.handle), self.payload, request.offset)), b""

    @perform.register
    def _(self, request: p.Sync) -> Reply:
        return self._done(self._volume.fsync, self._own(request.handle), request.data_only)

    @perform.register
    def _(self, request: p.Release) -> Reply:
        handle = self._own(request.handle)
        self._handles.discard(handle)
        return self._done(self._volume.release, handle)

    @perform.register
    def _(self, _request: p.GetStatistics) -> Reply:
        return p.StatisticsAre(self._volume.statfs()), b""

    @perform.register
    def _(self, request: p.TruncateOpen) -> Reply:
        return self._done(self._volume.ftruncate, self._own(request.handle), request.size)

    @perform.register
    def _(self, request: p.GetOpenAttributes) -> Reply:
        return p.AttributesAre(self._volume.fgetattr(self._own(request.handle))), b""

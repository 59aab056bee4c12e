"""Edge: serves a volume to one client over one connection."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from functools import singledispatchmethod

from millpond.fs import protocol as p
from millpond.fs.volume import MAX_TRANSFER, Handle, Volume, failure
from millpond.wire.channel import Channel
from millpond.wire.deadline import Deadline
from millpond.wire.errors import ConnectionLost, MillpondError, ProtocolError, RemoteError
from millpond.wire.frame import Head
from millpond.wire.message import Failure, Message

_TRANSFER_SECONDS = 60.0
_Reply = tuple[Message, bytes]
_DONE: _Reply = (p.Done(), b"")


def serve(
    channel: Channel, volume: Volume, *, idle: float | None = None, transfer: float = _TRANSFER_SECONDS
) -> RemoteError | None:
    """Answer one client's requests until its connection ends; then close it and every file it had open.

    ``idle`` is how many seconds a client may say nothing, ``transfer`` how many a payload or a reply may
    take. Returns what ended the conversation, None if the client closed it between two requests.
    """
    session = _Session(volume)
    try:
        while True:
            _answer(channel, session, channel.receive(Deadline.after(idle)), transfer)
    except RemoteError as error:
        if isinstance(error, ProtocolError):
            _refuse(channel, error)
        return None if isinstance(error, ConnectionLost) and channel.closed_cleanly else error
    finally:
        session.release_all()
        channel.close()


def _answer(channel: Channel, session: _Session, head: Head, seconds: float) -> None:
    deadline = Deadline.after(seconds)
    if head.payload_size and not isinstance(head.message, p.Write):
        raise ProtocolError(f"{channel.peer} sent {head.payload_size} bytes behind '{head.message.NAME}'")
    if head.payload_size:
        session.payload = bytes(channel.receive_payload(MAX_TRANSFER, deadline))
    else:
        session.payload = b""
    try:
        reply, payload = session.perform(head.message)
    except OSError as error:
        reply, payload = p.Error(error.errno or errno.EIO), b""
    except (OverflowError, ValueError):  # a number or a name that no system call takes
        reply, payload = p.Error(errno.EINVAL), b""
    channel.send(reply, deadline, payload)


def _refuse(channel: Channel, error: ProtocolError) -> None:
    with contextlib.suppress(MillpondError):  # the connection ends in any case
        channel.send(Failure("protocol", str(error)), Deadline.after(1.0))


def _path(path: bytes) -> str:
    return os.fsdecode(path)


class _Session:
    """What one client has open, and how each of its requests is done."""

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

    def _done(self, operation: Callable[..., None], *arguments: object) -> _Reply:
        operation(*arguments)
        return _DONE

    @singledispatchmethod
    def perform(self, request: Message) -> _Reply:
        """Do what the client asks for. Raises OSError; ProtocolError if it is no request."""
        raise ProtocolError(f"'{request.NAME}' is no request to a volume")

    @perform.register
    def _(self, request: p.GetAttributes) -> _Reply:
        return p.AttributesAre(self._volume.getattr(_path(request.path))), b""

    @perform.register
    def _(self, request: p.ReadDirectory) -> _Reply:
        listing = p.pack_entries(self._volume.readdir(_path(request.path)))
        if len(listing) > p.MAX_LISTING:
            raise failure(errno.EOVERFLOW)
        return p.Entries(), listing

    @perform.register
    def _(self, request: p.ReadLink) -> _Reply:
        return p.Link(os.fsencode(self._volume.readlink(_path(request.path)))), b""

    @perform.register
    def _(self, request: p.MakeNode) -> _Reply:
        return self._done(self._volume.mknod, _path(request.path), request.mode, request.owner)

    @perform.register
    def _(self, request: p.MakeDirectory) -> _Reply:
        return self._done(self._volume.mkdir, _path(request.path), request.mode, request.owner)

    @perform.register
    def _(self, request: p.Unlink) -> _Reply:
        return self._done(self._volume.unlink, _path(request.path))

    @perform.register
    def _(self, request: p.RemoveDirectory) -> _Reply:
        return self._done(self._volume.rmdir, _path(request.path))

    @perform.register
    def _(self, request: p.MakeSymlink) -> _Reply:
        return self._done(self._volume.symlink, _path(request.target), _path(request.path), request.owner)

    @perform.register
    def _(self, request: p.Rename) -> _Reply:
        return self._done(self._volume.rename, _path(request.old), _path(request.new))

    @perform.register
    def _(self, request: p.MakeLink) -> _Reply:
        return self._done(self._volume.link, _path(request.old), _path(request.new))

    @perform.register
    def _(self, request: p.ChangeMode) -> _Reply:
        return self._done(self._volume.chmod, _path(request.path), request.mode)

    @perform.register
    def _(self, request: p.ChangeOwner) -> _Reply:
        return self._done(self._volume.chown, _path(request.path), request.uid, request.gid)

    @perform.register
    def _(self, request: p.Truncate) -> _Reply:
        return self._done(self._volume.truncate, _path(request.path), request.size)

    @perform.register
    def _(self, request: p.SetTimes) -> _Reply:
        return self._done(self._volume.utimens, _path(request.path), request.atime, request.mtime)

    @perform.register
    def _(self, request: p.Open) -> _Reply:
        handle = self._volume.open(_path(request.path), request.flags, request.mode, request.owner)
        self._handles.add(handle)
        return p.Opened(handle, self._volume.fgetattr(handle).inode), b""

    @perform.register
    def _(self, request: p.Read) -> _Reply:
        return p.Data(), self._volume.read(self._own(request.handle), request.size, request.offset)

    @perform.register
    def _(self, request: p.Write) -> _Reply:
        return p.Written(self._volume.write(self._own(request.handle), self.payload, request.offset)), b""

    @perform.register
    def _(self, request: p.Flush) -> _Reply:
        return self._done(self._volume.flush, self._own(request.handle))

    @perform.register
    def _(self, request: p.Sync) -> _Reply:
        return self._done(self._volume.fsync, self._own(request.handle), request.data_only)

    @perform.register
    def _(self, request: p.Release) -> _Reply:
        handle = self._own(request.handle)
        self._handles.discard(handle)
        return self._done(self._volume.release, handle)

    @perform.register
    def _(self, _request: p.GetStatistics) -> _Reply:
        return p.StatisticsAre(self._volume.statfs()), b""

    @perform.register
    def _(self, request: p.TruncateOpen) -> _Reply:
        return self._done(self._volume.ftruncate, self._own(request.handle), request.size)

    @perform.register
    def _(self, request: p.GetOpenAttributes) -> _Reply:
        return p.AttributesAre(self._volume.fgetattr(self._own(request.handle))), b""

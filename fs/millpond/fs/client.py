"""Edge: a Volume that lies on a device, reached over a connection that may be lost and dialled again."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from millpond.fs import protocol as p
from millpond.fs.connection import Connection, Dial, Lost
from millpond.fs.volume import MAX_TRANSFER, Attributes, Entry, Handle, Owner, Statistics, failure
from millpond.wire.channel import Buffer
from millpond.wire.deadline import Deadline
from millpond.wire.errors import ProtocolError
from millpond.wire.message import Message

R = TypeVar("R", bound=Message)
_DEFAULT_SECONDS = 10.0
_ONCE = os.O_CREAT | os.O_EXCL | os.O_TRUNC
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)


@dataclass(slots=True)
class _File:
    """An open file: what it takes to open it again, and its number, ``remote``, in session ``session``.

    ``written`` and ``synced`` count changes: between the two lies what a restart of the device may lose.
    """

    path: str
    flags: int
    inode: int
    remote: int
    session: int
    written: int = 0
    synced: int = 0
    in_doubt: bool = False


class RemoteVolume:
    """The Volume behind the connection that ``dial`` makes; ``timeout`` is in seconds for each operation.

    A lost connection is dialled again at the next operation, and within one: nothing is done twice. If the
    server has forgotten this client, most likely because it was started again, EIO says of what may not be
    repeated that nobody knows whether it was done, and open files are opened again when they are next used:
    ESTALE if their name means another file by now. ETIMEDOUT when the time is up. Threads take turns.
    """

    def __init__(self, dial: Dial, timeout: float = _DEFAULT_SECONDS) -> None:
        self._connection = Connection(dial, timeout)
        self._files: dict[Handle, _File] = {}
        self._numbers = itertools.count(1)

    def close(self) -> None:
        """Hang up; what was open is closed by the server."""
        with self._connection.turn() as deadline:
            self._connection.close(deadline)
            self._files.clear()

    def getattr(self, path: str) -> Attributes:
        """The attributes of a file, of a symbolic link itself."""
        return self._ask(p.GetAttributes(_bytes(path)), p.AttributesAre, repeat=True)[0].attributes

    def readdir(self, path: str) -> tuple[Entry, ...]:
        """All names in a directory but ``.`` and ``..``."""
        _, listing = self._ask(p.ReadDirectory(_bytes(path)), p.Entries, repeat=True, limit=p.MAX_LISTING)
        try:
            return p.unpack_entries(listing)
        except ProtocolError:
            raise failure(errno.EIO, path) from None

    def readlink(self, path: str) -> str:
        """Where a symbolic link points, as it was stored."""
        return os.fsdecode(self._ask(p.ReadLink(_bytes(path)), p.Link, repeat=True)[0].target)

    def mknod(self, path: str, mode: int, owner: Owner | None = None, rdev: int = 0) -> None:
        """Make a file of any type that mknod(2) can."""
        self._ask(p.MakeNode(_bytes(path), mode, owner, rdev), p.Done)

    def mkdir(self, path: str, mode: int, owner: Owner | None = None) -> None:
        """Make a directory."""
        self._ask(p.MakeDirectory(_bytes(path), mode, owner), p.Done)

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""
        self._ask(p.Unlink(_bytes(path)), p.Done)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self._ask(p.RemoveDirectory(_bytes(path)), p.Done)

    def symlink(self, target: str, path: str, owner: Owner | None = None) -> None:
        """Make a symbolic link at ``path`` that holds ``target`` as it is."""
        self._ask(p.MakeSymlink(_bytes(target), _bytes(path), owner), p.Done)

    def rename(self, old: str, new: str) -> None:
        """Move a name, replacing what ``new`` was; files open below it are followed."""
        self._ask(p.Rename(_bytes(old), _bytes(new)), p.Done)
        for file in list(self._files.values()):
            if file.path == old or file.path.startswith(old + "/"):
                file.path = new + file.path[len(old) :]

    def link(self, old: str, new: str) -> None:
        """Give a file a second name."""
        self._ask(p.MakeLink(_bytes(old), _bytes(new)), p.Done)

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits."""
        self._ask(p.ChangeMode(_bytes(path), mode), p.Done, repeat=True)

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 keeps one."""
        self._ask(p.ChangeOwner(_bytes(path), uid, gid), p.Done, repeat=True)

    def truncate(self, path: str, size: int) -> None:
        """Cut or extend a file to ``size`` bytes."""
        self._ask(p.Truncate(_bytes(path), size), p.Done, repeat=True)

    def utimens(self, path: str, atime: int, mtime: int) -> None:
        """Set the times, in nanoseconds."""
        self._ask(p.SetTimes(_bytes(path), atime, mtime), p.Done, repeat=True)

    def open(self, path: str, flags: int, mode: int = 0, owner: Owner | None = None) -> Handle:
        """Open a regular file; create it as ``flags`` say."""
        request = p.Open(_bytes(path), flags, mode, owner)
        with self._connection.turn() as deadline:
            reply, _ = self._connection.ask(
                lambda _: request, p.Opened, deadline, repeat=not flags & os.O_EXCL
            )
            handle = Handle(next(self._numbers))
            again = flags & ~_ONCE
            self._files[handle] = _File(path, again, reply.inode, reply.handle, self._connection.session)
        return handle

    def read(self, handle: Handle, size: int, offset: int) -> bytes:
        """Up to ``size`` bytes, fewer at the end of the file."""
        most = min(size, MAX_TRANSFER)
        _, data = self._ask_file(handle, lambda f: p.Read(f.remote, most, offset), p.Data, limit=max(0, most))
        return bytes(data)

    def write(self, handle: Handle, data: bytes, offset: int) -> int:
        """Write at ``offset``, or at the file's end if it was opened with O_APPEND."""
        body = memoryview(data)[:MAX_TRANSFER]

        def request(file: _File) -> Message:
            file.written += 1
            return p.Write(file.remote, offset)

        repeat = not self._file(handle).flags & os.O_APPEND  # at an offset, twice is as good as once
        reply, _ = self._ask_file(handle, request, p.Written, payload=body, repeat=repeat)
        return max(0, min(reply.count, len(body)))

    def flush(self, handle: Handle) -> None:
        """A descriptor of this file was closed; every write has been answered already."""
        self._file(handle)

    def fsync(self, handle: Handle, data_only: bool = False) -> None:
        """Return when the file is on the flash; EIO, once, if a lost connection left writes in doubt."""
        written = 0

        def request(file: _File) -> Message:
            nonlocal written
            if file.in_doubt:
                file.in_doubt, file.synced = False, file.written
                raise failure(errno.EIO, file.path)
            written = file.written
            return p.Sync(file.remote, data_only)

        self._ask_file(handle, request, p.Done)
        self._file(handle).synced = written

    def release(self, handle: Handle) -> None:
        """Forget the handle. Nobody waits for a connection to tell the server so."""
        file = self._file(handle)
        del self._files[handle]
        with self._connection.turn() as deadline:
            if file.session == self._connection.session:
                self._connection.tell(p.Release(file.remote), deadline)

    def statfs(self) -> Statistics:
        """How full the volume is."""
        return self._ask(p.GetStatistics(), p.StatisticsAre, repeat=True)[0].statistics

    def ftruncate(self, handle: Handle, size: int) -> None:
        """Cut or extend an open file to ``size`` bytes."""

        def request(file: _File) -> Message:
            file.written += 1
            return p.TruncateOpen(file.remote, size)

        self._ask_file(handle, request, p.Done)

    def fgetattr(self, handle: Handle) -> Attributes:
        """The attributes of an open file."""
        return self._ask_file(handle, lambda f: p.GetOpenAttributes(f.remote), p.AttributesAre)[0].attributes

    def _ask(
        self, request: Message, reply: type[R], *, repeat: bool = False, limit: int = 0
    ) -> tuple[R, bytearray]:
        with self._connection.turn() as deadline:
            return self._connection.ask(lambda _: request, reply, deadline, repeat=repeat, limit=limit)

    def _ask_file(
        self,
        handle: Handle,
        request: Callable[[_File], Message],
        reply: type[R],
        *,
        repeat: bool = True,
        payload: Buffer = b"",
        limit: int = 0,
    ) -> tuple[R, bytearray]:
        file = self._file(handle)

        def prepare(deadline: Deadline) -> Message:
            if file.session != self._connection.session:
                self._open_again(file, deadline)
            return request(file)

        with self._connection.turn() as deadline:
            return self._connection.ask(prepare, reply, deadline, repeat=repeat, payload=payload, limit=limit)

    def _open_again(self, file: _File, deadline: Deadline) -> None:
        """Open a file of a lost session in the present one. Raises OSError and Lost (never in doubt)."""
        file.in_doubt = file.in_doubt or file.written > file.synced
        request = p.Open(_bytes(file.path), file.flags)
        try:
            reply, _ = self._connection.exchange(request, p.Opened, deadline)
            if reply.inode != file.inode:
                self._connection.exchange(p.Release(reply.handle), p.Done, deadline)
                raise failure(errno.ESTALE, file.path)
        except Lost:
            raise Lost(in_doubt=False) from None
        except OSError as error:
            if error.errno in _GONE:
                raise failure(errno.ESTALE, file.path) from None
            raise
        file.remote, file.session = reply.handle, self._connection.session

    def _file(self, handle: Handle) -> _File:
        try:
            return self._files[handle]
        except KeyError:
            raise failure(errno.EBADF) from None


def _bytes(path: str) -> bytes:
    try:
        return os.fsencode(path)
    except UnicodeEncodeError:
        raise failure(errno.EINVAL) from None

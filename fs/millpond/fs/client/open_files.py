"""Edge: the files that a client has open on a device, opened again when the server has forgotten them."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from millpond.base.deadline import Deadline
from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.client.rpc import SlotLost
from millpond.fs.client.rpc_pool import RpcCall, RpcPool
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.async_create import NameUpdate
from millpond.fs.vfs.inode_api import page_writeback
from millpond.fs.vfs.path_api import Handle, os_error
from millpond.wire.channel import Buffer
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
_ONCE = os.O_CREAT | os.O_EXCL | os.O_TRUNC


Told = Callable[[int], tuple[NameUpdate, ...]]


def nothing_told(_memory: int) -> tuple[NameUpdate, ...]:
    """No names."""
    return ()


@dataclass(slots=True)
class OpenFile:
    """An open file, ``remote`` in the server's ``memory``. ``direct``: what is read may not be kept;
    ``silent``: the server has not been told of it. ``doubts``: those of the file that it knows of.
    """

    file: CachedInode
    flags: int
    remote: int
    memory: int
    direct: bool
    silent: bool = False
    doubts: int = field(init=False)

    def __post_init__(self) -> None:
        self.doubts = self.file.durability.told


def may_keep(flags: int) -> bool:
    """Whether a kernel had better keep what is read and written through a file opened so: what is only
    written it would cut at its pages, and then nobody's appending is done at once.
    """
    return flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_APPEND


class OpenFiles:
    """All of one client."""

    def __init__(self, lanes: RpcPool) -> None:
        self._lanes = lanes
        self._open: dict[Handle, OpenFile] = {}
        self._open_directories: dict[Handle, OpenFile] = {}
        self._numbers = itertools.count(1)

    def add(self, file: CachedInode, flags: int, reply: p.Opened, memory: int) -> Handle:
        """It was opened."""
        handle = Handle(next(self._numbers))
        self._open[handle] = OpenFile(file, flags & ~_ONCE, reply.handle, memory, reply.direct)
        return handle

    def add_silently(self, file: CachedInode, flags: int) -> Handle:
        """It is open, and the server hears of it when it must. With the book's lock."""
        handle = Handle(next(self._numbers))
        self._open[handle] = OpenFile(file, flags, 0, 0, direct=False, silent=True)
        file.opens += 1
        return handle

    def _told(self, opened: OpenFile) -> None:
        """The server knows of it, or need not any more."""
        with self._lanes.lock:
            opened.silent = False
            opened.file.opens -= 1
        self._close_named(opened.file)

    def named_open(self, files: Sequence[CachedInode]) -> None:
        """The server may have been told by now that these are open."""
        for file in files:
            file.named_open = True
            self._close_named(file)

    def _close_named(self, file: CachedInode) -> None:
        """Tell the server once it is open no more; not before it was named, or it would not be heard."""
        if not file.named_open:  # who names it calls this, too
            return
        with self._lanes.lock:
            closed = file.named_open and not file.opens
            file.named_open = file.named_open and not closed
        if closed:
            self._lanes.post(p.Closed(file.inode), file.memory)

    def get(self, handle: Handle) -> OpenFile:
        """Raises OSError: EBADF."""
        try:
            return self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()

    def ask(
        self,
        handle: Handle,
        request: Callable[[int], Message],
        reply: type[R],
        *,
        repeat: bool = True,
        payload: Buffer = b"",
        limit: int = 0,
        deadline: Deadline | None = None,
    ) -> tuple[R, memoryview]:
        """The reply to what is asked of an open file by its number on the server."""
        file = self.get(handle)
        with self._lanes.turn(deadline) as turn:

            def prepare() -> Message:
                return request(self.remote(turn, file))

            return turn.ask(prepare, reply, repeat=repeat, payload=payload, limit=limit)

    def write(
        self, handle: Handle, data: memoryview, offset: int, *, append: bool, told: Told, deadline: Deadline
    ) -> p.Written:
        """Write at ``offset``, or at the file's end; how many bytes were written, and the file since. What is
        ``told`` is so first.
        """
        file, late = self.get(handle), page_writeback.get()
        with self._lanes.lock:
            file.file.has_data |= not file.direct  # the kernel keeps what is written, too
        with self._lanes.turn(deadline) as turn:

            def prepare() -> Message:
                return p.Write(self.remote(turn, file), offset, append, late, told(turn.memory))

            reply, _ = turn.ask(prepare, p.Written, repeat=not append, payload=data)
        if reply.count > len(data):
            raise os_error(errno.EIO)
        return reply

    def remote(self, turn: RpcCall, file: OpenFile) -> int:
        """The number of an open file on the server, while ``ask`` prepares."""
        if file.memory != turn.memory:
            self._open_again(turn, file)
        return file.remote

    def _open_again(self, turn: RpcCall, file: OpenFile) -> None:
        """Open a file of a lost memory in the present one. Raises OSError and Lost (never in doubt)."""
        node = turn.remote(file.file)
        try:
            reply = turn.exchange(p.Open(node, file.flags, not file.direct), p.Opened)
        except SlotLost:
            raise SlotLost(in_doubt=False) from None
        if reply.direct and not file.direct:  # the kernel would go by what the device changes unseen
            self._lanes.post(p.Release(reply.handle), turn.memory)
            raise os_error(errno.ESTALE)
        file.remote, file.memory = reply.handle, turn.memory
        if file.silent:
            self._told(file)

    def tell(self, handle: Handle) -> None:
        """Open it on the server, too, if it is not."""
        opened = self.get(handle)
        if opened.silent:
            with self._lanes.turn() as turn:

                def prepare() -> Message:
                    self.remote(turn, opened)
                    return p.GetAttributes(turn.remote(opened.file))

                turn.ask(prepare, p.AttributesAre, repeat=True)

    def sync(self, handle: Handle, data_only: bool, deadline: Deadline) -> None:
        """Return when the file is on the flash; EIO, once, if a restart of the server may have lost some."""
        opened = self.get(handle)
        data_only = data_only and not opened.file.linked  # a file system may have synced such data before
        with self._lanes.turn(deadline) as turn:
            self._sync(turn, opened, lambda: p.Sync(self.remote(turn, opened), data_only))
        opened.file.linked = opened.file.linked and data_only

    def _sync(self, turn: RpcCall, opened: OpenFile, request: Callable[[], Message]) -> None:
        durability, changed = opened.file.durability, 0

        def prepare() -> Message:
            nonlocal changed
            if (doubts := durability.tell(opened.doubts)) is not None:
                opened.doubts = doubts
                raise os_error(errno.EIO)
            changed = durability.changed
            return request()

        turn.ask(prepare, p.Done, repeat=True)
        durability.sync(changed)

    def add_directory(self, handle: Handle, file: CachedInode) -> None:
        """A directory was opened, here alone."""
        self._open_directories[handle] = OpenFile(file, os.O_RDONLY, 0, 0, direct=True)

    def sync_directory(self, handle: Handle, deadline: Deadline) -> None:
        """Return when the directory's names are on the flash; EIO as of ``sync``."""
        opened = self._open_directories[handle]
        with self._lanes.turn(deadline) as turn:
            self._sync(turn, opened, lambda: p.SyncDirectory(turn.remote(opened.file)))

    def release_directory(self, handle: Handle) -> None:
        """It was closed."""
        self._open_directories.pop(handle, None)

    def release(self, handle: Handle, *, silently: bool = False) -> None:
        """Forget the handle. Nobody waits until the server has been told, if it is to be."""
        file = self.get(handle)
        del self._open[handle]
        if file.silent:
            self._told(file)
        elif not silently:
            self._lanes.post(p.Release(file.remote), file.memory)

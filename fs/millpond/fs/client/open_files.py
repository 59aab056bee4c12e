# SPDX-License-Identifier: Apache-2.0
"""Edge: holds the files that a client has open, and opens them again when the server has lost the session."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from millpond.base.errors import RemoteError
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.connection import is_in_doubt
from millpond.fs.client.session import Call, Session
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import Node, page_writeback
from millpond.fs.vfs.path_api import Handle, os_error
from millpond.wire.channel import Buffer
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
_ONCE = os.O_CREAT | os.O_EXCL | os.O_TRUNC


@dataclass(slots=True)
class OpenFile:
    """An open file, by its handle ``remote`` on the server under the session ``verifier``.

    ``direct``: the kernel must not cache what is read. ``local``: the server does not know of this open
    (NFSv4's local open under a delegation). ``seen_seq``: the write errors of the file that this open file
    has reported (errseq) at a sync or close, ``told_seq`` at a write.
    """

    file: CachedInode
    flags: int
    remote: int
    verifier: int
    direct: bool
    local: bool = False
    told_seq: int = 0
    seen_seq: int = field(init=False)

    def __post_init__(self) -> None:
        self.seen_seq = self.file.durability.reported_seq


def may_keep(flags: int) -> bool:
    """Return whether the kernel may cache the data of a file that is opened with these flags.

    Write-only files are excluded because the kernel would cut writes at page boundaries, which would make
    appends non-atomic.
    """
    return flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_APPEND


class OpenFiles:
    """The open files of one client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: dict[Handle, OpenFile] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, file: CachedInode, flags: int, reply: p.Opened, verifier: int) -> Handle:
        """Add a file that the server has opened; return its handle."""
        handle = Handle(next(self._numbers))
        self._open[handle] = OpenFile(file, flags & ~_ONCE, reply.handle, verifier, reply.direct)
        return handle

    def add_local(self, file: CachedInode, flags: int) -> Handle:
        """With the client's lock: add a file that is opened locally only; return its handle."""
        handle = Handle(next(self._numbers))
        self._open[handle] = OpenFile(file, flags, 0, 0, direct=False, local=True)
        file.local_opens += 1
        return handle

    def _end_local(self, opened: OpenFile) -> None:
        """Note that the server knows of this open now, or that it was closed."""
        with self._session.lock:
            opened.file.local_opens -= opened.local  # another thread may just have opened it there, too
            opened.local = False
        self._report_close(opened.file)

    def mark_reported_open(self, files: Sequence[CachedInode]) -> None:
        """Note that a recall reply has reported local opens of these files to the server."""
        for file in files:
            file.reported_open = True
            self._report_close(file)

    def _report_close(self, file: CachedInode) -> None:
        """Report to the server that a file has no local opens any more, if it was reported as open before."""
        if not file.reported_open:  # mark_reported_open calls this again
            return
        with self._session.lock:
            closed = file.reported_open and not file.local_opens
            file.reported_open = file.reported_open and not closed
        if closed:
            self._session.post(p.Closed(file.inode), file.verifier)

    def get(self, handle: Handle) -> OpenFile:
        """Return the open file of a handle. Raises OSError: EBADF."""
        try:
            return self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def nodes(self) -> set[Node]:
        """Return the nodes of the files that are open."""
        return {opened.file.node for opened in list(self._open.values())}

    def clear(self) -> None:
        """Forget all handles."""
        self._open.clear()

    def ask(
        self,
        handle: Handle,
        request: Callable[[int], Message],
        reply: type[R],
        *,
        idempotent: bool = True,
        payload: Buffer = b"",
        limit: int = 0,
    ) -> tuple[R, memoryview]:
        """Return the reply to a request that names an open file by its handle on the server."""
        file = self.get(handle)
        with self._session.call() as call:

            def prepare() -> Message:
                return request(self.remote(call, file))

            return call.ask(prepare, reply, idempotent=idempotent, payload=payload, limit=limit)

    def write(self, handle: Handle, data: memoryview, offset: int, *, append: bool) -> p.Written:
        """Write at ``offset``, or at the file's end; return the bytes written and the file's new
        attributes.
        """
        file, late = self.get(handle), page_writeback.get()
        if not file.direct:
            file.file.has_data = True  # the kernel caches written pages, too
        with self._session.call() as call:

            def prepare() -> Message:
                return p.Write(self.remote(call, file), offset, append, late)

            reply, _ = call.ask(prepare, p.Written, idempotent=not append, payload=data)
        if reply.count > len(data):
            raise os_error(errno.EIO)
        return reply

    def remote(self, call: Call, file: OpenFile) -> int:
        """Return the server's handle of an open file, opening it again under a new session. Only while
        ``ask`` prepares.
        """
        if file.verifier != call.verifier:
            self._open_again(call, file)
        return file.remote

    def _open_again(self, call: Call, file: OpenFile) -> None:
        """Open a file of a lost session in the present one. Raises OSError and SlotLost."""
        node = call.remote(file.file)
        reply = call.exchange(p.Open(node, file.flags, not file.direct, again=True), p.Opened)
        if reply.direct and not file.direct:  # the kernel would cache data that the device changes unseen
            self._session.post(p.Release(reply.handle), call.verifier)
            raise os_error(errno.ESTALE) from RemoteError("the device's kernel writes it")
        with self._session.lock:
            is_first = file.verifier != call.verifier
            if is_first:
                file.remote, file.verifier = reply.handle, call.verifier
        if not is_first:  # another thread has opened it meanwhile
            self._session.post(p.Release(reply.handle), call.verifier)
        if file.local:
            self._end_local(file)

    def open_on_server(self, handle: Handle) -> None:
        """Open a local open on the server, too."""
        opened = self.get(handle)
        if opened.local:
            self._open_on_server(opened)

    def _open_on_server(self, opened: OpenFile) -> None:
        with self._session.call() as call:

            def prepare() -> Message:
                self.remote(call, opened)
                return p.GetAttributes(call.remote(opened.file))

            call.ask(prepare, p.AttributesAre, idempotent=True)

    def reclaim(self) -> None:
        """Open the files of a lost session again, while the server lets nobody else remove them (NFSv4's
        reclaim of opens): the inode number of one that nobody holds is given to another file. Raises OSError
        if the server cannot be reached.
        """
        for handle, opened in list(self._open.items()):
            is_lost = opened.verifier != self._session.inodes.verifier and not opened.local
            if is_lost or opened.file.verifier not in (0, self._session.inodes.verifier):
                try:
                    self._open_on_server(opened)
                except OSError as error:  # what the server says is told when the file is used
                    if is_in_doubt(error):
                        raise
                if handle not in self._open:  # closed meanwhile, perhaps by its number of before
                    self._session.post(p.Release(opened.remote), opened.verifier)

    def sync(self, handle: Handle, data_only: bool) -> None:
        """Return when the file is on the flash. Raises OSError, once, if writes were lost: EIO if a restart
        of the server may have lost them.
        """
        opened = self.get(handle)
        # the data of a file that was made without a name may be synced already, its name not
        data_only = data_only and not opened.file.linked
        with self._session.call() as call:
            self._sync(call, opened, lambda: p.Sync(self.remote(call, opened), data_only))
        opened.file.linked = opened.file.linked and data_only

    def _sync(self, call: Call, opened: OpenFile, request: Callable[[], Message]) -> None:
        durability, changed = opened.file.durability, 0

        def prepare() -> Message:
            nonlocal changed
            if (seen_seq := durability.report(opened.seen_seq)) is not None:
                opened.seen_seq = seen_seq
                raise os_error(durability.error)
            changed = durability.changed
            return request()

        call.ask(prepare, p.Done, idempotent=True)
        durability.sync(changed)

    def sync_directory(self, opened: OpenFile) -> None:
        """Return when the directory's names are on the flash. Raises OSError: EIO as ``sync`` does."""
        with self._session.call() as call:
            self._sync(call, opened, lambda: p.SyncDirectory(call.remote(opened.file)))

    def release(self, handle: Handle) -> None:
        """Forget the handle. The server closes it with a later request."""
        file = self.get(handle)
        del self._open[handle]
        if file.local:
            self._end_local(file)
        else:
            self._session.post(p.Release(file.remote), file.verifier)

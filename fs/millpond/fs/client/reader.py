# SPDX-License-Identifier: Apache-2.0
"""Edge: the read path of a client: from caches and readahead where they are valid, else from the server."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from millpond.fs.client.cache.blocks import MOST, BlockCache
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.open_files import OpenFile, OpenFiles
from millpond.fs.client.prefetcher import Prefetcher
from millpond.fs.client.readahead import Readahead
from millpond.fs.client.session import Session, now
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import Buffer
from millpond.fs.vfs.path_api import Handle, os_error
from millpond.wire.messages import Message

if TYPE_CHECKING:
    from millpond.fs.client.callbacks import CallbackChannel

_REFUSED_SECONDS = 15.0
_MOMENT = 0.001


class Reader:
    """Reads the open files of ``files``. The kernel may cache the data only under a grant of the server."""

    def __init__(
        self,
        session: Session,
        files: OpenFiles,
        blocks: BlockCache,
        prefetcher: Prefetcher,
        readahead: Readahead,
    ) -> None:
        self._session, self._files = session, files
        self._inodes, self._lock = session.inodes, session.lock
        self._blocks, self._prefetcher, self._readahead = blocks, prefetcher, readahead

    def _ttl(self, file: CachedInode) -> float:
        return self._inodes.ttl(file, now())

    def read(self, handle: Handle, size: int, offset: int, backchannel: CallbackChannel | None) -> Buffer:
        """Return up to ``size`` bytes, which the kernel caches if there is a ``backchannel`` for recalls."""
        if backchannel:
            return self._read_granted(handle, size, offset, backchannel)
        return self._read(handle, size, offset, keep=False)[1]

    def _read(self, handle: Handle, size: int, offset: int, *, keep: bool) -> tuple[p.Data, memoryview]:
        def request(remote: int) -> Message:
            return p.Read(remote, size, offset, keep)

        opened = self._files.get(handle)
        if opened.local and keep:
            with self._session.call() as call:
                return call.ask(
                    lambda: p.ReadFile(call.remote(opened.file), size, offset),
                    p.Data,
                    idempotent=True,
                    limit=max(0, size),
                )
        return self._files.ask(handle, request, p.Data, limit=max(0, size))

    def _read_granted(self, handle: Handle, size: int, offset: int, backchannel: CallbackChannel) -> Buffer:
        """Read data that the kernel will cache until it is recalled; wait until the read is granted."""
        opened = self._files.get(handle)
        file = opened.file
        if (ready := self._read_cached(handle, opened, size, offset)) is not None:
            return ready
        end = now() + _REFUSED_SECONDS
        while now() < end:
            since = self._inodes.changes
            reply, data = self._read(handle, size, offset, keep=True)
            with self._lock:
                file.has_data = True
                if self._inodes.learn(file, None, reply.granted, since=since) and self._ttl(file):
                    return data
                if reply.device_writes:
                    backchannel.drop_soon(file)
                if file.recalling:  # the callback thread invalidates again if this is set
                    file.ungranted_read = True
                    return data
            backchannel.await_lease(file)
            time.sleep(_MOMENT)  # let the recall reply reach the server first
        raise os_error(errno.ETIMEDOUT)

    def _read_cached(self, handle: Handle, opened: OpenFile, size: int, offset: int) -> Buffer | None:
        """Return data that the client already has and may still cache, or None."""
        with self._lock:
            file, known = opened.file, opened.file.attributes
            parent = self._inodes.parent(file)
            if known is None or not self._ttl(file):
                return None
            if parent and offset == 0 and known.size <= MOST:
                self._prefetcher.note_small_read(parent)
            if (data := self._blocks.take_whole(file, size, offset)) is not None:
                file.has_data = True
                return data
        if known.size > MOST:
            self._files.open_on_server(handle)
            return self._take_readahead(handle, opened, size, offset, known.size)
        return None

    def _take_readahead(
        self, handle: Handle, opened: OpenFile, size: int, offset: int, end: int
    ) -> Buffer | None:
        """Return data that was read ahead, or None."""
        since = self._inodes.changes
        found = self._readahead.take(handle, opened, size, offset, end)
        if found is None:
            return None
        with self._lock:
            opened.file.has_data = True
            counts = self._inodes.learn(opened.file, None, found[0], since=since)
            if counts and self._ttl(opened.file):
                return found[1]
            self._readahead.drop(opened.file)
        return None

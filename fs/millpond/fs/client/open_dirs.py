# SPDX-License-Identifier: Apache-2.0
"""Edge: holds the directories that a client has open, and reads their listings."""

from __future__ import annotations

import errno
import itertools
import stat
from collections.abc import Callable, Iterator

from millpond.base.deadline import Deadline
from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.client.rpc_pool import RpcPool
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.dirents import unpack_entries
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import DirectoryEntry, Handle, os_error

_MOST_KEPT_NAMES = 10_000
_FIRST = 1 << 62  # the first handle of a directory: no open file has such a number


class OpenDirectories:
    """The open directories of one client.

    ``ttl`` returns for how many seconds the cached state of a directory is valid; ``flush`` sends all pending
    names to the server and returns the operation's deadline.
    """

    def __init__(
        self, rpc: RpcPool, ttl: Callable[[CachedInode], float], flush: Callable[[], Deadline]
    ) -> None:
        self._rpc, self._ttl, self._flush = rpc, ttl, flush
        self._open: dict[Handle, tuple[Node, tuple[DirectoryEntry, ...]]] = {}
        self._numbers = itertools.count(_FIRST)

    def __contains__(self, handle: Handle) -> bool:
        return handle in self._open

    def open(self, node: Node) -> Handle:
        """Open a directory."""
        handle = Handle(next(self._numbers))
        self._open[handle] = node, ()
        return handle

    def close(self, handle: Handle) -> None:
        """Forget the handle."""
        del self._open[handle]

    def read(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """Yield the names of a directory from the one at ``offset`` on; offset 0 reads the listing anew."""
        try:
            node, entries = self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None
        if offset == 0:
            file = self._rpc.inodes.file(node)
            file.seen = True
            entries = self.listing(file)
            self._open[handle] = node, entries
        yield from itertools.islice(entries, offset, None)

    def listing(self, file: CachedInode) -> tuple[DirectoryEntry, ...]:
        """Return all names of a directory, from the cache if it is valid. Raises OSError."""
        with self._rpc.lock:
            if file.listing is not None and self._ttl(file):
                return file.listing
        with self._rpc.call(self._flush()) as call:
            reply, packed = call.ask(
                lambda: p.ReadDirectory(call.remote(file)), p.Entries, idempotent=True, limit=p.MAX_LISTING
            )
        try:
            dots = (
                DirectoryEntry(".", file.inode, stat.S_IFDIR),
                DirectoryEntry("..", file.inode, stat.S_IFDIR),
            )
            listing = (*dots, *unpack_entries(packed))
        except ProtocolError:
            raise os_error(errno.EIO) from None
        inodes = self._rpc.inodes
        with self._rpc.lock:
            counts = inodes.may_cache(file, reply.granted, since=call.since)
            inodes.learn(file, None, reply.granted, since=call.since)
            if counts and len(listing) <= _MOST_KEPT_NAMES:
                file.listing = listing
        return listing

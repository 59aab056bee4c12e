"""Edge: the directories that a client has open on a device, and their listings."""

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
_FIRST = 1 << 62  # of their handles: no open file has such a number


class OpenDirectories:
    """All of one client. ``seconds`` tells for how long what is known of one may be gone by; ``settle`` has
    the server know all that was done here, and tells the operation's deadline.
    """

    def __init__(
        self, lanes: RpcPool, seconds: Callable[[CachedInode], float], settle: Callable[[], Deadline]
    ) -> None:
        self._lanes, self._seconds, self._settle = lanes, seconds, settle
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
        """The names in it from the one at ``offset`` on."""
        try:
            node, entries = self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None
        if offset == 0:
            file = self._lanes.book.file(node)
            file.seen = True
            entries = self.listing(file)
            self._open[handle] = node, entries
        yield from itertools.islice(entries, offset, None)

    def listing(self, file: CachedInode) -> tuple[DirectoryEntry, ...]:
        """All its names. Raises OSError."""
        with self._lanes.lock:
            if file.listing is not None and self._seconds(file):
                return file.listing
        with self._lanes.turn(self._settle()) as turn:
            reply, packed = turn.ask(
                lambda: p.ReadDirectory(turn.remote(file)), p.Entries, repeat=True, limit=p.MAX_LISTING
            )
        try:
            dots = (
                DirectoryEntry(".", file.inode, stat.S_IFDIR),
                DirectoryEntry("..", file.inode, stat.S_IFDIR),
            )
            listing = (*dots, *unpack_entries(packed))
        except ProtocolError:
            raise os_error(errno.EIO) from None
        book = self._lanes.book
        with self._lanes.lock:
            counts = book.counts(file, reply.granted, since=turn.since)
            book.learn(file, None, reply.granted, since=turn.since)
            if counts and len(listing) <= _MOST_KEPT_NAMES:
                file.listing = listing
        return listing

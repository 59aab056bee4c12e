"""Edge: the directories that a client has open on a device, and their listings."""

from __future__ import annotations

import errno
import itertools
import stat
from collections.abc import Callable, Iterator

from millpond.base.deadline import Deadline
from millpond.base.errors import ProtocolError
from millpond.fs import protocol as p
from millpond.fs.book import File
from millpond.fs.lanes import Lanes
from millpond.fs.listing import unpack_entries
from millpond.fs.tree import Node
from millpond.fs.volume import Entry, Handle, failure

_MOST_KEPT_NAMES = 10_000
_FIRST = 1 << 62  # of their handles: no open file has such a number


class RemoteDirectories:
    """All of one client. ``seconds`` tells for how long what is known of one may be gone by; ``settle`` has
    the server know all that was done here, and tells the operation's deadline.
    """

    def __init__(
        self, lanes: Lanes, seconds: Callable[[File], float], settle: Callable[[], Deadline]
    ) -> None:
        self._lanes, self._seconds, self._settle = lanes, seconds, settle
        self._open: dict[Handle, tuple[Node, tuple[Entry, ...]]] = {}
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

    def read(self, handle: Handle, offset: int) -> Iterator[Entry]:
        """The names in it from the one at ``offset`` on."""
        try:
            node, entries = self._open[handle]
        except KeyError:
            raise failure(errno.EBADF) from None
        if offset == 0:
            file = self._lanes.book.file(node)
            file.seen = True
            entries = self.listing(file)
            self._open[handle] = node, entries
        yield from itertools.islice(entries, offset, None)

    def listing(self, file: File) -> tuple[Entry, ...]:
        """All its names. Raises OSError."""
        with self._lanes.lock:
            if file.listing is not None and self._seconds(file):
                return file.listing
        with self._lanes.turn(self._settle()) as turn:
            reply, packed = turn.ask(
                lambda: p.ReadDirectory(turn.remote(file)), p.Entries, repeat=True, limit=p.MAX_LISTING
            )
        try:
            dots = (Entry(".", file.inode, stat.S_IFDIR), Entry("..", file.inode, stat.S_IFDIR))
            listing = (*dots, *unpack_entries(packed))
        except ProtocolError:
            raise failure(errno.EIO) from None
        book = self._lanes.book
        with self._lanes.lock:
            counts = book.counts(file, reply.granted, since=turn.since)
            book.learn(file, None, reply.granted, since=turn.since)
            if counts and len(listing) <= _MOST_KEPT_NAMES:
                file.listing = listing
        return listing

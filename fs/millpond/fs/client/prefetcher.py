"""Edge (a thread): fetches small files that are about to be read, many at a time, over a lane of its own.

Which these are says whoever is about to read them; and of a directory of which much was read, it is the rest.
What has come is kept as what comes with a name is: it counts only if it was granted, and not recalled since.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.client.cache.small_files import MOST, SmallFileCache
from millpond.fs.client.rpc_pool import RpcPool, now
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import MAX_TRANSFER, DirectoryEntry, os_error

log = logging.getLogger(__name__)
_MOST_WANTED = 4096  # names: half of what nobody uses and is not forgotten yet
_AT_ONCE = 128
_MANY, _DENSE = 64, 8  # who has read so many files of a directory, and one in so many, will read the others
_LONGEST = 255  # bytes of a name
_NAME = 264  # bytes that the longest takes in a directory
_REST_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_Wanted = list[tuple[CachedInode, bytes]]


class Prefetcher:
    """Of one client, which lists directories by ``listing``. Threads may call at once, and none of them
    waits.
    """

    def __init__(
        self,
        lanes: RpcPool,
        contents: SmallFileCache,
        listing: Callable[[CachedInode], Sequence[DirectoryEntry]],
    ) -> None:
        self._lanes, self._book, self._contents, self._listing = lanes, lanes.book, contents, listing
        self._moved = threading.Condition()
        self._queue: deque[tuple[Node, bytes]] = deque(maxlen=_MOST_WANTED)
        self._dense: deque[Node] = deque()
        self._busy = self._closed = False
        self._again = 0.0
        self._thread: threading.Thread | None = None

    def ask(self, directory: Node, names: Sequence[bytes]) -> None:
        """Somebody is about to read these. If too many are waited for, the first of them are left out."""
        with self._moved:
            if now() < self._again:
                return
            self._queue.extend((directory, name) for name in names if len(name) <= _LONGEST)
            self._wake()

    def note_small_read(self, directory: CachedInode) -> None:
        """With the book's lock: a small file of this directory is read."""
        directory.small_reads += 1
        count = directory.small_reads
        if count >= _MANY and count & (count - 1) == 0:
            with self._moved:
                self._dense.append(directory.node)
                self._wake()

    def _wake(self) -> None:
        self._moved.notify_all()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="fetching", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether all has been fetched, or tried, by then."""
        with self._moved:
            return self._moved.wait_for(lambda: not (self._queue or self._dense or self._busy), seconds)

    def close(self) -> None:
        """Fetch no more."""
        with self._moved:
            self._closed, thread = True, self._thread
            self._moved.notify_all()
        if thread:
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                if isinstance(work, list):
                    self._fetch(self._wanted(work))
                else:
                    self._ask_for_all(work)
            except Exception:
                log.exception("files could not be fetched")  # they are read one by one

    def _next(self) -> list[tuple[Node, bytes]] | Node | None:
        """Some names, or a directory whose names are likely; None if there is no more to do."""
        with self._moved:
            self._busy = False
            self._moved.notify_all()
            self._moved.wait_for(lambda: self._queue or self._dense or self._closed)
            if self._closed:
                return None
            self._busy = True
            if not self._queue:
                return self._dense.popleft()
            return [self._queue.popleft() for _ in range(min(_AT_ONCE, len(self._queue)))]

    def _ask_for_all(self, node: Node) -> None:
        """All files of a directory, if enough of them were read."""
        with self._lanes.lock:
            directory = self._book.known(node)
            known = directory and directory.attributes
        if directory is None or (known and known.size > directory.small_reads * _DENSE * _NAME):
            return  # to list it would take long, and be for nothing
        try:
            listing = self._listing(directory)
        except OSError as error:
            log.debug("not listed: %s", error)
            return
        names = [os.fsencode(entry.name) for entry in listing if stat.S_ISREG(entry.mode)]
        if directory.small_reads * _DENSE >= len(names):
            self.ask(node, names[:_MOST_WANTED])

    def _wanted(self, names: list[tuple[Node, bytes]]) -> _Wanted:
        """Those of which there is more to know."""
        with self._lanes.lock:
            time = now()
            places = ((self._book.known(node), name) for node, name in names)
            return [(at, name) for at, name in places if at and self._is_wanted(at, name, time)]

    def _is_wanted(self, directory: CachedInode, name: bytes, time: float) -> bool:
        """Whether it is not known, or known to be a small file that neither is here nor was read."""
        if name in (b"", b".", b"..") or b"/" in name or self._book.lease_end <= time:
            return False
        file = self._book.name(directory, name, time)
        if not file:
            return file is False
        if file.attributes is None or not self._book.seconds(file, time):
            return True
        small = file.readable and 0 < file.attributes.size <= MOST
        return small and not file.has_data and not self._contents.has(file)

    def _fetch(self, wanted: _Wanted) -> None:
        """As many requests as it takes."""
        looked = 1
        while looked and wanted:
            try:
                looked = self._fetch_some(wanted)
            except OSError as error:
                log.debug("not fetched: %s", error)
                if error.errno == errno.ESTALE:  # a directory is gone, and must not be in others' way
                    self._fetch_apart(wanted)
                else:
                    self._rest()
                return
            wanted = wanted[looked:]

    def _rest(self) -> None:
        """The server is not there, or does not know how."""
        with self._moved:
            self._queue.clear()
            self._again = now() + _REST_SECONDS

    def _fetch_apart(self, wanted: _Wanted) -> None:
        """Each directory by itself."""
        apart = [list(places) for _, places in groupby(wanted, key=_directory)]
        for places in apart if len(apart) > 1 else ():
            self._fetch(places)

    def _fetch_some(self, wanted: _Wanted) -> int:
        """Of how many names it is known now what they stand for."""
        places = [
            (directory, tuple(name for _, name in some)) for directory, some in groupby(wanted, _directory)
        ]
        self._lanes.forget_now()
        with self._lanes.turn() as turn:

            def prepare() -> f.Fetch:
                directories = tuple(turn.remote(directory) for directory, _ in places)
                return f.Fetch(directories, tuple(names for _, names in places), MOST)

            reply, data = turn.ask(prepare, f.Fetched, repeat=True, limit=MAX_TRANSFER)
            self._learn(wanted, data, turn.since, turn.memory)
        return max(0, reply.looked)

    def _learn(self, wanted: _Wanted, data: memoryview, since: int, memory: int) -> None:
        """What has come. Others may look something up in between."""
        try:
            for number, found, contents in f.unpack_found(data):
                with self._lanes.lock:
                    self._keep(found, *wanted[number], contents, since, memory)
        except (ProtocolError, IndexError):
            raise os_error(errno.EIO) from None
        with self._lanes.lock:
            self._book.forget_old()

    def _keep(
        self,
        found: FoundIs,
        directory: CachedInode,
        name: bytes,
        contents: memoryview,
        since: int,
        memory: int,
    ) -> None:
        """With the lock. No lock of the kernel's keeps a fetch apart from changes, as it does a look at one
        name: after any change, who knows where the file is.
        """
        if since != self._book.changes or self._book.known(directory.node) is not directory:
            self._book.refuse(found, memory)
            return
        file = self._book.found(found, directory, name, since=since, memory=memory)
        if contents and not file.has_data and self._book.counts(file, found.granted, since=since):
            self._contents.keep(file, bytes(contents))


def _directory(place: tuple[CachedInode, bytes]) -> CachedInode:
    return place[0]

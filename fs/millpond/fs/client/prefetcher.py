# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): fetches small files that are about to be read, many per request.

A program names them with ``millpond.fs.prefetch``, or the prefetcher takes the rest of a directory of which
much was read. Contents are cached as those that come with a lookup are: only if they were granted and not
recalled since.
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
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.small_files import MOST, SmallFileCache
from millpond.fs.client.rpc_pool import RpcPool, now
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import MAX_TRANSFER, DirectoryEntry, os_error

log = logging.getLogger(__name__)
_MOST_WANTED = 4096  # names: half of the idle inodes that the cache holds
_AT_ONCE = 128
_MANY, _DENSE = 64, 8  # files read, and the inverse share read, of a directory to be fetched
_LONGEST = 255  # bytes of a name
_NAME = 264  # bytes that the longest name takes in a directory
_REST_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_Wanted = list[tuple[CachedInode, bytes]]


class Prefetcher:
    """The prefetcher of one client; ``listing`` reads a directory. Threads may call at once, and no call
    waits.
    """

    def __init__(
        self,
        rpc: RpcPool,
        small_files: SmallFileCache,
        listing: Callable[[CachedInode], Sequence[DirectoryEntry]],
    ) -> None:
        self._rpc, self._inodes, self._small_files, self._listing = rpc, rpc.inodes, small_files, listing
        self._changed = threading.Condition()
        self._queue: deque[tuple[Node, bytes]] = deque(maxlen=_MOST_WANTED)
        self._dense: deque[Node] = deque()
        self._busy = self._closed = False
        self._retry_at = 0.0
        self._thread: threading.Thread | None = None

    def ask(self, directory: Node, names: Sequence[bytes]) -> None:
        """Queue names that are about to be read; the oldest are left out if too many are queued."""
        with self._changed:
            if now() < self._retry_at:
                return
            self._queue.extend((directory, name) for name in names if len(name) <= _LONGEST)
            self._wake()

    def note_small_read(self, directory: CachedInode) -> None:
        """With the client's lock: count a read of a small file in this directory; queue the directory at
        powers of two.
        """
        directory.small_reads += 1
        count = directory.small_reads
        if count >= _MANY and count & (count - 1) == 0:
            with self._changed:
                self._dense.append(directory.node)
                self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="fetching", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return whether the queue was emptied within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._dense or self._busy), seconds)

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._changed.notify_all()
        if thread:
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                if isinstance(work, list):
                    self._fetch(self._wanted(work))
                else:
                    self._queue_directory(work)
            except Exception:
                log.exception("files could not be prefetched")  # programs read them one by one

    def _next(self) -> list[tuple[Node, bytes]] | Node | None:
        """Return queued names, or a directory whose files are likely to be read; None at the end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._dense or self._closed)
            if self._closed:
                return None
            self._busy = True
            if not self._queue:
                return self._dense.popleft()
            return [self._queue.popleft() for _ in range(min(_AT_ONCE, len(self._queue)))]

    def _queue_directory(self, node: Node) -> None:
        """Queue all files of a directory if enough of them were read."""
        with self._rpc.lock:
            directory = self._inodes.get(node)
            known = directory and directory.attributes
        if directory is None or (known and known.size > directory.small_reads * _DENSE * _NAME):
            return  # listing it would take long, for nothing
        try:
            listing = self._listing(directory)
        except OSError as error:
            log.debug("directory to prefetch not listed: %s", error)
            return
        names = [os.fsencode(entry.name) for entry in listing if stat.S_ISREG(entry.mode)]
        if directory.small_reads * _DENSE >= len(names):
            self.ask(node, names[:_MOST_WANTED])

    def _wanted(self, names: list[tuple[Node, bytes]]) -> _Wanted:
        """Return the names of which the cache lacks something."""
        with self._rpc.lock:
            time = now()
            places = ((self._inodes.get(node), name) for node, name in names)
            return [(at, name) for at, name in places if at and self._is_wanted(at, name, time)]

    def _is_wanted(self, directory: CachedInode, name: bytes, time: float) -> bool:
        """Return whether a name is not cached, or is a small file whose contents neither the client nor the
        kernel has.
        """
        if name in (b"", b".", b"..") or b"/" in name or self._inodes.lease_end <= time:
            return False
        file = self._inodes.lookup(directory, name, time)
        if not file:
            return file is False
        if file.attributes is None or not self._inodes.ttl(file, time):
            return True
        small = (file.readable or not file.remote) and 0 < file.attributes.size <= MOST
        return small and not file.has_data and not self._small_files.has(file)

    def _fetch(self, wanted: _Wanted) -> None:
        """Fetch these names with as many requests as it takes."""
        looked = 1
        while looked and wanted:
            try:
                looked = self._fetch_some(wanted)
            except OSError as error:
                log.debug("files not prefetched: %s", error)
                if error.errno == errno.ESTALE:  # one directory is gone: fetch the others without it
                    self._fetch_each_directory(wanted)
                else:
                    self._back_off()
                return
            wanted = wanted[looked:]

    def _back_off(self) -> None:
        """Empty the queue and accept nothing for a while: the server is not there, or lacks this request."""
        with self._changed:
            self._queue.clear()
            self._retry_at = now() + _REST_SECONDS

    def _fetch_each_directory(self, wanted: _Wanted) -> None:
        """Fetch the names of each directory by themselves."""
        apart = [list(places) for _, places in groupby(wanted, key=_directory)]
        for places in apart if len(apart) > 1 else ():
            self._fetch(places)

    def _fetch_some(self, wanted: _Wanted) -> int:
        """Send one request. Returns how many of the names the server has looked up."""
        places = [
            (directory, tuple(name for _, name in some)) for directory, some in groupby(wanted, _directory)
        ]
        self._rpc.forget_now()
        with self._rpc.call() as call:

            def prepare() -> f.FetchMany:
                directories = tuple(call.remote(directory) for directory, _ in places)
                return f.FetchMany(directories, tuple(names for _, names in places), MOST)

            reply, data = call.ask(prepare, f.Fetched, idempotent=True, limit=MAX_TRANSFER)
            self._learn(wanted, data, call.since, call.verifier)
        return max(0, reply.looked)

    def _learn(self, wanted: _Wanted, data: memoryview, since: int, verifier: int) -> None:
        """Cache the files of a reply. The lock is released in between, for lookups of other threads."""
        try:
            for number, found, contents in f.unpack_found(data):
                with self._rpc.lock:
                    self._keep(found, *wanted[number], contents, since, verifier)
        except (ProtocolError, IndexError):
            raise os_error(errno.EIO) from None
        with self._rpc.lock:
            self._inodes.forget_old()

    def _keep(
        self,
        found: FoundIs,
        directory: CachedInode,
        name: bytes,
        contents: memoryview,
        since: int,
        verifier: int,
    ) -> None:
        """With the lock: cache one file of a reply, unless names were changed since the request.

        The kernel's locks order a lookup of one name with changes of its directory, but not a fetch: after
        a change of names the file may be elsewhere.
        """
        if not self._inodes.is_current(directory, since) or self._inodes.get(directory.node) is not directory:
            self._inodes.reject(found, verifier)
            return
        file = self._inodes.insert(found, directory, name, since=since, verifier=verifier)
        if contents and not file.has_data and self._inodes.may_cache(file, found.granted, since=since):
            self._small_files.keep(file, bytes(contents))


def _directory(place: tuple[CachedInode, bytes]) -> CachedInode:
    return place[0]

# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): fetches the rest of a directory of which many small files were read, many per request.

Contents are cached as those that come with a lookup are: only if they were granted and not recalled since.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Sequence

from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.blocks import MOST, BlockCache
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.session import Session, now
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import MAX_TRANSFER, DirectoryEntry, os_error

log = logging.getLogger(__name__)
_MOST_WANTED = 4096  # names: half of the idle inodes that the cache holds
_AT_ONCE = 128
_MANY, _DENSE = 64, 8  # files read, and the inverse share read, of a directory to be fetched
_NAME = 264  # bytes that the longest name takes in a directory
_JOIN_SECONDS = 5.0


class Prefetcher:
    """The prefetcher of one client; ``listing`` reads a directory. No call waits but ``close``."""

    def __init__(
        self,
        session: Session,
        blocks: BlockCache,
        listing: Callable[[CachedInode], Sequence[DirectoryEntry]],
    ) -> None:
        self._session, self._inodes, self._blocks, self._listing = session, session.inodes, blocks, listing
        self._dense: queue.SimpleQueue[tuple[Node, int] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def note_small_read(self, directory: CachedInode) -> None:
        """With the client's lock: count a read of a small file in this directory; queue the directory at
        powers of two.
        """
        directory.small_reads += 1
        count = directory.small_reads
        if count >= _MANY and count & (count - 1) == 0:
            self._dense.put((directory.node, count))
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="fetching", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        with self._session.lock:
            self._closed.set()
        self._dense.put(None)
        if self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (dense := self._dense.get()) is not None and not self._closed.is_set():
            try:
                self._fetch_directory(*dense)
            except OSError as error:
                log.debug("files not prefetched: %s", error)  # programs read them one by one
            except Exception:
                log.exception("files could not be prefetched")

    def _fetch_directory(self, node: Node, reads: int) -> None:
        """Fetch all files of a directory if so many reads are enough."""
        with self._session.lock:
            directory = self._inodes.get(node)
            known = directory and directory.attributes
        if directory is None or (known and known.size > reads * _DENSE * _NAME):
            return  # listing it would take long, for nothing
        names = [os.fsencode(entry.name) for entry in self._listing(directory) if stat.S_ISREG(entry.mode)]
        if reads * _DENSE < len(names):
            return
        left = names[:_MOST_WANTED]
        while left and not self._closed.is_set():
            if wanted := self._wanted(directory, left[:_AT_ONCE]):
                self._fetch(directory, wanted)
            left = left[_AT_ONCE:]

    def _wanted(self, directory: CachedInode, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the names of which the cache lacks something."""
        with self._session.lock:
            return tuple(name for name in names if self._is_wanted(directory, name, now()))

    def _is_wanted(self, directory: CachedInode, name: bytes, time: float) -> bool:
        """Return whether a name is not cached, or is a small file whose contents neither the client nor the
        kernel has.
        """
        if self._inodes.lease_end <= time:
            return False
        file = self._inodes.lookup(directory, name, time)
        if not file:
            return file is False
        if file.attributes is None or not self._inodes.ttl(file, time):
            return True
        small = (file.readable or not file.remote) and 0 < file.attributes.size <= MOST
        return small and not file.has_data and not self._blocks.get(file, 0)

    def _fetch(self, directory: CachedInode, names: tuple[bytes, ...]) -> None:
        """Fetch these names with as many requests as it takes. Raises OSError."""
        looked = 1
        while names and looked > 0:
            looked = self._fetch_some(directory, names)
            names = names[looked:]

    def _fetch_some(self, directory: CachedInode, names: tuple[bytes, ...]) -> int:
        """Send one request. Returns how many of the names the server has looked up."""
        self._session.forget_now()
        with self._session.call() as call:
            reply, data = call.ask(
                lambda: f.FetchMany(call.remote(directory), names, MOST),
                f.Fetched,
                idempotent=True,
                limit=MAX_TRANSFER,
            )
            self._learn(directory, names, data, call.since, call.verifier)
        return max(0, reply.looked)

    def _learn(
        self, directory: CachedInode, names: Sequence[bytes], data: memoryview, since: int, verifier: int
    ) -> None:
        """Cache the files of a reply. The lock is released in between, for lookups of other threads."""
        try:
            for number, found, contents in f.unpack_found(data):
                with self._session.lock:
                    self._keep(found, directory, names[number], contents, since, verifier)
        except (ProtocolError, IndexError):
            raise os_error(errno.EIO) from None
        with self._session.lock:
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
            self._blocks.keep_whole(file, bytes(contents))

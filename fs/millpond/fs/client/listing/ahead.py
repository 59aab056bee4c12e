# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): fetches pages of directories ahead of a program that lists one after the other.

Ahead are the next page of the same directory, and the first one of the next directory, where a program has
listed two directories of the same parent in the order of their names or in that of its listing.
"""

from __future__ import annotations

import contextlib
import queue
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable

from millpond.fs.client.cache.dir_page import DOTS_END, HeldPage
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.rpc_pool import RpcPool
from millpond.fs.vfs.inode_api import Node, WouldBlock, may_block
from millpond.fs.vfs.operation import about_to_wait, woken_by

_MOST = 4  # pages, each of a MiB at most
_LONGEST_WAIT = 5.0  # seconds, for a page that is under way
_JOIN_SECONDS = 5.0
_MOST_SIBLINGS = 4096
_Place = tuple[Node, int]


class _Fetching:
    """A page that is fetched; ``page`` stays None if that fails, or nothing is granted with it."""

    __slots__ = ("directory", "done", "offset", "page")

    def __init__(self, directory: CachedInode, offset: int) -> None:
        self.directory, self.offset = directory, offset
        self.page: HeldPage | None = None
        self.done = threading.Event()


class PagesAhead:
    """The pages that are fetched ahead for one client, by ``fetch``. Threads may call at once."""

    def __init__(self, rpc: RpcPool, fetch: Callable[[CachedInode, int], HeldPage]) -> None:
        self._rpc, self._fetch = rpc, fetch
        self._pages: OrderedDict[_Place, _Fetching] = OrderedDict()
        self._queue: queue.SimpleQueue[_Fetching | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: tuple[Node, tuple[Node, ...]] = Node(0), ()

    def begin(self, directory: CachedInode, offset: int) -> None:
        """Begin to fetch the page behind an offset."""
        wanted, place = _Fetching(directory, offset), (directory.node, offset)
        with self._rpc.lock:
            if place in self._pages:
                return
            self._pages[place] = wanted
            self._rpc.inodes.pages_held += 1
            if len(self._pages) > _MOST:
                self._pages.popitem(last=False)
                self._rpc.inodes.pages_held -= 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="listing", daemon=True)
                self._thread.start()
        self._queue.put(wanted)

    def take(self, directory: CachedInode, offset: int) -> HeldPage | None:
        """Return the page behind an offset if it was fetched ahead, or soon is."""
        with self._rpc.lock:
            if (found := self._pages.pop((directory.node, offset), None)) is None:
                return None
            self._rpc.inodes.pages_held -= 1
        if not found.done.is_set():
            about_to_wait()
            with woken_by(found.done.set):
                found.done.wait(_LONGEST_WAIT)
        return found.page

    def begin_next(self, directory: CachedInode) -> None:
        """Note that a directory is listed from its beginning, and begin to fetch the next one if it is clear
        which that is.
        """
        with self._rpc.lock:
            expected, likely = self._last[1], self._successors(directory)
            self._last = directory.node, likely
            known = [self._rpc.inodes.get(node) for node in likely] if directory.node in expected else []
        if known:
            number = expected.index(directory.node)
            if (following := known[min(number, len(known) - 1)]) is not None:
                self.begin(following, DOTS_END)

    def _successors(self, directory: CachedInode) -> tuple[Node, ...]:
        """With the lock: return the directories behind this one in its parent: by name, and as listed."""
        parent = self._rpc.inodes.parent(directory)
        if parent is None or len(parent.names) > _MOST_SIBLINGS:
            return ()
        siblings = [(name, node) for name, node in parent.names.items() if node and self._is_directory(node)]
        found = list[Node]()
        for ordered in (sorted(siblings), siblings):
            with contextlib.suppress(ValueError, IndexError):
                found.append(ordered[ordered.index((directory.name, directory.node)) + 1][1])
        return tuple(found)

    def _is_directory(self, node: Node) -> bool:
        if node in self._rpc.inodes.listed:  # files alone are
            return False
        file = self._rpc.inodes.get(node)
        return bool(file and file.attributes and stat.S_ISDIR(file.attributes.mode))

    def _run(self) -> None:
        may_block.set(False)  # a thread that may wait for a recall fetches the page itself
        while wanted := self._queue.get():
            with contextlib.suppress(OSError, WouldBlock):
                page = self._fetch(wanted.directory, wanted.offset)
                wanted.page = page if page.granted else None  # nobody would say that it is old
            wanted.done.set()

    def close(self) -> None:
        """Stop the thread."""
        self._queue.put(None)
        if self._thread:
            self._thread.join(_JOIN_SECONDS)

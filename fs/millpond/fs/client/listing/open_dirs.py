# SPDX-License-Identifier: Apache-2.0
"""Edge: holds the directories that a client has open, and reads their listings page by page."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.dir_page import DOTS_END, HeldPage, cookie_of, offset_of
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.listed import listed_attributes
from millpond.fs.client.listing.pages import DirectoryPages
from millpond.fs.client.rpc_pool import RpcPool
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.dirents import unpack_entries
from millpond.fs.vfs.inode_api import UNLISTED, AddEntry, Node
from millpond.fs.vfs.path_api import MAX_TRANSFER, DirectoryEntry, Handle, os_error

_MOST_KEPT_NAMES = 10_000
_MOST_KEPT_IN_ALL = 50_000
_FIRST = 1 << 62  # the first handle of a directory: no open file has such a number
Entries = Sequence[DirectoryEntry]


@dataclass(slots=True)
class _OpenDirectory:
    """An open directory: the entries last read, whether these are the last ones, whether attributes of them
    may be cached; where the next one is likely to be; the page with attributes.
    """

    node: Node
    entries: Entries = ()
    end: bool = False
    with_attributes: bool = False
    likely: int = 0
    page: HeldPage | None = None

    def set(self, entries: Entries, *, end: bool, with_attributes: bool = False) -> None:
        """Set the entries that are passed on next."""
        self.entries, self.end, self.with_attributes, self.likely = entries, end, with_attributes, 0

    def find(self, offset: int) -> int | None:
        """Return which of the entries is the one behind an offset, None if that is not known."""
        for at in (self.likely, self.likely - 1):
            if 0 < at <= len(self.entries) and self.entries[at - 1].offset == offset:
                break
        else:
            at = next((at for at, entry in enumerate(self.entries, 1) if entry.offset == offset), 0)
        return at if at and (at < len(self.entries) or self.end) else None


class OpenDirectories:
    """The open directories of one client. ``ttl`` returns for how many seconds the cached state of a file is
    valid.
    """

    def __init__(self, rpc: RpcPool, ttl: Callable[[CachedInode], float]) -> None:
        self._rpc, self._ttl = rpc, ttl
        self._pages = DirectoryPages(rpc, ttl)
        self._open: dict[Handle, _OpenDirectory] = {}
        self._numbers = itertools.count(_FIRST)
        self._kept: OrderedDict[Node, int] = OrderedDict()

    def __contains__(self, handle: Handle) -> bool:
        return handle in self._open

    def open(self, node: Node) -> Handle:
        """Open a directory."""
        handle = Handle(next(self._numbers))
        self._open[handle] = _OpenDirectory(node)
        return handle

    def close(self, handle: Handle) -> None:
        """Forget the handle."""
        self._hold_page(self._open.pop(handle), None)

    def _opened(self, handle: Handle) -> tuple[_OpenDirectory, CachedInode]:
        try:
            opened = self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None
        with self._rpc.lock:
            file = self._rpc.inodes.file(opened.node)
        file.seen = True
        return opened, file

    def read(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """Yield the names of a directory behind ``offset``. Raises OSError."""
        opened, file = self._opened(handle)
        yield from _dots(file, offset)
        offset = max(offset, DOTS_END)
        while True:
            at = self._find(opened, file, offset)
            for number in range(at, len(opened.entries)):
                entry = opened.entries[number]
                opened.likely, offset = number + 1, entry.offset
                yield entry
            if opened.end:
                return

    def _find(self, opened: _OpenDirectory, file: CachedInode, offset: int) -> int:
        """Return which of the entries is the one behind an offset, after reading others if it is none of
        them. Raises OSError.
        """
        if offset > DOTS_END and (at := opened.find(offset)) is not None:
            return at
        page, is_next = opened.page, opened.page is not None and opened.page.next == offset
        self._hold_page(opened, None)
        if page and is_next and offset > DOTS_END and (page.end or not page.is_used):
            opened.set(self._pages.take_names(file, page), end=page.end, with_attributes=True)
        else:
            entries, end = self._read_page(file, offset)
            opened.set(entries, end=end, with_attributes=entries is file.listing)
        return 0

    def _read_page(self, file: CachedInode, offset: int) -> tuple[Entries, bool]:
        """Return the names behind an offset, as many as a page holds, and whether there are no more: all from
        the cache if it is valid. Raises OSError.
        """
        cookie = cookie_of(offset)
        if not cookie and (known := self._cached(file)) is not None:
            return known, True
        with self._rpc.call() as call:
            reply, packed = call.ask(
                lambda: p.ReadDirectory(call.remote(file), cookie, MAX_TRANSFER),
                p.Entries,
                idempotent=True,
                limit=MAX_TRANSFER,
            )
            since = call.since
            try:
                found = [_shown(entry) for entry in unpack_entries(packed)]
            except ProtocolError:
                raise os_error(errno.EIO) from None
        if not reply.end and (not found or found[-1].offset == offset):
            raise os_error(errno.EIO)  # the server would go on for ever
        with self._rpc.lock:
            counts = self._rpc.inodes.may_cache(file, reply.granted, since=since)
            self._rpc.inodes.learn(file, None, reply.granted, since=since)
            if counts and reply.end and not cookie:
                self._keep(file, found)
        return found, reply.end

    def _cached(self, file: CachedInode) -> Entries | None:
        with self._rpc.lock:
            return file.listing if file.listing is not None and self._ttl(file) else None

    def _keep(self, file: CachedInode, entries: Entries) -> None:
        """With the lock: cache the whole listing of a directory that is not too large; all together are
        bounded.
        """
        if len(entries) > _MOST_KEPT_NAMES:
            return
        file.listing = tuple(entries)
        self._kept.pop(file.node, None)
        self._kept[file.node] = len(entries)
        while sum(self._kept.values()) > _MOST_KEPT_IN_ALL:
            oldest, _ = self._kept.popitem(last=False)
            if directory := self._rpc.inodes.get(oldest):
                directory.listing = None

    def listing(self, file: CachedInode) -> Entries:
        """Return all names of a directory, from the cache if it is valid; none if it has more than a page of
        them. Raises OSError.
        """
        entries, end = self._read_page(file, DOTS_END)
        return entries if end else ()

    def read_plus(self, handle: Handle, offset: int, add: AddEntry) -> None:
        """Pass the names behind ``offset`` to ``add``, with their attributes. Raises OSError."""
        opened, file = self._opened(handle)
        for dot in _dots(file, offset):
            fields = (dot.inode, dot.mode, 1, *(0,) * 9)
            if not add(os.fsencode(dot.name), dot.offset, UNLISTED, fields, 0.0, 0.0):
                return
        offset = max(offset, DOTS_END)
        if offset == DOTS_END:
            self._hold_page(opened, None)
            known = self._cached(file)
            opened.set(known or (), end=known is not None, with_attributes=known is not None)
        if opened.page is None and opened.with_attributes:
            at = 0 if offset == DOTS_END else opened.find(offset)
            if at is not None:
                self._pass_cached(opened, file, at, add)
                return
        page = self._pages.follow(file, opened.page, offset)
        self._hold_page(opened, page)
        self._pages.pass_on(file, page, add)

    def _hold_page(self, opened: _OpenDirectory, page: HeldPage | None) -> None:
        with self._rpc.lock:
            self._rpc.inodes.pages_held += (page is not None) - (opened.page is not None)
        opened.page = page

    def _pass_cached(self, opened: _OpenDirectory, file: CachedInode, at: int, add: AddEntry) -> None:
        """Pass on names that were read before, with the attributes of those files that are cached, too."""
        with self._rpc.lock:
            left = self._ttl(file)
            file.in_listing |= left > 0
            for number in range(at, len(opened.entries)):
                entry = opened.entries[number]
                if not self._pass_cached_one(file, entry, left, add):
                    return
                opened.likely = number + 1

    def _pass_cached_one(self, file: CachedInode, entry: DirectoryEntry, left: float, add: AddEntry) -> bool:
        name, inodes = os.fsencode(entry.name), self._rpc.inodes
        node = file.names.get(name) if left else None
        if node and (listed := inodes.listed.get(node)):
            if not add(name, entry.offset, node, listed_attributes(listed).fields(), left, left):
                return False
            inodes.listed.put(node, (*listed[:4], listed[4] + 1, listed[5]))
            return True
        known = inodes.get(node) if node else None
        if known is None or known.attributes is None or not (seconds := self._ttl(known)):
            fields = (entry.inode, entry.mode, 1, *(0,) * 9)
            return add(name, entry.offset, UNLISTED, fields, 0.0, 0.0)
        if not add(name, entry.offset, known.node, known.attributes.fields(), seconds, left):
            return False
        inodes.use(known)
        return True


def _dots(file: CachedInode, offset: int) -> Iterator[DirectoryEntry]:
    for number, name in enumerate((".", ".."), 1):
        if offset < number:
            yield DirectoryEntry(name, file.inode, stat.S_IFDIR, number)


def _shown(entry: DirectoryEntry) -> DirectoryEntry:
    return DirectoryEntry(entry.name, entry.inode, entry.mode, offset_of(entry.offset))

# SPDX-License-Identifier: Apache-2.0
"""Edge: reads directories page by page, with attributes (READDIRPLUS) or names alone.

What a page brings counts only as long as its grants do: that is looked at when an entry is passed on, which
may be long after the page came.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.session import Session, now
from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.vfs.inode_api import UNLISTED, AddEntry
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, DirectoryEntry, os_error

DOTS_END = 2
"""The offset behind the dots; a server's cookie is behind it."""
_MAX_OFFSET = (1 << 63) - 1
_FIRST_PAGE, _SMALL_PAGE = 1 << 18, 1 << 16  # bytes
_Entry = tuple[int, bytes, c.Granted, tuple[int, ...]]


def _offset_of(cookie: int) -> int:
    """Return the offset that programs see in place of a server's cookie."""
    return cookie + DOTS_END if cookie < _MAX_OFFSET - DOTS_END else _MAX_OFFSET


def _cookie_of(offset: int) -> int:
    """Return the server's cookie for an offset that programs have seen. The largest cookie is the end of an
    ext4 directory.
    """
    return offset if offset == _MAX_OFFSET else max(0, offset - DOTS_END)


@dataclass(slots=True)
class ListedPage:
    """A page of a directory, with attributes if it is ``plus``: its entries begin behind ``cookie``, those
    not yet passed on at byte ``at``, behind the offset ``next``. ``granted``, ``since`` and ``verifier`` are
    those of the request.
    """

    data: bytes
    end: bool
    granted: int
    since: int
    verifier: int
    plus: bool
    cookie: int
    at: int
    next: int
    size: int

    @property
    def is_used(self) -> bool:
        """Whether all entries are passed on."""
        return self.at >= len(self.data)

    def entry(self) -> _Entry:
        """Return the next entry, and behind which byte it ends. Raises OSError."""
        try:
            found = c.unpack_entry(self.data, self.at)
        except ProtocolError:
            raise os_error(errno.EIO) from None
        if found[2][0] == self.cookie:
            raise os_error(errno.EIO)  # the server would go on for ever
        return found


class DirectoryPages:
    """Reads pages of directories for one client. ``ttl`` returns for how many seconds the cached state of a
    file is valid.
    """

    def __init__(self, session: Session, ttl: Callable[[CachedInode], float]) -> None:
        self._session, self._inodes, self._ttl = session, session.inodes, ttl

    def fetch(
        self, directory: CachedInode, offset: int, size: int = _FIRST_PAGE, *, plus: bool
    ) -> ListedPage:
        """Return the page that begins behind an offset. Raises OSError."""
        cookie = _cookie_of(offset)
        with self._session.call() as call:
            reply, data = call.ask(
                lambda: c.ReadDirectoryPlus(
                    call.remote(directory), (), cookie, size, plus, not plus, self._inodes.wants_bare
                ),
                c.EntriesPlus,
                idempotent=True,
                limit=MAX_TRANSFER,
            )
            if not (data or reply.end):
                raise os_error(errno.EIO)  # the server would go on for ever
            known = (reply.end, reply.granted, call.since, call.verifier)
            return ListedPage(bytes(data), *known, plus, cookie, 0, offset, size)

    def follow(
        self, directory: CachedInode, page: ListedPage | None, offset: int, *, plus: bool
    ) -> ListedPage:
        """Return a page whose next entry is behind ``offset``: ``page`` if it is that one and still counts,
        else a new one, with attributes if ``plus``; there are no more entries if it is used up. Raises
        OSError.
        """
        is_next = page is not None and page.next == offset and (page.plus or not plus)
        if page and is_next and page.is_used and page.end:
            return page
        if page is None or not is_next or page.is_used:
            size = min(4 * page.size, MAX_TRANSFER) if page and is_next else _FIRST_PAGE
            page = self.fetch(directory, offset, size, plus=plus)
        with self._session.lock:
            counts = self._counts(directory, page)
        if counts or not (plus and page.granted):
            return page
        return self.fetch(directory, offset, _SMALL_PAGE, plus=True)

    def _counts(self, directory: CachedInode, page: ListedPage) -> bool:
        return page.plus and self._inodes.may_cache(directory, page.granted, since=page.since)

    def _left(self, directory: CachedInode, page: ListedPage) -> float:
        """With the lock: return for how many seconds what a page brings may be cached."""
        if not (self._counts(directory, page) and self._inodes.is_new(page.since)):
            return 0.0
        directory.granted = max(directory.granted, page.granted)
        return max(0.0, self._inodes.lease_end - now())

    def names(self, directory: CachedInode, page: ListedPage) -> Iterator[DirectoryEntry]:
        """Yield the names of a page that are not yet passed on, and cache the attributes that it has:
        programs often list first, and look at each file then. Raises OSError.
        """
        while not page.is_used:
            at, name, about, fields = page.entry()
            offset = _offset_of(about[0])
            if page.plus:
                with self._session.lock:
                    is_kept = self._left(directory, page) > 0
                    if is_kept and (file := self._learned(directory, page, name, about, fields)):
                        self._inodes.idle_unless_used(file)
            yield DirectoryEntry(os.fsdecode(name), fields[0], stat.S_IFMT(fields[1]), offset)
            page.at, page.next = at, offset
        if page.plus:
            with self._session.lock:
                self._inodes.forget_old()

    def pass_on(self, directory: CachedInode, page: ListedPage, add: AddEntry) -> None:
        """Pass on entries of a page, with their attributes if these may be cached, as long as there is room
        for them. Raises OSError.
        """
        with self._session.lock:
            left = self._left(directory, page)
            directory.in_listing |= left > 0
            size = len(page.data)
            while page.at < size:
                at, name, about, fields = page.entry()
                offset = _offset_of(about[0])
                file = self._learned(directory, page, name, about, fields) if left else None
                known = file.fields() if file else None
                if file and known:
                    self._inodes.use(file)
                    if not add(name, offset, file.node, known, left, left):
                        self._inodes.forget(file.node, 1)
                        return
                else:
                    if file:
                        self._inodes.idle_unless_used(file)
                    if not add(name, offset, UNLISTED, fields, 0.0, 0.0):
                        return
                page.at, page.next = at, offset

    def _learned(
        self, directory: CachedInode, page: ListedPage, name: bytes, about: c.Granted, fields: tuple[int, ...]
    ) -> CachedInode | None:
        """Cache what an entry tells; return the file, None if it was not granted, or recalled since."""
        _, remote, granted, readable, bare = about
        inodes = self._inodes
        if not inodes.is_held(fields[0], granted, page.verifier):
            return None
        if not remote:
            return inodes.insert_listed(fields, directory, name, granted, bare=bare, since=page.since)
        reply = FoundIs(remote, Attributes(*fields, bare=bare), granted, page.granted, readable)
        return inodes.insert(reply, directory, name, since=page.since, verifier=page.verifier)

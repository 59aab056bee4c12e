# SPDX-License-Identifier: Apache-2.0
"""Edge: holds the directories that a client has open, and lists them."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.listing.pages import DOTS_END, DirectoryPages, ListedPage
from millpond.fs.client.open_files import OpenFile
from millpond.fs.client.session import Session
from millpond.fs.vfs.inode_api import UNLISTED, AddEntry
from millpond.fs.vfs.path_api import MAX_TRANSFER, DirectoryEntry, Handle, os_error

_FIRST = 1 << 62  # the first handle of a directory: no open file has such a number


@dataclass(slots=True)
class _OpenDirectory:
    opened: OpenFile
    page: ListedPage | None = None


class OpenDirectories:
    """The open directories of one client. ``ttl`` returns for how many seconds the cached state of a file is
    valid.
    """

    def __init__(self, session: Session, ttl: Callable[[CachedInode], float]) -> None:
        self._session, self._pages = session, DirectoryPages(session, ttl)
        self._open: dict[Handle, _OpenDirectory] = {}
        self._numbers = itertools.count(_FIRST)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, handle: Handle) -> bool:
        return handle in self._open

    def open(self, file: CachedInode) -> Handle:
        """Open a directory, here alone."""
        handle = Handle(next(self._numbers))
        self._open[handle] = _OpenDirectory(OpenFile(file, os.O_RDONLY, 0, 0, direct=True))
        return handle

    def close(self, handle: Handle) -> None:
        """Forget the handle."""
        self._hold_page(self._open.pop(handle), None)

    def get(self, handle: Handle) -> OpenFile:
        """Return an open directory. Raises OSError: EBADF."""
        return self._opened(handle).opened

    def _opened(self, handle: Handle) -> _OpenDirectory:
        try:
            directory = self._open[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None
        directory.opened.file.seen = True
        return directory

    def _hold_page(self, directory: _OpenDirectory, page: ListedPage | None) -> None:
        with self._session.lock:
            self._session.inodes.pages_held += (page is not None) - (directory.page is not None)
        directory.page = page

    def _page(self, directory: _OpenDirectory, offset: int, *, plus: bool) -> ListedPage:
        """Return the page of which the next entry is behind an offset. Raises OSError."""
        if offset == DOTS_END:
            self._hold_page(directory, None)
        page = self._pages.follow(directory.opened.file, directory.page, offset, plus=plus)
        self._hold_page(directory, page)
        return page

    def read(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        """Yield the names of a directory behind ``offset``. Raises OSError."""
        directory = self._opened(handle)
        yield from _dots(directory.opened.file, offset)
        offset = max(offset, DOTS_END)
        while True:
            page = self._page(directory, offset, plus=False)
            yield from self._pages.names(directory.opened.file, page)
            if page.end:
                return
            offset = page.next

    def listing(self, file: CachedInode) -> Sequence[DirectoryEntry]:
        """Return all names of a directory; none if it has more than a page of them. Raises OSError."""
        page = self._pages.fetch(file, DOTS_END, MAX_TRANSFER, plus=False)
        return list(self._pages.names(file, page)) if page.end else ()

    def read_plus(self, handle: Handle, offset: int, add: AddEntry) -> None:
        """Pass the names behind ``offset`` to ``add``, with their attributes. Raises OSError."""
        directory = self._opened(handle)
        for dot in _dots(directory.opened.file, offset):
            fields = (dot.inode, dot.mode, 1, *(0,) * 9)
            if not add(os.fsencode(dot.name), dot.offset, UNLISTED, fields, 0.0, 0.0):
                return
        page = self._page(directory, max(offset, DOTS_END), plus=True)
        self._pages.pass_on(directory.opened.file, page, add)


def _dots(file: CachedInode, offset: int) -> Iterator[DirectoryEntry]:
    for number, name in enumerate((".", ".."), 1):
        if offset < number:
            yield DirectoryEntry(name, file.inode, stat.S_IFDIR, number)

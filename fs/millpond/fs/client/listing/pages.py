# SPDX-License-Identifier: Apache-2.0
"""Edge: lists directories with attributes (READDIRPLUS), a page of names with one request.

What a page brings counts only as long as its grants do: that is looked at when an entry is passed on, which
may be long after the page came.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence

from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.dir_page import DOTS_END, MAX_OFFSET, HeldPage, cookie_of, offset_of
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.rpc_pool import RpcPool, now
from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.vfs.inode_api import UNLISTED, AddEntry, Node
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, DirectoryEntry, os_error

_FIRST_PAGE, _SMALL_PAGE = 1 << 18, 1 << 16  # bytes


class DirectoryPages:
    """Reads pages of directories for one client. ``ttl`` returns for how many seconds the cached state of a
    file is valid.
    """

    def __init__(self, rpc: RpcPool, ttl: Callable[[CachedInode], float]) -> None:
        self._rpc, self._inodes, self._ttl = rpc, rpc.inodes, ttl

    def fetch(self, directory: CachedInode, offset: int, size: int = _FIRST_PAGE) -> HeldPage:
        """Return the page that begins behind an offset. Raises OSError."""
        cookie = cookie_of(offset)
        with self._rpc.call() as call:
            reply, data = call.ask(
                lambda: c.ReadDirectoryPlus(call.remote(directory), (), cookie, size, True),
                c.EntriesPlus,
                idempotent=True,
                limit=MAX_TRANSFER,
            )
            if not (data or reply.end):
                raise os_error(errno.EIO)  # the server would go on for ever
            known = (reply.end, reply.granted, call.since, call.verifier)
            return HeldPage(bytes(data), *known, cookie, 0, offset, size)

    def follow(self, directory: CachedInode, page: HeldPage | None, offset: int) -> HeldPage:
        """Return a page whose next entry is behind ``offset``: ``page`` if it is that one and still counts,
        else a new one; there are no more entries if it is used up. Raises OSError.
        """
        is_next = page is not None and page.next == offset
        if page and is_next and page.is_used and page.end:
            return page
        if page is None or not is_next or page.is_used:
            size = min(4 * page.size, MAX_TRANSFER) if page and is_next else _FIRST_PAGE
            page = self.fetch(directory, offset, size)
        with self._rpc.lock:
            counts = self._counts(directory, page)
        return page if counts or not page.granted else self.fetch(directory, offset, _SMALL_PAGE)

    def _counts(self, directory: CachedInode, page: HeldPage) -> bool:
        return self._inodes.may_cache(directory, page.granted, since=page.since)

    def pass_on(self, directory: CachedInode, page: HeldPage, add: AddEntry) -> None:
        """Pass on entries of a page, with their attributes if these may be cached, as long as there is room
        for them. Raises OSError.
        """
        try:
            with self._rpc.lock:
                counts = self._counts(directory, page) and self._inodes.is_new(page.since)
                left = max(0.0, self._inodes.lease_end - now())
                if counts:
                    directory.granted = max(directory.granted, page.granted)
                    directory.in_listing = True
                self._pass_all(directory, page, add, left if counts else 0.0)
        except ProtocolError:
            raise os_error(errno.EIO) from None

    def _pass_all(self, directory: CachedInode, page: HeldPage, add: AddEntry, left: float) -> None:
        data, names, place, size = page.data, directory.names, page.at, len(page.data)
        listed_or_new, list_file, record = self._inodes.listed_or_new, self._inodes.list_file, c.RECORD
        while place < size:
            at, name, about, fields = c.unpack_entry(data, place)
            cookie, remote, granted, _ = about
            if cookie == page.cookie:
                raise os_error(errno.EIO)  # the server would go on for ever
            inode, offset = fields[0], min(cookie + DOTS_END, MAX_OFFSET)
            # links to one file are told from each other by more than a listing
            node = listed_or_new(inode, granted, remote or fields[2] > 1) if left else UNLISTED
            if node is None:
                if not self._pass_known(directory, page, add, left, name, about, fields):
                    return
            else:
                if not add(name, offset, node, fields, left, left):
                    return
                if node:
                    list_file(directory, name, inode, granted, data[place : place + record], node)
                    names[name] = node
            page.at, page.next, place = at, offset, at

    def take_names(self, directory: CachedInode, page: HeldPage) -> list[DirectoryEntry]:
        """Return all names of a page that are not yet passed on, and cache their attributes: programs often
        list first, and look at each file then. Raises OSError.
        """
        names = list[DirectoryEntry]()

        def add(name: bytes, offset: int, node: Node, fields: Sequence[int], _: float, __: float) -> bool:
            names.append(DirectoryEntry(os.fsdecode(name), fields[0], stat.S_IFMT(fields[1]), offset))
            if node:
                taken.append(node)
            return True

        taken = list[Node]()
        self.pass_on(directory, page, add)
        with self._rpc.lock:
            for node in taken:  # looked up by nobody but this listing
                self._inodes.keep_unused(node)
        return names

    def _pass_known(
        self,
        directory: CachedInode,
        page: HeldPage,
        add: AddEntry,
        left: float,
        name: bytes,
        about: c.Granted,
        fields: Sequence[int],
    ) -> bool:
        """Pass on a file that has a node on the server, or more to be cached than a listing brings. Returns
        whether there was room.
        """
        cookie, remote, granted, readable = about
        found, inodes = Attributes(*fields), self._inodes
        if remote:
            reply = FoundIs(remote, found, granted, page.granted, readable)
            file = inodes.insert(reply, directory, name, since=page.since, verifier=page.verifier)
        else:
            file = inodes.found(found, directory, name)
            inodes.learn(file, found, granted, since=page.since)
            inodes.learn_name(directory, name, file.node, page.granted, since=page.since)
        known = file.attributes
        if known is None:
            return add(name, offset_of(cookie), UNLISTED, fields, 0.0, 0.0)
        inodes.use(file)
        if add(name, offset_of(cookie), file.node, known.fields(), self._ttl(file), left):
            return True
        inodes.forget(file.node, 1)
        return False

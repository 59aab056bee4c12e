# SPDX-License-Identifier: Apache-2.0
"""Edge: many files of a volume at once: listed with attributes, read and stored whole, hundreds in a request.

Nothing that is listed or read here is cached.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence

from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.invalidation import Invalidation
from millpond.fs.client.session import Session
from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto.validate import are_outcomes
from millpond.fs.vfs.bulk_api import SMALL_BYTES, FileRead, SmallFile
from millpond.fs.vfs.inode_api import Node, one_name
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, os_error


class RemoteBulk:
    """BulkFs of one client. ``invalidation`` invalidates what is cached of directories around a change.
    Threads may call at once.
    """

    def __init__(self, session: Session, invalidation: Callable[[CachedInode], Invalidation]) -> None:
        self._session, self._invalidation = session, invalidation

    def list(self, start: Node, path: Sequence[bytes]) -> Iterator[tuple[bytes, Attributes]]:
        """Iterate over the names in a directory, with attributes: a request for each page."""
        names, cookie, end = tuple(one_name(name) for name in path), 0, False
        while not end:
            entries, end = self._page(self._session.inodes.file(start), names, cookie)
            if not end and (not entries or entries[-1].cookie == cookie):
                raise os_error(errno.EIO)  # the server would go on for ever
            for entry in entries:
                yield entry.name, entry.attributes
                cookie = entry.cookie

    def _page(
        self, start: CachedInode, path: tuple[bytes, ...], cookie: int
    ) -> tuple[Sequence[c.EntryPlus], bool]:
        with self._session.call() as call:
            reply, data = call.ask(
                lambda: c.ReadDirectoryPlus(call.remote(start), path, cookie, bare=True),
                c.EntriesPlus,
                idempotent=True,
                limit=MAX_TRANSFER,
            )
            try:
                return list(c.unpack_page(data)), reply.end
            except ProtocolError:
                raise os_error(errno.EIO) from None

    def read(self, directory: Node, names: Sequence[bytes]) -> Iterator[FileRead]:
        """Read small regular files, as many in a request as fit."""
        left = tuple(one_name(name) for name in names)
        while left:
            found, looked = self._read_some(self._session.inodes.file(directory), left)
            if not 0 < looked <= len(left):
                raise os_error(errno.EIO)
            left = left[looked:]
            yield from found

    def _read_some(self, directory: CachedInode, names: tuple[bytes, ...]) -> tuple[Sequence[FileRead], int]:
        with self._session.call() as call:
            reply, data = call.ask(
                lambda: f.FetchMany(call.remote(directory), names, SMALL_BYTES, delegated=False),
                f.Fetched,
                idempotent=True,
                limit=MAX_TRANSFER,
            )
            try:
                found = [
                    FileRead(names[number], file.attributes, bytes(contents))
                    for number, file, contents in f.unpack_found(data)
                ]
            except (ProtocolError, IndexError):
                raise os_error(errno.EIO) from None
        return found, reply.looked

    def store(self, directory: Node, files: Sequence[SmallFile]) -> Sequence[int]:
        """Store files whole, with one request. Returns an errno for each."""
        at, payload = self._session.inodes.file(directory), c.pack_files(files)
        with self._invalidation(at), self._session.call() as call:
            reply, _ = call.ask(
                lambda: c.StoreFiles(call.remote(at)), c.FilesStored, idempotent=True, payload=payload
            )
        with self._session.lock:
            at.drop_names()
        if len(reply.errors) != len(files) or not are_outcomes(reply.errors):
            raise os_error(errno.EIO)
        return reply.errors

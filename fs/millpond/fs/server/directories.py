# SPDX-License-Identifier: Apache-2.0
"""Edge: lists directories for a client, page by page. Nothing is kept from one page to the next."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence

from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto import file_ops as p
from millpond.fs.server.client_state import ClientState
from millpond.fs.store.create import proc_path
from millpond.fs.store.directories import DOTS, blocks_from
from millpond.fs.store.extended import has_no_attributes
from millpond.fs.store.identity import key_of
from millpond.fs.vfs.inode_api import ROOT, FoundEntry, Node
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, Handle, os_error, within
from millpond.wire.channel import FileSlice
from millpond.wire.messages import Message

Reply = tuple[Message, bytes | FileSlice]
_MAX_OFFSET = (1 << 63) - 1


class DirectoryHandlers(ClientState):
    """Handlers of a client's lookups and listings."""

    def _found_reply(self, found: FoundEntry, named: int = 0) -> p.FoundIs:
        """Build the reply of a lookup. The attributes are read after they are granted."""
        self._reference(found.node)
        granted = self._grant_read(found.node)
        attributes = self._backing.getattr(found.node).attributes if granted else found.attributes
        readable = bool(granted) and self._may_read(found.node, attributes)
        return p.FoundIs(found.node, attributes, granted, named, readable)

    def _may_read(self, node: Node, attributes: Attributes) -> bool:
        return stat.S_ISREG(attributes.mode) and self._backing.may_read(node)

    def _walk(self, start: Node, names: tuple[bytes, ...], *, again: bool = False) -> FoundEntry:
        if names and self._backing.hides(start, names[0]):
            raise os_error(errno.ENOENT)
        return (self._backing if again else self._coherent).walk(start, names)

    def _shows(self, node: Node, name: bytes) -> bool:
        return name not in DOTS and (node != ROOT or not self._backing.hides(node, name))

    @contextlib.contextmanager
    def _opened_directory(self, node: Node) -> Iterator[tuple[Handle, int]]:
        """Yield the handle and the descriptor of a directory."""
        handle = self._coherent.opendir(node)
        try:
            yield handle, self._coherent.descriptor(handle)
        finally:
            self._coherent.release(handle)

    def _is_empty(self, node: Node) -> bool:
        """Return whether a directory certainly has no names, and compares them by their bytes."""
        with contextlib.suppress(OSError), self._opened_directory(node) as (_, directory):
            return not os.listdir(directory) and self._backing.compares_bytes(node)  # noqa: PTH208
        return False

    def _page(self, node: Node, request: c.ReadDirectoryPlus, granted: int) -> Reply:
        page = c.Page(within(request.size, 0, MAX_TRANSFER))
        cookie = within(request.cookie, 0, _MAX_OFFSET)
        with self._opened_directory(node) as (handle, directory):
            if request.names_only:
                end = self._fill_names(page, node, handle, cookie)
            else:
                end = self._fill(page, node, directory, request)
        return c.EntriesPlus(end, granted), page.packed()

    def _fill_names(self, page: c.Page, node: Node, handle: Handle, cookie: int) -> bool:
        """Add names with inodes and types alone to a page. Returns whether there were no more."""
        for entry in self._coherent.readdir(handle, cookie):
            name = os.fsencode(entry.name)
            if not self._shows(node, name) or not entry.mode:  # removed meanwhile
                continue
            if not page.has_room(name):
                return False
            page.add(name, entry.offset, (entry.inode, entry.mode, 1, *(0,) * 9))
        return True

    def _fill(self, page: c.Page, node: Node, directory: int, request: c.ReadDirectoryPlus) -> bool:
        """Add names with attributes to a page, granted if the request wants them so. Returns whether there
        were no more.

        A regular file is granted by its inode number and not looked up: a client that lists a million files
        takes no descriptor.
        """
        device, identity, delegated = os.fstat(directory).st_dev, self._backing.identity, request.delegated
        top = f"{proc_path(directory)}/"
        for block in blocks_from(directory, within(request.cookie, 0, _MAX_OFFSET)):
            grants = self._grant_files(node, device, block) if delegated else [0] * len(block)
            for (name, inode, kind, behind), granted in zip(block, grants, strict=True):
                if not self._shows(node, name):
                    continue
                if not page.has_room(name):
                    return False
                with contextlib.suppress(OSError):  # removed meanwhile, or it cannot be looked up
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    is_granted = kind == stat.S_IFREG and key_of(status) == (device, inode)
                    if delegated and not is_granted:
                        self._add_looked_up(page, node, name, behind)
                        continue
                    if not delegated and self._recall_writer(status):
                        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    is_bare = request.bare and has_no_attributes(top + os.fsdecode(name))
                    page.add(name, behind, identity.fields(status), 0, granted, bare=is_bare)
        return True

    def _recall_writer(self, status: os.stat_result) -> bool:
        number = self._backing.identity.number(key_of(status))
        return self._delegations.recall_writer(self.holder, number)

    def _grant_files(
        self, node: Node, device: int, block: Sequence[tuple[bytes, int, int, int]]
    ) -> Iterable[int]:
        """Grant the regular files of a block, before their attributes are read. Returns the grants, 0 for
        all others.
        """
        if not self._backing.is_public(node) or node == ROOT:
            return [0] * len(block)
        number = self._backing.identity.number
        files = [number((device, inode)) for _, inode, kind, _ in block if kind == stat.S_IFREG]
        granted = iter(self._delegations.grant_reads(self.holder, files))
        return [next(granted) if kind == stat.S_IFREG else 0 for _, _, kind, _ in block]

    def _add_looked_up(self, page: c.Page, node: Node, name: bytes, behind: int) -> None:
        found = self._found_reply(self._walk(node, (name,)))
        page.add(name, behind, found.attributes.fields(), found.node, found.granted, found.readable)

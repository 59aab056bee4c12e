# SPDX-License-Identifier: Apache-2.0
"""Pure: answers READDIR and READDIRPLUS of the kernel with as many names as fit its buffer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from millpond.fs.fuse import abi
from millpond.fs.vfs.inode_api import InodeFs, Node
from millpond.fs.vfs.path_api import Handle

_PADDING = tuple(bytes(number) for number in range(8))
_BILLION = 10**9

Ids = Callable[[int, int], tuple[int, int]]
"""Returns the user and the group that are shown for those of a file."""


def list_names(tree: InodeFs, body: memoryview) -> list[bytes]:
    """Answer READDIR."""
    handle, offset, size, *_ = abi.READ.unpack_from(body)
    packed, left, pack = list[bytes](), size, abi.DIRENT.pack
    for entry in tree.readdir(Handle(handle), offset):
        name = os.fsencode(entry.name)
        padding = -len(name) % 8
        left -= abi.DIRENT.size + len(name) + padding
        if left < 0:
            break
        packed += (pack(entry.inode, entry.offset, len(name), entry.mode >> 12), name, _PADDING[padding])
    return [b"".join(packed)]


def list_attributes(tree: InodeFs, body: memoryview, ids: Ids, *, caches_names: bool) -> list[bytes]:
    """Answer READDIRPLUS. The kernel caches names only with ``caches_names``."""
    handle, offset, size, *_ = abi.READ.unpack_from(body)
    answer = EntryBuffer(size, ids, caches_names=caches_names)
    tree.readdirplus(Handle(handle), offset, answer.add)
    return [answer.packed()]


class EntryBuffer:
    """Packs ``size`` bytes of names with attributes (struct fuse_direntplus)."""

    def __init__(self, size: int, ids: Ids, *, caches_names: bool) -> None:
        self._left, self._ids, self._caches_names = size, ids, caches_names
        self._parts: list[bytes] = []
        self._seconds: tuple[float, float] | None = None
        self._times = (0, 0, 0, 0)
        self._owner = self._shown = (-1, -1)

    def add(
        self, name: bytes, offset: int, node: Node, fields: Sequence[int], seconds: float, name_seconds: float
    ) -> bool:
        """See ``vfs.inode_api.AddEntry``."""
        padding = -len(name) % 8
        left = self._left - abi.DIRENTPLUS.size - len(name) - padding
        if left < 0:
            return False
        self._left = left
        if (seconds, name_seconds) != self._seconds:
            self._set_times(seconds, name_seconds)
        inode, mode, links, uid, gid, size, blocks, block_size, atime, mtime, ctime, rdev = fields
        if (uid, gid) != self._owner:
            self._owner, self._shown = (uid, gid), self._ids(uid, gid)
        atime, atime_ns = divmod(atime, _BILLION)
        mtime, mtime_ns = divmod(mtime, _BILLION)
        ctime, ctime_ns = divmod(ctime, _BILLION)
        head = abi.DIRENTPLUS.pack(
            node,
            0,
            *self._times,
            inode,
            size,
            blocks,
            atime,
            mtime,
            ctime,
            atime_ns,
            mtime_ns,
            ctime_ns,
            mode,
            links,
            *self._shown,
            rdev,
            block_size,
            0,
            inode,
            offset,
            len(name),
            mode >> 12,
        )
        self._parts += (head, name, _PADDING[padding])
        return True

    def _set_times(self, seconds: float, name_seconds: float) -> None:
        self._seconds = seconds, name_seconds
        whole, part = abi.split_seconds(seconds)
        name_whole, name_part = abi.split_seconds(name_seconds if self._caches_names else 0.0)
        self._times = name_whole, whole, name_part, part

    def packed(self) -> bytes:
        """Return what was added."""
        return b"".join(self._parts)

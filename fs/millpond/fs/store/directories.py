# SPDX-License-Identifier: Apache-2.0
"""Edge (a file system): reads open directories block by block, from any of the file system's own positions.

However many names a directory has, a block of them at a time is in memory.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Sequence

from millpond.fs.store.identity import FileIdentity, Key, key_of
from millpond.fs.vfs.path_api import DirectoryEntry
from millpond.linux import syscalls

DOTS = (b".", b"..")
_BLOCK = 1 << 15  # bytes of a block of names: some thousand
_position = threading.Lock()  # a descriptor has one position, which two threads must not move at once


def blocks_from(directory: int, cookie: int) -> Iterator[Sequence[tuple[bytes, int, int, int]]]:
    """Iterate over blocks of entries behind ``cookie`` in an open directory: name, inode, type bits as in a
    mode (0: not known), and the cookie behind the entry. A cookie is the file system's own position, as NFS
    servers use it: it outlives the descriptor. Raises OSError.
    """
    while True:
        with _position:
            os.lseek(directory, cookie, os.SEEK_SET)
            found = syscalls.read_directory(directory, _BLOCK)
        if not found:
            return
        yield found
        cookie = found[-1][3]


def list_from(directory: int, cookie: int, identity: FileIdentity, top: Key) -> Iterator[DirectoryEntry]:
    """Iterate over the entries behind ``cookie``. The directory ``top`` is its own parent."""
    status = os.fstat(directory)
    for block in blocks_from(directory, cookie):
        for name, inode, kind, behind in block:
            if name in DOTS:
                here = b"." if key_of(status) == top else name
                number = identity.number(key_of(os.stat(here, dir_fd=directory)))
                yield DirectoryEntry(os.fsdecode(name), number, stat.S_IFDIR, behind)
                continue
            number = identity.number((status.st_dev, inode))
            yield DirectoryEntry(os.fsdecode(name), number, kind or _type(directory, name), behind)


def _type(directory: int, name: bytes) -> int:
    """Return a file's type bits where the directory does not hold them; 0 if it has vanished meanwhile."""
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return 0

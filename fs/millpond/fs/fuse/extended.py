# SPDX-License-Identifier: Apache-2.0
"""Edge: performs the kernel's requests about extended attributes and birth times.

A kernel looks for ``security.capability`` before it writes to a file; with FUSE_HANDLE_KILLPRIV_V2 not before
each write. Names of other namespaces than ``user.*`` are refused without a message to anybody; programs
like ``ls`` do not ask again on a file system that supports none of a namespace (EOPNOTSUPP).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Header, names
from millpond.fs.vfs.inode_api import Buffer, ExtendedFs, Node
from millpond.fs.vfs.path_api import os_error

_Reply = Sequence[Buffer]


class KernelExtended:
    """Performs the requests on ``tree``. Unless the kernel drops the privileges of written files only once
    (``is_cheap``), it is told that there are no extended attributes: it would ask before each write.
    """

    def __init__(self, tree: ExtendedFs, *, is_cheap: bool) -> None:
        self._tree, self._is_cheap = tree, is_cheap

    def _require(self) -> None:
        if not self._is_cheap:
            raise os_error(errno.ENOSYS)

    def get(self, header: Header, body: memoryview) -> _Reply:
        """Perform GETXATTR. Raises OSError: ERANGE if the value is larger than the caller's buffer."""
        self._require()
        size, name = abi.parse_getxattr(body)
        return _sized(self._tree.get(Node(header.node), name), size)

    def list(self, header: Header, body: memoryview) -> _Reply:
        """Perform LISTXATTR. Raises OSError: ERANGE if the names are longer than the caller's buffer."""
        self._require()
        found = self._tree.names(Node(header.node))
        return _sized(b"".join(name + b"\0" for name in found), abi.parse_listxattr(body))

    def set(self, header: Header, body: memoryview) -> _Reply:
        """Perform SETXATTR."""
        self._require()
        name, value, flags = abi.parse_setxattr(body)
        self._tree.set(Node(header.node), name, value, flags)
        return ()

    def remove(self, header: Header, body: memoryview) -> _Reply:
        """Perform REMOVEXATTR."""
        self._require()
        (name,) = names(body)
        self._tree.remove(Node(header.node), name)
        return ()


def _sized(data: bytes, size: int) -> _Reply:
    """Return the reply of ``data`` to a caller with a buffer of this size; of its size, if that is 0."""
    if not size:
        return [abi.pack_xattr_size(len(data))]
    if len(data) > size:
        raise os_error(errno.ERANGE)
    return [data]

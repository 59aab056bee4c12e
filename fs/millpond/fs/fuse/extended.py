# SPDX-License-Identifier: Apache-2.0
"""Edge: performs the kernel's requests about extended attributes.

A kernel looks for ``security.capability`` before it writes to a file; with FUSE_HANDLE_KILLPRIV_V2 not before
each write. Names of other namespaces than ``user.*`` are refused without a message to anybody; programs
like ``ls`` do not ask again on a file system that supports none of a namespace (EOPNOTSUPP).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Code, Header, names
from millpond.fs.vfs.inode_api import Buffer, ExtendedFs, Node
from millpond.fs.vfs.path_api import os_error

_Reply = Sequence[Buffer]


class KernelExtended:
    """Performs the requests on ``tree``. Unless the kernel drops the privileges of written files only once
    (``is_cheap``), it is told that there are no extended attributes: it would ask before each write.
    """

    def __init__(self, tree: ExtendedFs, *, is_cheap: bool) -> None:
        self._tree, self._is_cheap = tree, is_cheap

    def perform(self, header: Header, body: memoryview) -> _Reply:
        """Perform GETXATTR, LISTXATTR, SETXATTR and REMOVEXATTR. Raises OSError: ERANGE if the answer is
        larger than the caller's buffer.
        """
        if not self._is_cheap:
            raise os_error(errno.ENOSYS)
        node = Node(header.node)
        match header.code:
            case Code.GETXATTR:
                size, name = abi.parse_getxattr(body)
                return _sized(self._tree.get(node, name), size)
            case Code.LISTXATTR:
                found = b"".join(name + b"\0" for name in self._tree.names(node))
                return _sized(found, abi.parse_listxattr(body))
            case Code.SETXATTR:
                self._tree.set(node, *abi.parse_setxattr(body))
            case Code.REMOVEXATTR:
                self._tree.remove(node, *names(body))
        return ()


def _sized(data: bytes, size: int) -> _Reply:
    """Return the reply of ``data`` to a caller with a buffer of this size; of its size, if that is 0."""
    if not size:
        return [abi.pack_xattr_size(len(data))]
    if len(data) > size:
        raise os_error(errno.ERANGE)
    return [data]

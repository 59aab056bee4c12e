# SPDX-License-Identifier: Apache-2.0
"""Edge: performs a client's requests about extended attributes and birth times."""

from __future__ import annotations

import errno
from collections.abc import Callable

from millpond.base.errors import ProtocolError
from millpond.fs.proto import extended as x
from millpond.fs.proto.file_ops import AttributesAre
from millpond.fs.vfs.inode_api import Buffer, ExtendedFs, Node
from millpond.fs.vfs.path_api import os_error, within
from millpond.fs.vfs.xattr_names import MAX_LIST, MAX_VALUE
from millpond.wire.messages import Message


def perform_extended(
    tree: ExtendedFs,
    node: Node,
    request: x.ExtendedRequest,
    payload: Buffer,
    granted: Callable[[Node], AttributesAre],
) -> tuple[Message, bytes]:
    """Perform a request about a node; ``granted`` returns its attributes, read after they were granted to the
    client. Raises OSError and WouldBlock.
    """
    match request:
        case x.GetXattr():
            return x.XattrIs(), tree.get(node, request.name)
        case x.ListXattrs():
            known = granted(node)  # before the names: a change of these recalls them
            names = x.pack_names(tree.names(node))
            if len(names) > MAX_LIST:
                raise os_error(errno.E2BIG)
            return x.XattrsAre(known), names
        case x.SetXattr():
            if len(payload) > MAX_VALUE:
                raise os_error(errno.E2BIG)
            tree.set(node, request.name, bytes(payload), within(request.flags, 0, 3))
            return granted(node), b""
        case x.RemoveXattr():
            tree.remove(node, request.name)
            return granted(node), b""
        case x.GetBirthTime():
            return x.BirthTimeIs(tree.birth_time(node)), b""
    raise ProtocolError(f"'{request.NAME}' is no request to a volume")

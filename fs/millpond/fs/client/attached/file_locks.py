# SPDX-License-Identifier: Apache-2.0
"""Edge: connects a mount's file locks to the server's, over the client's session slots."""

from __future__ import annotations

from collections.abc import Callable

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.rpc_pool import RpcPool
from millpond.fs.filelocks.remote import RemoteLocks
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import Node


def remote_file_locks(rpc: RpcPool, flush: Callable[[CachedInode], None]) -> RemoteLocks:
    """Return the file locks of one client; ``flush`` sends what is gathered of a file, before each
    request.
    """

    def ask(node: Node | None, request: Callable[[int], r.LockRequest]) -> r.LockReply:
        file = None if node is None else rpc.file(node)
        if file is not None:
            flush(file)
        with rpc.call() as call:
            return call.ask(
                lambda: request(0 if file is None else call.remote(file)), r.LockReply, idempotent=True
            )[0]

    return RemoteLocks(ask)

"""Edge: the file locks of a mount whose server is reached over its connections."""

from __future__ import annotations

from collections.abc import Callable

from millpond.fs.client.rpc_pool import RpcPool
from millpond.fs.filelocks.remote import RemoteLocks
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import Node


def over_lanes(lanes: RpcPool) -> RemoteLocks:
    """Those of a client."""

    def ask(node: Node | None, request: Callable[[int], r.LockRequest]) -> r.LockReply:
        file = None if node is None else lanes.book.file(node)
        with lanes.turn() as turn:
            return turn.ask(
                lambda: request(0 if file is None else turn.remote(file)), r.LockReply, repeat=True
            )[0]

    return RemoteLocks(ask)

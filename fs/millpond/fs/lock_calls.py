"""Edge: the file locks of a mount whose server is reached over its connections."""

from __future__ import annotations

from collections.abc import Callable

from millpond.fs import range_messages as r
from millpond.fs.lanes import Lanes
from millpond.fs.remote_locks import RemoteLocks
from millpond.fs.tree import Node


def over_lanes(lanes: Lanes) -> RemoteLocks:
    """Those of a client."""

    def ask(node: Node | None, request: Callable[[int], r.LockRequest]) -> r.LockReply:
        file = None if node is None else lanes.book.file(node)
        with lanes.turn() as turn:
            return turn.ask(
                lambda: request(0 if file is None else turn.remote(file)), r.LockReply, repeat=True
            )[0]

    return RemoteLocks(ask)

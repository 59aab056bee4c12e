# SPDX-License-Identifier: Apache-2.0
"""Reduction nodes in this process, joined by socket pairs."""

from __future__ import annotations

import contextlib
import socket
import threading

from millpond.aggregate.node import ReductionNode
from millpond.base.errors import ConnectionLost, MillpondError
from millpond.wire.channel import Channel


class JoinedNodes:
    """The nodes by name, to which ``dial`` connects; those that are ``gone`` cannot be reached."""

    nodes: dict[str, ReductionNode]

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self._threads: list[threading.Thread] = []

    def dial(self, name: str) -> Channel:
        if name in self.gone:
            raise ConnectionLost(f"{name}: gone")
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=self._serve, args=(name, Channel(theirs, "a parent")))
        self._threads.append(thread)
        thread.start()
        return Channel(ours, name)

    def _serve(self, name: str, channel: Channel) -> None:
        with channel, contextlib.suppress(MillpondError):
            self.nodes[name].serve(channel)

    def have_ended(self) -> None:
        """See that all connections are served to their end."""
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

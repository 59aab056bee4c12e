# SPDX-License-Identifier: Apache-2.0
"""Edge (descriptors): the descriptors of a volume's server, which all its clients share."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import os_error

if TYPE_CHECKING:
    from millpond.fs.server.client_state import ClientState

_LEAST_OPEN = 16
_OF_EACH_OPEN_FILE = 2  # one to find the file, one to read and write it


class SharedDescriptors:
    """The descriptors of ``tree``. Threads may call at once."""

    def __init__(self, tree: BackingFs) -> None:
        self.tree = tree
        self._clients: dict[ClientState, Callable[[], bool]] = {}

    def add(self, client: ClientState, is_lost: Callable[[], bool]) -> None:
        """Add a client; ``is_lost`` tells whether it has no connection."""
        self._clients[client] = is_lost

    def remove(self, client: ClientState) -> None:
        """Remove a client, which has dropped its nodes."""
        self._clients.pop(client, None)

    @property
    def most_open(self) -> int:
        """Most files that one client may have open: they take half of the descriptors."""
        return max(_LEAST_OPEN, self.tree.max_descriptors // (2 * _OF_EACH_OPEN_FILE))

    def make_room(self, but: Node) -> None:
        """Close descriptors, not that of ``but``, until there are no more than there may be: first those of
        clients without a connection, then those of the client with the most nodes, so that each is left its
        share. Raises OSError: ENFILE if all are of open files.
        """
        while self.tree.is_full:
            if not any(client.forget_oldest(but) for client in self._by_share()):
                raise os_error(errno.ENFILE)

    def _by_share(self) -> list[ClientState]:
        clients = list(self._clients.items())
        return [client for client, is_lost in sorted(clients, key=lambda one: (not one[1](), -one[0].nodes))]

# SPDX-License-Identifier: Apache-2.0
"""Edge (/dev/fuse): the backing files of a mount with passthrough, registered for as long as they are used,
and for a while after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from millpond.fs.fuse.device import FuseDevice
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Handle

_MOST_IDLE = 16384  # each takes the kernel about 600 bytes, and no descriptor


class Backings:
    """The backing files: one for all open files of a node. At most ``most_idle`` of nodes that the kernel
    has not forgotten stay registered with no open file. Threads may call at once.
    """

    def __init__(self, kernel: FuseDevice, most_idle: int = _MOST_IDLE) -> None:
        self._kernel, self._most_idle = kernel, most_idle
        self._numbers: dict[Node, int] = {}
        self._users: dict[Node, set[Handle]] = {}
        self._idle: dict[Node, None] = {}
        self._lock = threading.Lock()

    def open(self, node: Node, handle: Handle, descriptor: Callable[[Handle], int]) -> int | None:
        """Return the number of a node's backing file; ``descriptor`` returns that of an open file. None if
        the kernel refuses it.
        """
        if self._kernel.passthrough_refusal:
            return None
        with self._lock:
            number = self._numbers.get(node)
            if number is None:
                try:
                    number = self._numbers[node] = self._kernel.open_backing(descriptor(handle))
                except OSError:
                    return None
            self._idle.pop(node, None)
            self._users.setdefault(node, set()).add(handle)
            return number

    def close(self, node: Node, handle: Handle) -> None:
        """Drop a handle. With the last one the backing file is idle."""
        if node not in self._users:
            return
        with self._lock:
            users = self._users[node]
            users.discard(handle)
            if users:
                return
            del self._users[node]
            self._idle[node] = None
            if len(self._idle) > self._most_idle:
                self._close(next(iter(self._idle)))

    def forget(self, node: Node) -> None:
        """Unregister the backing file of a node that the kernel has forgotten: it keeps a removed file."""
        if node in self._idle:
            with self._lock:
                if node in self._idle:
                    self._close(node)

    def _close(self, node: Node) -> None:
        """With the lock: unregister an idle backing file."""
        del self._idle[node]
        self._kernel.close_backing(self._numbers.pop(node))

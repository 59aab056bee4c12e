# SPDX-License-Identifier: Apache-2.0
"""Edge (/dev/fuse): the backing files of a mount with passthrough, registered while they are open."""

from __future__ import annotations

import threading
from collections.abc import Callable

from millpond.fs.fuse.device import FuseDevice
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Handle


class Backings:
    """The backing files: one for all open files of a node. Threads may call at once."""

    def __init__(self, kernel: FuseDevice) -> None:
        self._kernel = kernel
        self._files: dict[Node, tuple[int, set[Handle]]] = {}
        self._lock = threading.Lock()

    def open(self, node: Node, handle: Handle, descriptor: Callable[[Handle], int]) -> int | None:
        """Return the number of a node's backing file; ``descriptor`` returns that of an open file. None if
        the kernel refuses it.
        """
        if self._kernel.passthrough_refusal:
            return None
        with self._lock:
            if node not in self._files:
                try:
                    self._files[node] = self._kernel.open_backing(descriptor(handle)), set()
                except OSError:
                    return None
            number, users = self._files[node]
            users.add(handle)
            return number

    def close(self, node: Node, handle: Handle) -> None:
        """Drop a handle, with the last one the backing file."""
        with self._lock:
            if node not in self._files:
                return
            number, users = self._files[node]
            users.discard(handle)
            if not users:
                del self._files[node]
                self._kernel.close_backing(number)

# SPDX-License-Identifier: Apache-2.0
"""Edge: the file system of the device's own mount, whose kernel reads and writes files by passthrough."""

from __future__ import annotations

import errno

from millpond.fs.coherence.coherent_fs import CoherentFs, DelegationBreaker
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import FoundEntry, Locking, Node
from millpond.fs.vfs.kernel_memory import KernelMemory

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class DeviceFs(CoherentFs):
    """CoherentFs with passthrough whose kernel keeps in ``memory`` as many files as there may be
    descriptors.
    """

    def __init__(
        self, tree: BackingFs, breaker: DelegationBreaker, memory: KernelMemory, locks: Locking | None = None
    ) -> None:
        super().__init__(tree, breaker, passthrough=True, locks=locks)
        self._memory = memory

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """Return the file with this name, once the kernel has forgotten others if there is no descriptor."""
        while True:
            try:
                found = super().lookup(parent, name)
                break
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS or not self._memory.make_room():
                    raise
        with self._tree.pinned(found.node) as place:
            self._memory.check(place)  # a new descriptor has the lowest free number
        return found

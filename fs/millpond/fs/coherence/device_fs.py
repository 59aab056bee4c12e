# SPDX-License-Identifier: Apache-2.0
"""Edge: the file system of the device's own mount, whose kernel caches names and attributes.

Only the replies to lookups and to questions for attributes are cached: of these the kernel knows that they
are older than a recall.
"""

from __future__ import annotations

import contextlib
import errno
import stat

from millpond.fs.coherence.coherent_fs import CoherentFs, DelegationBreaker
from millpond.fs.coherence.device_cache import DeviceCache
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import CachedAttributes, FoundEntry, Locking, NegativeEntry, Node
from millpond.fs.vfs.kernel_memory import KernelMemory
from millpond.fs.vfs.path_api import Attributes, Handle

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class DeviceFs(CoherentFs):
    """CoherentFs with passthrough whose kernel keeps what ``cache`` lets it keep, and in ``memory`` as many
    files as there may be descriptors.
    """

    def __init__(
        self,
        tree: BackingFs,
        breaker: DelegationBreaker,
        cache: DeviceCache,
        memory: KernelMemory,
        locks: Locking | None = None,
    ) -> None:
        super().__init__(tree, breaker, passthrough=True, locks=locks)
        self._cache, self._memory = cache, memory
        self._compares_bytes: dict[Node, bool] = {}
        self.forget = self._forget

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        """Return the file with this name."""
        since = self._cache.begin()
        try:
            found = self._find(parent, name)
        except FileNotFoundError:
            raise NegativeEntry(self._name_seconds(parent, since)) from None
        with self._tree.pinned(found.node) as place:
            self._memory.check(place)  # a new descriptor has the lowest free number
        seconds = self._seconds(found.node, found.attributes, since)
        return FoundEntry(found.node, found.attributes, seconds, self._name_seconds(parent, since))

    def _find(self, parent: Node, name: bytes) -> FoundEntry:
        """Return the file with this name, once the kernel has forgotten others if there is no descriptor."""
        while True:
            try:
                return super().lookup(parent, name)
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                self._cache.drop_names()  # the kernel forgets what a lookup does not find
                if not self._memory.make_room():
                    raise

    def _seconds(self, node: Node, known: Attributes, since: int) -> float:
        return self._cache.seconds(known.inode, node, since, directory=stat.S_ISDIR(known.mode))

    def _name_seconds(self, parent: Node, since: int) -> float:
        """Return for how long the kernel may cache a name: 0 where it is the same as others (casefold)."""
        if since < 0:
            return 0.0
        if (bytewise := self._compares_bytes.get(parent)) is None:
            bytewise = self._compares_bytes[parent] = self._tree.compares_bytes(parent)
        return self._cache.seconds(self._tree.inode(parent), parent, since, directory=True) * bytewise

    def getattr(self, node: Node) -> CachedAttributes:
        """Return the attributes of a file."""
        since = self._cache.begin()
        known = super().getattr(node).attributes
        return CachedAttributes(known, self._seconds(node, known, since))

    def _forget(self, node: Node, times: int) -> None:
        with contextlib.suppress(OSError):
            inode = self._tree.inode(node)
            self._tree.forget(node, times)
            if not self._tree.knows(node):
                self._cache.forget(inode, node)
                self._compares_bytes.pop(node, None)

    def _begin_passthrough(self, node: Node, handle: Handle, allowed: bool | None) -> None:
        super()._begin_passthrough(node, handle, allowed)
        if handle in self._passthrough_inodes:
            self._cache.drop_attributes(self._passthrough_inodes[handle])

# SPDX-License-Identifier: Apache-2.0
"""Edge: the file system of the device's own mount, whose kernel reads and writes files by passthrough."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading

from millpond.fs.coherence.coherent_fs import CoherentFs
from millpond.fs.coherence.device_client import DeviceDelegationBreaker
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.mmap_writers import MmapWriters
from millpond.fs.vfs.inode_api import CacheMode, FoundEntry, Locking, Node
from millpond.fs.vfs.kernel_memory import KernelMemory
from millpond.fs.vfs.path_api import Handle

log = logging.getLogger(__name__)
_CANNOT_LOOK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class DeviceFs(CoherentFs):
    """CoherentFs whose kernel writes files that are open for writing itself, where ``breaker`` allows it, and
    keeps in ``memory`` as many files as there may be descriptors.
    """

    def __init__(
        self,
        tree: BackingFs,
        breaker: DeviceDelegationBreaker,
        memory: KernelMemory,
        locks: Locking | None = None,
    ) -> None:
        super().__init__(tree, breaker.write_intent, breaker.recall_writer, locks)
        self._breaker, self._memory = breaker, memory
        self._lock = threading.Lock()
        self._handles_of: dict[Node, set[Handle]] = {}
        self._direct: set[Handle] = set()
        self._passthrough_inodes: dict[Handle, int] = {}
        self._mapped = MmapWriters()
        self.cache_mode = self._cache_mode

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

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file; one to be written within a write intent, during which the kernel is registered
        as a writer.
        """
        is_written = flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_TRUNC
        with self._file_intent(node) if is_written else contextlib.nullcontext():
            return super().open(node, flags)

    def _add_open(self, node: Node, handle: Handle, flags: int) -> None:
        """Note an open file, and choose its cache mode: the same as that of the file's other handles, since
        the kernel refuses a mix (EIO).
        """
        with self._lock:
            others = self._handles_of.setdefault(node, set())
            by_daemon = bool(others) and others <= self._direct
            others.add(handle)
            if by_daemon:
                self._direct.add(handle)
        if flags & os.O_ACCMODE != os.O_RDONLY and not by_daemon:
            self._begin_passthrough(node, handle)

    def _begin_passthrough(self, node: Node, handle: Handle) -> None:
        """Register the kernel as a writer. If the breaker refuses, the daemon writes (DIRECT), unless another
        handle of the file is in passthrough by now.
        """
        inode = self._tree.inode(node)
        if not self._breaker.begin_writing(inode):
            with self._lock:
                if self._handles_of[node] == {handle}:
                    self._direct.add(handle)
                    return
            self._breaker.begin_writing(inode, force=True)
        self._passthrough_inodes[handle] = inode

    def _cache_mode(self, handle: Handle) -> CacheMode:
        return CacheMode.DIRECT if handle in self._direct else CacheMode.PASSTHROUGH

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        node = self._tree.node_of(handle)
        super().release(handle)
        with self._lock:
            self._direct.discard(handle)
            if node in self._handles_of:
                self._handles_of[node].discard(handle)
                if not self._handles_of[node]:
                    del self._handles_of[node]
        if (inode := self._passthrough_inodes.pop(handle, None)) is not None:
            self._end_writing(node, inode)

    def _end_writing(self, node: Node, inode: int) -> None:
        """Report the end of passthrough writes once the file is not mapped for writing either."""
        try:
            looking = self._tree.open(node, os.O_RDONLY)
        except OSError as error:
            if error.errno in _CANNOT_LOOK:
                log.warning("cannot find out whether a file is still mapped: %s", error.strerror)
                return  # the file stays undelegated
            self._breaker.end_writing(inode)
            return

        def over() -> None:
            self._tree.release(looking)
            self._breaker.end_writing(inode)

        if not self._mapped.closed(inode, self._tree.descriptor(looking), over):
            self._tree.release(looking)  # the file stays undelegated

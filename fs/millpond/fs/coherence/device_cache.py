# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread, memory that processes share): what the kernel of the device's mount may cache, and recalls
of it.

Names and attributes are marked in a shared bitmap before the kernel has them. A host's change of a marked
inode waits until the mount has dropped it from the kernel; what a host is changing is marked in the manager's
bitmap, and not cached meanwhile. The kernel keeps nothing for longer than the mount's lease, so that a mount
that stands still delays hosts no longer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.fs.coherence.lease_file import LEASE_SECONDS
from millpond.fs.coherence.shared_bitmap import (
    CACHE_SLOTS,
    SharedBitmap,
    SharedBitmapView,
    receive_bitmap,
    send_bitmap,
)
from millpond.fs.proto import delegations as m
from millpond.fs.vfs.inode_api import KernelCache, Node
from millpond.linux.sockets import connect
from millpond.linux.syscalls import take_barriers
from millpond.wire.channel import Channel

log = logging.getLogger(__name__)
NOT_CACHED: Final = -1
_CONNECT_SECONDS, _SETUP_SECONDS, _AGAIN_SECONDS = 0.25, 2.0, 0.2
_LEAST_LEASE = 0.1
_JOIN_SECONDS = 5.0
_SHARE = 0.9  # of the lease that is left: the kernel counts from when the program runs again
_INSTANT, _INSTANTS = 0.001, 2000  # until the kernel uses a node from a reply that was just sent


class DeviceCache:
    """The kernel's cache of one mount, with the manager whose socket is at ``path``. ``knows`` returns
    whether the kernel has looked a node up and not forgotten it; ``is_written``, whether the kernel writes a
    file itself, and so changes its attributes unseen. ``on_removed`` is called with inodes of which hosts may
    have removed names. ``clock`` is in seconds. Threads may call at once.
    """

    def __init__(
        self,
        path: Path,
        knows: Callable[[Node], bool],
        is_written: Callable[[int], bool],
        on_removed: Callable[[Collection[int]], None] = lambda _inodes: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._knows, self._is_written, self._clock = path, knows, is_written, clock
        self._on_removed = on_removed
        self._marks = SharedBitmap(CACHE_SLOTS)
        self._cached: dict[int, Node] = {}
        self._directories: set[int] = set()
        self._lock = threading.Lock()
        self._changing: SharedBitmapView | None = None
        self._lease_end, self._connections = -math.inf, 0
        self._kernel: KernelCache | None = None
        self._channel: Channel | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache", daemon=True)

    def start(self, kernel: KernelCache) -> None:
        """Begin to cache, in the kernel of a mount that is up. Raises OSError."""
        take_barriers()
        self._marks.descriptor()
        self._kernel = kernel
        self._thread.start()

    def stop(self) -> None:
        """Cache nothing any more: the mount has gone."""
        self._stopped.set()
        if self._channel:
            self._channel.shut_down()
        if self._thread.ident:
            self._thread.join(_JOIN_SECONDS)

    @property
    def count(self) -> int:
        """Number of inodes that the kernel may cache."""
        return len(self._cached)

    def begin(self) -> int:
        """Return a number for ``seconds``, before anything is looked at."""
        changing = self._changing
        return NOT_CACHED if changing is None else self._connections + changing.changes

    def seconds(self, inode: int, node: Node, since: int, *, directory: bool) -> float:
        """Return for how long the kernel may cache attributes, and the names in a directory, that were looked
        at after ``begin`` had returned ``since``: 0 if they may have been changed since then.
        """
        changing = self._changing
        left = self._lease_end - self._clock()
        if changing is None or left <= 0:
            return 0.0
        if self._cached.get(inode) != node:
            self._mark(inode, node, directory)
        if self._is_written(inode) or changing.has(inode):  # looked at before the number, and after the mark
            return 0.0
        is_current = self._connections + changing.changes == since and self._changing is changing
        return left * _SHARE if is_current else 0.0

    def _mark(self, inode: int, node: Node, directory: bool) -> None:
        with self._lock:
            if inode not in self._cached:
                self._marks.add(inode)
            self._cached[inode] = node
            if directory:
                self._directories.add(inode)

    def forget(self, inode: int, node: Node) -> None:
        """Note that the kernel has forgotten a node."""
        with self._lock:
            if self._cached.get(inode) == node:
                del self._cached[inode]
                self._directories.discard(inode)
                self._marks.remove(inode)

    def drop_attributes(self, inode: int) -> None:
        """Drop the attributes of a file, which is going to be written by the kernel itself."""
        if (node := self._cached.get(inode)) is not None and self._kernel:
            self._kernel.drop(node, data=False)

    def drop_names(self) -> None:
        """Have the kernel ask for each name: what it cannot find then it forgets."""
        if self._kernel:
            with contextlib.suppress(OSError):  # a kernel that cannot caches none, or the mount has gone
                self._kernel.drop_names()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._serve()
            except (MillpondError, OSError) as error:
                log.debug("the kernel caches no names of public files: %s", error)
            self._stopped.wait(_AGAIN_SECONDS)

    def _serve(self) -> None:
        """Answer recalls until the connection is over."""
        with Channel(connect(self._path, _CONNECT_SECONDS), "the delegation manager") as channel:
            self._channel, sent = channel, self._clock()
            begun = channel.call(m.BeginCaching(), m.CachingBegun, Deadline.after(_SETUP_SECONDS))
            lease = max(_LEAST_LEASE, min(begun.seconds, LEASE_SECONDS))  # the server may say anything
            changing = receive_bitmap(channel.sock, _SETUP_SECONDS)
            send_bitmap(channel.sock, self._marks)
            try:
                self._answer_recalls(channel, changing, lease, sent)
            finally:  # before the manager sees the end of the connection
                self._changing = None
                with contextlib.suppress(OSError):  # the mount has gone
                    self._recall(tuple(self._cached))

    def _answer_recalls(
        self, channel: Channel, changing: SharedBitmapView, lease: float, sent: float
    ) -> None:
        while not self._stopped.is_set():
            recall = channel.expect(m.RecallCached, Deadline.after(lease))
            self._lease_end = sent + lease
            if self._changing is None:  # the first one says that the manager has the marks
                self._connections += 1 << 32
                self._changing = changing
            self._recall(recall.inodes)
            if recall.removed:
                self._on_removed(recall.removed)
            sent = self._clock()
            channel.send(m.CachedDropped(), Deadline.after(lease))

    def _recall(self, inodes: Iterable[int]) -> None:
        """Drop inodes from the kernel. Raises OSError if the mount has gone."""
        with self._lock:
            found = {inode: node for inode in inodes if (node := self._cached.pop(inode, None)) is not None}
            names = not self._directories.isdisjoint(found)
            self._directories.difference_update(found)
        try:
            if names:
                self.drop_names()
            self._drop(set(found.values()))
        finally:
            with self._lock:  # not before: another change of what is not marked waits for nothing
                for inode in found:
                    self._marks.remove(inode)

    def _drop(self, nodes: set[Node]) -> None:
        for _ in range(_INSTANTS):  # a node that the kernel does not know is still in a reply, or forgotten
            nodes = {node for node in nodes if not self._dropped(node)}
            if not nodes or self._stopped.is_set():
                return
            time.sleep(_INSTANT)

    def _dropped(self, node: Node) -> bool:
        assert self._kernel
        return self._kernel.drop(node, data=False) or not self._knows(node)

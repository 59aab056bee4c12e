# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, memory that processes share): recalls from the kernel of the device's mount, which caches
names and attributes.

The mount asks for no delegation: it marks what its kernel may cache in a bitmap of its own, and looks at the
manager's, of the inodes that hosts are changing. Each side publishes its mark before it looks at the other's.
A memory barrier in both processes orders the two, and the manager alone executes it: hosts change less often
than the device's programs look.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from typing import Final

from millpond.fs.coherence.lease_file import PersistentLeases
from millpond.fs.coherence.shared_bitmap import SharedBitmap, SharedBitmapView
from millpond.fs.proto.delegations import ALL_KNOWN, RecallCached
from millpond.linux.syscalls import barrier

MOUNT_NAME: Final = b"the device mount"
"""The name of the mount's lease for the server after this one; no host can have it."""
_MOST_REMOVED = 4096  # of more the mount looks at all that it knows
_GATHER_SECONDS = 0.05  # one message for many removals


class MountRecalls:
    """DelegationMarks of what hosts are changing, and the manager's end of the mount's cache. All but
    ``next`` is called with the lock of ``changed``, the manager's condition, which is notified; ``lease`` and
    ``clock`` are in seconds. The mount has its lease in ``leases``, too.
    """

    def __init__(
        self,
        changed: threading.Condition,
        lease: float,
        clock: Callable[[], float],
        leases: PersistentLeases | None,
    ) -> None:
        self._changed, self._lease, self._clock, self._leases = changed, lease, clock, leases
        self.changing = SharedBitmap()
        self._cached: SharedBitmapView | None = None
        self._last_heard = -math.inf
        self._wanted: set[int] = set()
        self._removed: set[int] = set()
        self._sent = self._answered = 0

    def add(self, inode: int) -> None:
        """Mark an inode that a host is about to change: the mount caches no more of it."""
        self.changing.add(inode)

    def remove(self, inode: int) -> None:
        """Take the mark away. A mount that has looked at the inode before sees that there was a change."""
        self.changing.count_change()
        self._barrier()
        self.changing.remove(inode)

    def _barrier(self) -> None:
        if self._cached is not None:
            barrier()

    def begin_recall(self, inodes: Collection[int]) -> int:
        """Recall those of the inodes, all of them marked, that the kernel may cache. Returns the number of
        the recall, for ``is_done``.
        """
        if self._cached is None or not self._has_lease:
            return 0
        barrier()
        if not (found := {inode for inode in inodes if self._cached.has(inode)}):
            return 0
        self._wanted |= found
        self._changed.notify_all()
        return self._sent + 1

    def is_done(self, recall: int) -> bool:
        """Return whether the kernel has dropped what was recalled, or the mount's lease is over."""
        return self._answered >= recall or not self._has_lease

    @property
    def _has_lease(self) -> bool:
        return self._cached is not None and self._last_heard + self._lease > self._clock()

    def begin(self, cached: SharedBitmapView) -> None:
        """Note that a mount has connected that marks in ``cached`` what its kernel may cache. Raises OSError:
        the kernel has no memory barriers for other processes.
        """
        barrier()
        with self._changed:
            self._wanted.clear()
            self._removed = {ALL_KNOWN}
            self._cached, self._answered = cached, self._sent
            self._renew()

    def end(self, cached: SharedBitmapView) -> None:
        """Note that a mount's connection has ended: its kernel caches nothing."""
        with self._changed:
            if self._cached is cached:
                self._cached = None
                if self._leases:
                    self._leases.end(MOUNT_NAME)
                self._changed.notify_all()

    def report_removed(self, inodes: Collection[int]) -> None:
        """Have the mount soon look at files of which a host may have removed names: its kernel is to forget
        those that have none left.
        """
        if self._cached is not None and inodes and ALL_KNOWN not in self._removed:
            self._removed.update(inodes)
            if len(self._removed) > _MOST_REMOVED:
                self._removed = {ALL_KNOWN}
            self._changed.notify_all()

    def next(self, cached: SharedBitmapView, seconds: float) -> RecallCached | None:
        """Wait for recalls, ``seconds`` at most, and return them; None if another mount has connected. The
        caller sends them, and calls ``answered``.
        """

        def is_urgent() -> bool:
            return bool(self._wanted) or self._cached is not cached

        with self._changed:
            self._changed.wait_for(lambda: self._removed or is_urgent(), seconds)
            self._changed.wait_for(is_urgent, min(_GATHER_SECONDS, seconds))
            if self._cached is not cached:
                return None
            found = RecallCached(tuple(self._wanted), tuple(self._removed))
            self._wanted.clear()
            self._removed.clear()
            self._sent += 1
            return found

    def answered(self, cached: SharedBitmapView) -> None:
        """Note that the mount has dropped what it was sent last."""
        with self._changed:
            if self._cached is cached:
                self._answered = self._sent
                self._renew()
                self._changed.notify_all()

    def _renew(self) -> None:
        self._last_heard = self._clock()
        if self._leases:
            self._leases.renew(MOUNT_NAME)

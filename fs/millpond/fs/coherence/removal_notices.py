# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): what the device's mount is told of names that hosts have removed.

Its kernel would remember the files, and the mount hold their descriptors and so their blocks, for as long as
the machine is not short of memory.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from millpond.fs.proto.delegations import ALL_KNOWN

_MOST = 4096  # of more the mount looks at all that it knows
_GATHER_SECONDS = 0.05  # one message for many removals


class RemovalNotices:
    """The inodes of which hosts may have removed names since the mount was told last. ``changed`` is the
    delegation manager's condition, which is notified.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._mount: object = None
        self._removed: set[int] = set()

    def begin(self, mount: object) -> None:
        """Note that a mount has connected, which looks at all files that it knows."""
        with self._changed:
            self._mount, self._removed = mount, {ALL_KNOWN}
            self._changed.notify_all()

    def end(self, mount: object) -> None:
        """Note that a mount's connection has ended."""
        with self._changed:
            if self._mount is mount:
                self._mount = None

    def report(self, inodes: Collection[int]) -> None:
        """With the lock of ``changed``: have the mount told soon of files."""
        if self._mount is not None and inodes and ALL_KNOWN not in self._removed:
            self._removed.update(inodes)
            if len(self._removed) > _MOST:
                self._removed = {ALL_KNOWN}
            self._changed.notify_all()

    def next(self, mount: object, seconds: float) -> tuple[int, ...] | None:
        """Wait for removals, ``seconds`` at most, and return them; None if another mount has connected."""
        with self._changed:
            if self._changed.wait_for(lambda: self._removed or self._mount is not mount, seconds):
                self._changed.wait_for(lambda: self._mount is not mount, _GATHER_SECONDS)
            if self._mount is not mount:
                return None
            removed, self._removed = tuple(self._removed), set()
            return removed

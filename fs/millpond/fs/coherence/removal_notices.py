# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): what the device's mount is told of names that hosts have removed.

Its kernel would remember the files, and the mount hold their descriptors and so their blocks, for as long as
the machine is not short of memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator

from millpond.fs.proto.delegations import ALL_KNOWN

_MOST = 4096  # of more the mount looks at all that it knows
_GATHER_SECONDS = 0.05  # one message for many removals


class RemovalNotices:
    """The inodes of which hosts may have removed names since each mount was told last. ``changed`` is the
    delegation manager's condition, which is notified.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._told: dict[object, set[int]] = {}

    @contextlib.contextmanager
    def told(self) -> Iterator[Callable[[float], tuple[int, ...]]]:
        """Yield what waits for removals, so many seconds at most, and returns them: at first all."""
        mount, removed = object(), {ALL_KNOWN}

        def following(seconds: float) -> tuple[int, ...]:
            with self._changed:
                self._changed.wait_for(lambda: removed, seconds)
            time.sleep(_GATHER_SECONDS)
            with self._changed:
                found = tuple(removed)
                removed.clear()
            return found

        with self._changed:
            self._told[mount] = removed
        try:
            yield following
        finally:
            with self._changed:
                del self._told[mount]

    def report(self, inodes: Collection[int]) -> None:
        """With the lock of ``changed``: have the mounts told soon of files."""
        for removed in self._told.values():
            removed.update(inodes)
            if len(removed) > _MOST:
                removed.clear()
                removed.add(ALL_KNOWN)
        self._changed.notify_all()

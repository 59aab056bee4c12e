# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): bounds how many files a kernel remembers, and with it what a mount's process has to hold.

The kernel forgets files of itself only when the machine is short of memory. Until then the process on a host
needs memory for each of them, that on the device a descriptor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from millpond.fs.vfs.inode_api import KernelCache, KnownFile

_SHARE = 4  # of the files that there may be, for which there is to be room then
_AT_ONCE = 4096


class KernelMemory:
    """Has a kernel forget files when there are more than ``most``. ``count`` returns how many it knows,
    ``least_needed`` those to try, the least needed first. Threads may call at once.
    """

    def __init__(
        self, most: int, count: Callable[[], int], least_needed: Callable[[], Sequence[KnownFile]]
    ) -> None:
        self.most, self._count, self._least_needed = most, count, least_needed
        self._kernel: KernelCache | None = None
        self._lock = threading.Lock()

    def start(self, kernel: KernelCache) -> None:
        """Begin, with the kernel of a mount that is up."""
        self._kernel = kernel

    def check(self, count: int) -> None:
        """Begin to forget files, in a thread, if ``count`` are too many. Never waits."""
        if count > self.most and self._kernel and self._lock.acquire(blocking=False):
            threading.Thread(
                target=self._forget, args=(self._kernel,), name="forgetting", daemon=True
            ).start()

    def _forget(self, kernel: KernelCache) -> None:
        try:
            files = self._least_needed()
            for begin in range(0, len(files), _AT_ONCE):
                kernel.prune(files[begin : begin + _AT_ONCE])
                if self._count() <= self.most - self.most // _SHARE:
                    return
        finally:
            self._lock.release()

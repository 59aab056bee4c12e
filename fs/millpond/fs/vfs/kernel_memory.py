# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): bounds how many files a kernel remembers, and with it what a mount's process has to hold.

The kernel forgets files of itself only when the machine is short of memory. Until then the process on a host
needs memory for each of them, that on the device a descriptor.
"""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable, Sequence

from millpond.fs.vfs.inode_api import KernelCache, KnownFile
from millpond.fs.vfs.operation import woken_by
from millpond.fs.vfs.path_api import os_error

_SHARE = 4  # of the files that there may be, for which there is to be room then
_AT_ONCE = 4096
_LONGEST_SECONDS = 20.0
_ARRIVAL_SECONDS = 1.0  # until what the kernel has forgotten is heard of
_LOOK_SECONDS = 0.01


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

    def make_room(self) -> bool:
        """Have the kernel forget files, however few it knows, and wait until it has forgotten some. Returns
        False if it uses all of them, or no mount is up. Raises OSError (EINTR).
        """
        if self._kernel is None:
            return False
        before, begun, woken = self._count(), time.monotonic(), threading.Event()
        self.check(sys.maxsize)
        forgetting = begun
        with woken_by(woken.set) as operation:
            operation.about_to_wait()
            while (now := time.monotonic()) < min(forgetting + _ARRIVAL_SECONDS, begun + _LONGEST_SECONDS):
                if self._count() < before:
                    return True
                forgetting = now if self._lock.locked() else forgetting
                if woken.wait(_LOOK_SECONDS):
                    raise os_error(errno.EINTR)
        return self._count() < before

    def _forget(self, kernel: KernelCache) -> None:
        try:
            files = self._least_needed()
            for begin in range(0, len(files), _AT_ONCE):
                kernel.prune(files[begin : begin + _AT_ONCE])
                if self._count() <= self.most - self.most // _SHARE:
                    return
        finally:
            self._lock.release()

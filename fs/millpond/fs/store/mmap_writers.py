# SPDX-License-Identifier: Apache-2.0
"""Edge: finds out which closed files are still mapped for writing, which the kernel does not report."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)
_FIRST_PAUSE, _MAX_PAUSE = 0.001, 0.25
_TRIES = 1000


def has_writers(descriptor: int) -> bool:
    """Return whether a process has the file, open for reading here, open or mapped for writing: then the
    kernel refuses a read lease (F_SETLEASE). False where it grants no leases: to a process without CAP_LEASE
    for other users' files, or on a file system without leases.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored, as SIGIO is not, if a writer comes now
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def open_past_lease(path: str, flags: int) -> int:
    """Open a file, waiting for the instant in which ``has_writers``, in whichever process, has a lease of it.
    Raises OSError.
    """
    for _ in range(_TRIES):
        try:
            return os.open(path, flags)
        except BlockingIOError:  # EWOULDBLOCK: has_writers has a lease for an instant
            time.sleep(_FIRST_PAUSE)
    return os.open(path, flags)


class MmapWriters:
    """Closed files that are still mapped for writing. A thread polls them, as long as there are any."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, Callable[[], None]]] = {}
        self._changed = threading.Condition()
        self._pause, self._watching = _FIRST_PAUSE, False

    def closed(self, inode: int, descriptor: int, over: Callable[[], None]) -> None:
        """Note that a passthrough writer has closed a file. ``over`` is called once no process has it open or
        mapped for writing, at once or in the thread; until then ``descriptor``, open for reading, is probed.
        """
        with self._changed:
            if inode not in self._files and has_writers(descriptor):
                self._files[inode] = descriptor, over
                self._watch()
                return
        over()  # else the thread that polls the file calls its own

    def _watch(self) -> None:
        self._pause = _FIRST_PAUSE
        self._changed.notify()
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._look, name="mappings", daemon=True).start()

    def _look(self) -> None:
        while self._watching:
            with self._changed:
                self._changed.wait(self._pause)
                self._pause = min(2 * self._pause, _MAX_PAUSE)
                ended = [inode for inode, (file, _) in self._files.items() if not has_writers(file)]
                calls = [self._files.pop(inode)[1] for inode in ended]
                self._watching = bool(self._files)
            for over in calls:
                try:
                    over()
                except Exception:
                    log.exception(
                        "a file that was mapped could not be closed"
                    )  # other files need this thread

"""Edge: who writes a file that is open no more: who has it mapped, of which the kernel does not tell."""

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
_SOON, _LATER = 0.001, 0.25
_TRIES = 1000


def has_writers(descriptor: int) -> bool:
    """Whether somebody has the file, open for reading here, open or mapped to write: then the kernel refuses
    a read lease of it. Nobody is known to where it gives none: to a process without CAP_LEASE of others'
    files, or on a file system without leases.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored, as SIGIO is not, if a writer comes now
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def open_beside(path: str, flags: int) -> int:
    """Open a file, also while ``has_writers``, in whichever process, has its lease. Raises OSError."""
    for _ in range(_TRIES):
        try:
            return os.open(path, flags)
        except BlockingIOError:  # for an instant
            time.sleep(_SOON)
    return os.open(path, flags)


class MmapWriters:
    """Files that are open no more and still written, by who has mapped them. Looked at in a thread, as long
    as there are any.
    """

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, Callable[[], None]]] = {}
        self._moved = threading.Condition()
        self._pause, self._watching = _SOON, False

    def closed(self, inode: int, descriptor: int, over: Callable[[], None]) -> None:
        """Who wrote a file has closed it. ``over`` is called once nobody else writes it, at once or in the
        thread; until then it can be looked at by ``descriptor``, which is open for reading.
        """
        with self._moved:
            if inode not in self._files and has_writers(descriptor):
                self._files[inode] = descriptor, over
                self._watch()
                return
        over()  # or who is waiting for the same already will see to it

    def _watch(self) -> None:
        self._pause = _SOON
        self._moved.notify()
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._look, name="mappings", daemon=True).start()

    def _look(self) -> None:
        while self._watching:
            with self._moved:
                self._moved.wait(self._pause)
                self._pause = min(2 * self._pause, _LATER)
                ended = [inode for inode, (file, _) in self._files.items() if not has_writers(file)]
                calls = [self._files.pop(inode)[1] for inode in ended]
                self._watching = bool(self._files)
            for over in calls:
                try:
                    over()
                except Exception:
                    log.exception("what was mapped could not be closed")  # others wait for this thread

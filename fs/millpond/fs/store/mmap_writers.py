# SPDX-License-Identifier: Apache-2.0
"""Edge: finds out which closed files are still mapped for writing, which the kernel does not report."""

from __future__ import annotations

import contextlib
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
NOT_TOLD = (
    "the kernel does not say which files programs have mapped (no CAP_LEASE, or a file system without "
    "leases): hosts cache nothing that is written here"
)


def has_writers(descriptor: int) -> bool:
    """Return whether a process has the file, open for reading here, open or mapped for writing: then the
    kernel refuses a read lease (F_SETLEASE). Raises OSError where it grants no leases: to a process without
    CAP_LEASE for other users' files, or on a file system without leases.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored, as SIGIO is not, if a writer comes now
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _may_have_writers(descriptor: int) -> bool:
    try:
        return has_writers(descriptor)
    except OSError:  # the file was given to another user, for example
        return True


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
    """Closed files that are still mapped for writing. A thread polls them, as long as there are any.

    Where the kernel does not say who maps a file, it may be mapped as long as this process lives.
    """

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, Callable[[], None]]] = {}
        self._unknown = set[int]()
        self._changed = threading.Condition()
        self._pause, self._watching = _FIRST_PAUSE, False

    def closed(self, inode: int, descriptor: int, over: Callable[[], None]) -> bool:
        """Note that a passthrough writer has closed a file. ``over`` is called once no process has it open or
        mapped for writing, at once or in the thread; until then ``descriptor``, open for reading, is probed.
        False, and ``over`` is never called, if the kernel does not say so.
        """
        with self._changed:
            if inode not in self._files and inode not in self._unknown:
                try:
                    written = has_writers(descriptor)
                except OSError:
                    self._note_unknown(inode)
                    return False
                if written:
                    self._files[inode] = descriptor, over
                    self._watch()
                    return True
        over()  # else the thread that polls the file calls its own
        return True

    def _note_unknown(self, inode: int) -> None:
        if not self._unknown:
            log.warning("%s", NOT_TOLD)
        self._unknown.add(inode)

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
                ended = [inode for inode, (file, _) in self._files.items() if not _may_have_writers(file)]
                calls = [self._files.pop(inode)[1] for inode in ended]
                self._watching = bool(self._files)
            for over in calls:
                try:
                    over()
                except Exception:
                    log.exception(
                        "a file that was mapped could not be closed"
                    )  # other files need this thread

# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread, the clock): the quota of the public part, kept by counting its files now and then.

Between two counts all that is asked for here counts as taken, and nothing as given back. A client is refused
only after a new count. Changes by other processes are seen with the next count.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from millpond.fs.vfs.path_api import Statistics, os_error

NAME_SIZE = 512
"""Bytes that a new name takes in its directory, at most."""
BLOCK_SIZE = 4096
"""Bytes that a new directory, a long symbolic link or the extended attributes of a file take, at least."""
_BLOCK = 512
_COUNT_SECONDS = 60.0
_PAUSE_PER_COUNT = 5.0  # seconds of pause for each second that a count takes
_SOON_SECONDS = 1.0
Usage = tuple[int, int]


def growth(before: os.stat_result, offset: int, length: int) -> int:
    """Return the most bytes that a write can take: those of the file system's blocks that it touches, but no
    more than the file lacks to be without holes. (It can take more where space was allocated beyond the
    file's end.)
    """
    if not length:
        return 0
    unit, end = before.st_blksize, offset + length
    touched = _up(end, unit) - offset // unit * unit
    return max(0, min(touched, _up(max(before.st_size, end), unit) - before.st_blocks * _BLOCK))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Quota:
    """``limit`` bytes, None for no limit, for the files of which ``count`` returns the bytes and the number.
    Threads may call at once.
    """

    def __init__(self, limit: int | None, count: Callable[[], Usage]) -> None:
        self.limit, self._count = limit, count
        self._lock, self._counting, self._wanted = threading.Lock(), threading.Lock(), threading.Event()
        self.used, self.files = (0, 0) if limit is None else count()
        self._moves, self._next_count = 0, 0.0

    @property
    def _left(self) -> int:
        return sys.maxsize if self.limit is None else max(0, self.limit - self.used)

    def require(self, size: int) -> None:
        """Take so many bytes; 0 is never refused. Raises OSError: ENOSPC."""
        if not (self.limit is None or self._take(size) or (self._count_again() and self._take(size))):
            raise os_error(errno.ENOSPC)

    def require_growth(self, file: int, offset: int | None, length: int) -> None:
        """Take the most that a write to an open file can take, at ``offset`` or its end. Raises OSError:
        ENOSPC.
        """
        if self.limit is not None:
            before = os.fstat(file)
            self.require(growth(before, before.st_size if offset is None else offset, length))

    def _take(self, size: int) -> bool:
        with self._lock:
            if size > self._left:
                return False
            self.used += size
            return True

    def _count_again(self) -> bool:
        """Count, unless that takes so long that it must not be done again soon. Returns whether it is
        done.
        """
        with self._counting:
            wait = self._next_count - time.monotonic()
            if wait > _SOON_SECONDS:
                return False
            time.sleep(max(0.0, wait))
            self._count_files()
            return True

    def note_move(self) -> None:
        """Note that a file has got another name, by which a count under way may miss it."""
        with self._lock:
            self._moves += 1

    def count(self) -> None:
        """Count the files."""
        with self._counting:
            self._count_files()

    def _count_files(self) -> None:
        began, before, moves = time.monotonic(), self.used, self._moves
        try:
            used, files = self._count()
        except OSError:  # directories are moved all the time
            return
        finally:
            self._next_count = time.monotonic() + _PAUSE_PER_COUNT * (time.monotonic() - began)
        with self._lock:
            taken = used + self.used - before  # what was asked for meanwhile may be counted already
            self.used = max(taken, self.used) if moves != self._moves else taken
            self.files = files

    def clipped(self, statistics: Statistics) -> Statistics:
        """Limit the file system's statistics to the quota; each file there is room for takes a block. A new
        count is begun, for the next call.
        """
        if self.limit is None:
            return statistics
        self._wanted.set()
        left = self._left // statistics.fragment_size
        files_free = min(statistics.files_free, left)
        return replace(
            statistics,
            blocks=min(statistics.blocks, self.limit // statistics.fragment_size),
            free=min(statistics.free, left),
            available=min(statistics.available, left),
            files=self.files + files_free,
            files_free=files_free,
        )

    def keep_counting(self) -> None:
        """Count every minute, and soon after the statistics were asked for, in a thread, until the process
        ends. The thread has no lower priority: preempted with the interpreter's lock, it would hold up those
        that serve.
        """

        def count() -> None:
            while True:
                self._wanted.wait(_COUNT_SECONDS)
                time.sleep(max(_SOON_SECONDS, self._next_count - time.monotonic()))
                self._wanted.clear()
                self.count()

        threading.Thread(target=count, name="counting", daemon=True).start()

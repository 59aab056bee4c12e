# SPDX-License-Identifier: Apache-2.0
"""Pure: change times of new files that a host was the authority for (delegated timestamps, RFC 9754).

A program on a host may look at a file (fstat) that has no name on the flash yet. The change time that it
sees is the host's; the flash sets its own when the name is made, and lets nobody set it. So that the time
does not change under the program (``git`` takes that for a change of the file), all hosts are told the first
one until the file is changed again.
"""

from __future__ import annotations

import os
import threading
from typing import Final

MOST_FILES: Final = 32_768
"""Files whose times are kept, of 0.5 kB each; if there are more, those kept longest are forgotten."""
MOST_APART: Final = 60 * 10**9
"""Nanoseconds by which a host's time may be away from the flash's."""


_State = tuple[int, ...]


def _state(status: os.stat_result) -> _State:
    """Return what a change of a file changes: the flash's change time goes by ticks, of which one may hold
    the making of its name and the next change.
    """
    return status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_mode, status.st_nlink


class DelegatedTimes:
    """The change times that hosts have given to files, by device and inode number, each beside the state that
    the file had then. Threads may call at once.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], tuple[_State, int]] = {}
        self._lock = threading.Lock()

    def keep(self, status: os.stat_result, changed: int) -> None:
        """Keep the time ``changed`` of a file that has this status now, unless it is far from the flash's."""
        own = status.st_ctime_ns
        if changed == own or abs(changed - own) > MOST_APART:
            return
        with self._lock:
            while len(self._times) >= MOST_FILES:
                del self._times[next(iter(self._times))]
            self._times[status.st_dev, status.st_ino] = _state(status), changed

    def of(self, status: os.stat_result) -> int:
        """Return the change time of a file that has this status."""
        kept = self._times.get((status.st_dev, status.st_ino)) if self._times else None
        return kept[1] if kept and kept[0] == _state(status) else status.st_ctime_ns

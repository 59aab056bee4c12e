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
"""Files whose times are kept, of 0.3 kB each; if there are more, those kept longest are forgotten."""
MOST_APART: Final = 60 * 10**9
"""Nanoseconds by which a host's time may be away from the flash's."""


class DelegatedTimes:
    """The change times that hosts have given to files, by device and inode number, each beside the flash's
    own. Threads may call at once.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def keep(self, status: os.stat_result, changed: int) -> None:
        """Keep the time ``changed`` of a file that has this status now, unless it is far from the flash's."""
        own = status.st_ctime_ns
        if changed == own or abs(changed - own) > MOST_APART:
            return
        with self._lock:
            while len(self._times) >= MOST_FILES:
                del self._times[next(iter(self._times))]
            self._times[status.st_dev, status.st_ino] = own, changed

    def of(self, status: os.stat_result) -> int:
        """Return the change time of a file that has this status."""
        own = status.st_ctime_ns
        if self._times and (kept := self._times.get((status.st_dev, status.st_ino))) and kept[0] == own:
            return kept[1]
        return own

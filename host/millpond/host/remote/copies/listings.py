# SPDX-License-Identifier: Apache-2.0
"""Edge (volumes, a thread): the listings of directories for a copy, bounded, as a device may name files
without end.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from sys import getsizeof

from millpond.fs.vfs.path_adapter import BulkPathAdapter
from millpond.fs.vfs.path_api import Attributes
from millpond.host.remote.copies.small_copies import CopyFailed, Item, naming

_MOST_LISTED = 16  # directories
_MOST_AHEAD = 100_000
"""Names in the directories that are listed ahead; one more of them may have MOST_NAMES."""
MOST_NAMES = 2_000_000
"""Names in one directory. One takes a kilobyte of memory."""
MOST_BYTES = 4 << 30
"""Memory for the list of a copy's items."""
_ITEM_BYTES = 850  # of its numbers
_TOLD = 1000  # items


class _ManyAhead(Exception):
    """A directory is to be listed when it is needed."""


def bounded(items: Iterable[Item], shown: str, found: Callable[[int], None]) -> Iterator[Item]:
    """Yield the items below the source ``shown``, and call ``found`` with their number now and then. Raises
    CopyFailed once they need more than MOST_BYTES.
    """
    room = MOST_BYTES
    for number, item in enumerate(items, 1):
        if number % _TOLD == 0:
            found(number)
        room -= _ITEM_BYTES + getsizeof(item.source) + getsizeof(item.target)
        if room < 0:
            text = "it has too many files for one copy; copy its directories one by one"
            raise CopyFailed(errno.EOVERFLOW, text, shown)
        yield item


def listed(volume: BulkPathAdapter, folder: str) -> Iterator[tuple[str, Attributes]]:
    """Iterate over the names in a directory, with attributes. Raises CopyFailed for more than MOST_NAMES."""
    for number, found in enumerate(volume.list_attributes(folder)):
        if number == MOST_NAMES:
            text = (
                f"more than {MOST_NAMES} files in one directory; pack them, or divide them into directories"
            )
            raise CopyFailed(errno.EOVERFLOW, text, volume.shown(folder))
        yield found


class Listings:
    """Lists directories before they are needed, in the order in which they are added."""

    def __init__(self, volume: BulkPathAdapter) -> None:
        self._volume = volume
        self._waiting: deque[str] = deque()
        self._ahead: deque[tuple[str, Future[dict[str, Attributes] | None]]] = deque()
        self._names, self._lock = 0, threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="listing")

    def close(self) -> None:
        """Wait for the end of requests that are under way, and send no more."""
        self._thread.shutdown(cancel_futures=True)

    def add(self, path: str) -> None:
        """Add a directory."""
        self._waiting.append(path)
        self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._ahead) < _MOST_LISTED:
            path = self._waiting.popleft()
            self._ahead.append((path, self._thread.submit(self._list_ahead, path)))

    def _list_ahead(self, path: str) -> dict[str, Attributes] | None:
        """List a directory. Raises _ManyAhead, and lists nothing, while too many names wait to be used."""
        if self._names > _MOST_AHEAD:
            raise _ManyAhead
        found = self._list(path)
        self._count(len(found or ()))
        return found

    def _count(self, change: int) -> None:
        with self._lock:
            self._names += change

    def _list(self, path: str) -> dict[str, Attributes] | None:
        with naming(self._volume, path):
            try:
                return dict(listed(self._volume, path))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def next(self) -> dict[str, Attributes] | None:
        """Return the next directory's names with attributes; None if the directory does not exist."""
        path, listing = self._ahead.popleft()
        self._begin()
        try:
            found = listing.result()
        except _ManyAhead:
            return self._list(path)
        self._count(-len(found or ()))
        return found

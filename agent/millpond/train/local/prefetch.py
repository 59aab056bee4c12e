# SPDX-License-Identifier: Apache-2.0
"""Edge (threads, the clock): batches that are read while others are computed, and what reading takes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from millpond.train.protocol import DataTiming, StreamTiming
from millpond.train.task.structure import size_of

K = TypeVar("K")
V = TypeVar("V")


def prefetched(keys: Iterable[K], read: Callable[[K], V], ahead: int, threads: int) -> Iterator[tuple[K, V]]:
    """Yield each key with ``read(key)``, in order. The next ``ahead`` of them are read meanwhile, in so many
    ``threads``; with 0, each is read when it is wanted. An exception of ``read`` is raised here.
    """
    if not ahead:
        yield from ((key, read(key)) for key in keys)
        return
    under_way: deque[tuple[K, Future[V]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="prefetch") as pool:
        try:
            for key in keys:
                under_way.append((key, pool.submit(read, key)))
                if len(under_way) > ahead:
                    first, future = under_way.popleft()
                    yield first, future.result()
            while under_way:
                first, future = under_way.popleft()
                yield first, future.result()
        finally:
            for _, future in under_way:
                future.cancel()


class ReadingMeter:
    """Measures what the data of an exchange cost: the seconds in which samples are read, in all threads, and
    those in which the training thread waits for them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Begin an exchange: forget what was measured."""
        self._waited = self._stalled = self._reading = 0.0
        self._samples = self._size = self._batches = self._mini_epochs = self._repeats = 0
        self.fitting = 0

    def batches(self, awaited: Iterator[V]) -> Iterator[V]:
        """Yield batches, and count them and the seconds until each is there."""
        for seconds, batch in timed(awaited):
            self._waited += seconds
            self._batches += 1
            yield batch

    def add_mini_epochs(self, waited: float, repeats: Sequence[int]) -> None:
        """Count mini-epochs, the repetitions of each, and the seconds in which there was none."""
        self._waited += waited
        self._stalled += waited
        self._mini_epochs += len(repeats)
        self._repeats += sum(repeats)

    def read(self, fetch: Callable[[], V], samples: int) -> V:
        """Return what ``fetch`` reads, so many samples, and count its seconds and bytes; in any thread."""
        began = time.perf_counter()
        found = fetch()
        seconds, size = time.perf_counter() - began, size_of(found)
        with self._lock:
            self._reading += seconds
            self._samples += samples
            self._size += size
        return found

    def timing(self, seconds: float, stream: StreamTiming | None = None) -> DataTiming:
        """Return what was measured, of an exchange of so many ``seconds``, as it may leave."""
        share = 100 / seconds if seconds > 0 else 0.0
        return DataTiming(
            round(share * self._waited),
            round(share * self._stalled),
            self._reading,
            self._samples,
            self._size,
            self._batches,
            self._mini_epochs,
            self.fitting,
            stream,
            self._repeats,
        ).rounded()


def timed(awaited: Iterator[V]) -> Iterator[tuple[float, V]]:
    """Yield each item with the seconds until it is there."""
    while True:
        began = time.perf_counter()
        try:
            item = next(awaited)
        except StopIteration:
            return
        yield time.perf_counter() - began, item

# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): batches that are read while others are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def prefetched(keys: Iterable[K], read: Callable[[K], V], threads: int) -> Iterator[tuple[K, V]]:
    """Yield each key with ``read(key)``, in order. The next ``threads`` of them are read meanwhile, in as
    many threads; with 0, each is read when it is wanted. An exception of ``read`` is raised here.
    """
    if not threads:
        yield from ((key, read(key)) for key in keys)
        return
    under_way: deque[tuple[K, Future[V]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="prefetch") as pool:
        try:
            for key in keys:
                under_way.append((key, pool.submit(read, key)))
                if len(under_way) > threads:
                    first, future = under_way.popleft()
                    yield first, future.result()
            while under_way:
                first, future = under_way.popleft()
                yield first, future.result()
        finally:
            for _, future in under_way:
                future.cancel()

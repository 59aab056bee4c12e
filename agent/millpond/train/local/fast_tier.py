# SPDX-License-Identifier: Apache-2.0
"""Edge (files, a thread): the fast tier, which holds one mini-epoch and the next one.

A slot is memory, or a file without a name: whatever dies, nothing of it is left, and nothing that is half
written is ever used. Samples lie there packed as columns, and are read in place.
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from millpond.base.errors import LocalError
from millpond.train.balance.curve import Ints
from millpond.train.data.columns import Columns, ReceivedSamples, joined, kept_as_is, pack, pack_batch, unpack
from millpond.train.local.slices import PassOrder, Place, following
from millpond.train.task.structure import size_of
from millpond.train.task.task import SampleSet, items_of

if TYPE_CHECKING:
    from millpond.train.local.slices import Wanted

_CHUNK = 16 << 20
"""Bytes that are read and packed at a time."""
_ALIGNED = 4096


class Slot:
    """The samples of one mini-epoch, up to ``room`` bytes of memory, or of a file in ``folder``. Those that a
    data set has returned as batches are returned as batches.
    """

    thread_safe = True

    def __init__(self, folder: Path | None, room: int) -> None:
        self._room, self.used = room, 0
        self._chunks: list[Columns | ReceivedSamples] = []
        self._starts = [0]
        self._stored = np.empty(0, np.int64)  # where each sample is
        self._has_lists, self._file = False, -1
        if folder:
            try:
                self._file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise LocalError(f"the fast tier {folder}: {error.strerror}") from None

    def add(self, items: Any, count: int) -> bool:
        """Keep ``count`` samples, a list or a batch of them. Returns False, and keeps none, if there is no
        room. Raises LocalError for something else; samples of a list that cannot be packed are kept in memory
        as they are.
        """
        is_list = isinstance(items, list) and len(items) == count
        try:
            packed = pack(items) if is_list else pack_batch(items, count)
        except (LocalError, RuntimeError):  # the latter of a tensor that is not dense
            if self._file >= 0 or not is_list:
                raise
            packed = None
        size = size_of(items) if packed is None else len(packed.head) + packed.size
        if self.used + size > self._room:
            return False
        kept = unpack(packed.head, self._written(packed.pieces)) if packed else kept_as_is(items)
        self._chunks.append(kept)
        self._starts.append(self._starts[-1] + count)
        self._has_lists |= is_list
        self.used += size
        return True

    def _written(self, pieces: Sequence[memoryview]) -> memoryview:
        """Return where the pieces are one after the other."""
        if self._file < 0:
            return memoryview(bytearray().join(pieces))
        start = place = -(-self.used // _ALIGNED) * _ALIGNED
        self.used = start
        try:
            for piece in pieces:
                left = piece.cast("B")
                while left:
                    written = os.pwrite(self._file, left, place)
                    place, left = place + written, left[written:]
        except OSError as error:
            raise LocalError(f"the fast tier cannot be written: {error.strerror}") from None
        if place == start:
            return memoryview(bytearray())
        return memoryview(mmap.mmap(self._file, place - start, access=mmap.ACCESS_COPY, offset=start))

    def seal(self, order: Ints) -> None:
        """Number the samples: ``order`` has the numbers of those that were added, in that order."""
        self._stored = np.argsort(order)
        self.close()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not self._chunks:
            raise LocalError("this mini-epoch is over, and no longer in the fast tier")
        if not 0 <= index < len(self):
            raise IndexError(index)
        stored = int(self._stored[index])
        number = bisect_right(self._starts, stored) - 1
        return self._chunks[number].sample(stored - self._starts[number])

    def __getitems__(self, wanted: Sequence[int]) -> Any:
        """Return a list of samples, or a batch, in which those of one chunk follow each other."""
        if self._has_lists or not self._chunks:
            return [self[index] for index in wanted]
        stored = self._stored[np.asarray(wanted, np.int64)]
        which = np.searchsorted(self._starts, stored, side="right") - 1
        found = [
            self._chunks[number].sample(stored[which == number] - self._starts[number])
            for number in np.unique(which).tolist()
        ]
        return joined(found)

    def evict(self) -> None:
        """Give the room back, as soon as no sample is used any more."""
        self._chunks = []

    def close(self) -> None:
        """Close the file; what is mapped stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class FetchedSlice:
    """A mini-epoch in its slot."""

    def __init__(self, place: Place, slot: Slot) -> None:
        self.place, self.slot = place, slot


class FastTier:
    """Fetches mini-epochs one ahead, into at most ``size`` bytes of ``folder``, or of memory without one;
    what of one does not fit belongs to the next one. ``read`` returns samples of a data set.
    """

    def __init__(
        self,
        order: PassOrder,
        size: int,
        folder: Path | None = None,
        read: Callable[[SampleSet, Ints], Any] = items_of,
    ) -> None:
        self._order, self._room, self._folder, self._read = order, size // 2, folder, read
        self._thread = ThreadPoolExecutor(1, "mini-epoch")
        self._ended = threading.Event()
        self._next: Future[FetchedSlice] | None = None
        self._sample_bytes = 1.0
        self.fetched_bytes = 0

    def fitting(self, tried: int) -> int:
        """Return how many samples a mini-epoch may have, 1 at least, by the first groups of ``tried``
        samples. Raises any exception of the data set.
        """
        groups, slot = int(np.searchsorted(self._order.ends, tried)) + 1, Slot(None, 1 << 62)
        self._fill(slot, self._order.wanted(Place(stop=min(groups, len(self._order.ends)))))
        self._sample_bytes = max(slot.used / len(slot), 1.0)
        return max(int(0.95 * self._room / self._sample_bytes), 1)

    @property
    def is_there(self) -> bool:
        """Whether no mini-epoch is being fetched."""
        return self._next is None or self._next.done()

    def slices(self, place: Place, most: int, passes: int) -> Iterator[FetchedSlice]:
        """Yield the mini-epochs from ``place`` to the end of the last of ``passes``, of about ``most``
        samples, each valid until the next one, which is fetched meanwhile. Raises LocalError, and any
        exception of the data set.
        """
        self._begin(place, passes)
        while self._next:
            fetched = self._next.result()
            self.fetched_bytes += fetched.slot.used
            self._begin(following(self._order, fetched.place, most), passes)
            try:
                yield fetched
            finally:
                fetched.slot.evict()

    def _begin(self, place: Place, passes: int) -> None:
        self._next = self._thread.submit(self._fetch, place) if place.number < passes else None

    def _fetch(self, place: Place) -> FetchedSlice:
        while True:
            wanted, slot = self._order.wanted(place), Slot(self._folder, self._room)
            try:
                order = self._fill(slot, wanted)
                slot.seal(order)
            finally:
                slot.close()
            if len(slot) == len(order):
                return FetchedSlice(place, slot)
            if place.stop == place.start + 1:
                raise LocalError(f"a sample is larger than half of the fast tier, {self._room} bytes")
            groups = int(0.95 * (place.stop - place.start) * len(slot) / len(order))
            place = Place(place.number, place.start, place.start + max(groups, 1), place.done)

    def _fill(self, slot: Slot, wanted: Wanted) -> Ints:
        """Fetch samples, of each data set in the order of storage, until all are there or the slot is full.
        Returns that order.
        """
        step, orders = max(int(_CHUNK / self._sample_bytes), 1), [np.argsort(own) for _, own in wanted]
        for (part, indices), order in zip(wanted, orders, strict=True):
            for start in range(0, len(order), step):
                if self._ended.is_set():
                    raise LocalError("the mini-epochs were closed")
                some = indices[order[start : start + step]]
                if not self._add(slot, part, some):
                    break
        starts = np.cumsum([0, *(len(order) for order in orders)])
        return np.concatenate([start + order for start, order in zip(starts, orders, strict=False)])

    def _add(self, slot: Slot, part: SampleSet, indices: Ints) -> bool:
        found = self._read(part, indices)
        try:
            return slot.add(found, len(indices))
        except LocalError as error:
            raise LocalError(f"{type(part).__name__}: {error}") from None

    def close(self) -> None:
        """End the fetch that is under way, and its thread."""
        self._ended.set()
        self._thread.shutdown(cancel_futures=True)

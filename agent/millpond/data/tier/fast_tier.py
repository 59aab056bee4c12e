# SPDX-License-Identifier: Apache-2.0
"""Edge (files, a thread): the fast tier, which holds one mini-epoch and the next one.

A slot is a file without a name, on flash or in memory: whatever dies, nothing of it is left, and nothing that
is half written is ever used. It is mapped, so samples are read in place.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from bisect import bisect_right
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from millpond.base.errors import LocalError
from millpond.data.columns import Packed, ReceivedSamples, pack, unpack
from millpond.data.tier.slices import Indices, PassOrder, Place
from millpond.train.task.task import items_of

if TYPE_CHECKING:
    from millpond.train.distributed.group import MapStyle

_CHUNK = 64
"""Samples that are read and packed at a time."""
_ALIGNED = 4096


class Slot:
    """The samples of one mini-epoch in a file, up to ``room`` bytes, which is closed with it."""

    def __init__(self, folder: Path | None, room: int) -> None:
        self._room, self.used = room, 0
        self._in_heads = 0  # bytes: columns of mixed values are there
        self._heads: list[tuple[bytes, int, int]] = []
        self._parts: list[ReceivedSamples] = []
        self._ends: list[int] = [0]
        self._map = memoryview(b"")
        try:
            if folder is None:
                self._file = os.memfd_create("mini-epoch")
            else:
                self._file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalError(f"the fast tier {folder}: {error.strerror}") from None

    def add(self, packed: Packed, count: int) -> bool:
        """Write a chunk of ``count`` samples. Returns False, and writes nothing, if there is no room."""
        start = -(-self.used // _ALIGNED) * _ALIGNED
        self._in_heads += len(packed.head)
        if start + packed.size + self._in_heads > self._room:
            self._in_heads -= len(packed.head)
            return False
        place = start
        try:
            for piece in packed.pieces:
                left = piece.cast("B")
                while left:
                    written = os.pwrite(self._file, left, place)
                    place, left = place + written, left[written:]
        except OSError as error:
            raise LocalError(f"the fast tier cannot be written: {error.strerror}") from None
        self._heads.append((packed.head, start, packed.size))
        self._ends.append(self._ends[-1] + count)
        self.used = start + packed.size
        return True

    def seal(self) -> None:
        """Map what was written: from now on it can be read."""
        if self.used:
            os.ftruncate(self._file, self.used)
            self._map = memoryview(mmap.mmap(self._file, self.used, access=mmap.ACCESS_COPY))
        for head, start, size in self._heads:
            view = self._map[start : start + size] if size else memoryview(bytearray())
            self._parts.append(unpack(head, view))
        self.close()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not self._parts:
            raise LocalError("this mini-epoch is over, and no longer in the fast tier")
        if not 0 <= index < len(self):
            raise IndexError(index)
        chunk = bisect_right(self._ends, index) - 1
        index -= self._ends[chunk]
        for part in self._parts[chunk].parts:
            if index < len(part):
                return part.sample(index)
            index -= len(part)
        raise IndexError(index)

    def evict(self) -> None:
        """Give the room back, as soon as no sample is used any more."""
        self._parts, self._map = [], memoryview(b"")

    def close(self) -> None:
        """Close the file; what is mapped stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class FetchedSlice:
    """A mini-epoch in its slot; ``place`` ends where the slot was full."""

    def __init__(self, place: Place, slot: Slot) -> None:
        self.place, self.slot = place, slot


class FastTier:
    """Fetches mini-epochs of ``dataset`` one ahead, into at most ``size`` bytes of ``folder``, or of memory
    without one. The last of a mini-epoch that does not fit belongs to the next one.
    """

    def __init__(self, dataset: MapStyle, order: PassOrder, size: int, folder: Path | None) -> None:
        self._dataset, self._order, self._room, self._folder = dataset, order, size // 2, folder
        self._thread = ThreadPoolExecutor(1, "mini-epoch")
        self._ended = threading.Event()
        self._next: tuple[Place, Future[FetchedSlice]] | None = None
        self.fetched_bytes = 0

    def sample_bytes(self) -> float:
        """Return the bytes of a sample in the tier, by the first ones of the first pass."""
        some = self._order.indices(Place(stop=min(_CHUNK, self._order.samples)))
        packed = pack([self._dataset[int(index)] for index in some])
        return max((packed.size + len(packed.head)) / len(some), 1.0)

    def begin(self, place: Place) -> None:
        """Begin to fetch a mini-epoch."""
        self._next = (place, self._thread.submit(self._fetch, place))

    @property
    def is_there(self) -> bool:
        """Whether the mini-epoch that was begun is fetched, or has failed."""
        return self._next is not None and self._next[1].done()

    def take(self) -> FetchedSlice:
        """Wait for the mini-epoch that was begun. Raises LocalError, and any exception of the data set."""
        assert self._next is not None
        found = self._next[1].result()
        self._next = None
        self.fetched_bytes += found.slot.used
        return found

    def _fetch(self, place: Place) -> FetchedSlice:
        slot, indices = Slot(self._folder, self._room), self._order.indices(place)
        with contextlib.ExitStack() as failed:
            failed.callback(slot.close)
            full = self._fill(slot, indices)
            slot.seal()
            failed.pop_all()
        if full:
            place = self._shortened(place, len(slot))
        return FetchedSlice(place, slot)

    def _shortened(self, place: Place, count: int) -> Place:
        """Return the place of the first samples of one, of which so many fit. Raises LocalError."""
        if not count:
            raise LocalError(f"a sample is larger than half of the fast tier, {self._room} bytes")
        return Place(place.number, place.start, place.start + count, place.done)

    def _fill(self, slot: Slot, indices: Indices) -> bool:
        """Fetch samples until all are there, or the slot is full. Returns whether it is."""
        for start in range(0, len(indices), _CHUNK):
            if self._ended.is_set():
                raise LocalError("the mini-epochs were closed")
            few = indices[start : start + _CHUNK]
            by_place = np.argsort(few)  # as storage has them
            samples = dict(zip(by_place.tolist(), self._samples(few[by_place]), strict=True))
            count = len(few)
            while count and not slot.add(pack([samples[number] for number in range(count)]), count):
                count //= 2
            if count < len(few):
                return True
        return False

    def _samples(self, indices: Indices) -> list[Any]:
        """Return samples of the data set, also of one that returns batches. Raises LocalError."""
        found, count = items_of(self._dataset, indices), len(indices)
        if isinstance(found, list) and len(found) == count:
            return found
        try:
            return _taken_apart(found, count)
        except ValueError:
            text = (
                f"neither a list of {count} samples nor a batch of them, whose tensors have the samples first"
            )
            raise LocalError(f"{type(self._dataset).__name__}.__getitems__ returned {text}") from None

    def close(self) -> None:
        """End the fetch that is under way, and its thread."""
        self._ended.set()
        self._thread.shutdown(cancel_futures=True)


def _taken_apart(batch: Any, count: int) -> list[Any]:
    """Return the samples of a batch of so many. Raises ValueError for something else."""
    if isinstance(batch, Tensor | np.ndarray) and batch.ndim and len(batch) == count:
        return list(batch)
    if isinstance(batch, dict) and batch:
        rows = zip(*(_taken_apart(each, count) for each in batch.values()), strict=True)
        return [dict(zip(batch, row, strict=True)) for row in rows]
    if isinstance(batch, tuple | list) and batch:
        return list(zip(*(_taken_apart(each, count) for each in batch), strict=True))
    raise ValueError

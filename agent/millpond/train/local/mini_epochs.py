# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): local training in mini-epochs: random slices of a worker's samples, each trained on in
memory as often as the job has epochs, while the next one is read from the flash.

Without them each of ``epochs`` passes reads all samples from the flash; with them a round reads each sample
once (Xu et al., *Data-Aware Storage Tiering for Deep Learning*). A slice is of whole groups of samples, as is
each batch in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.linux.progress import reading
from millpond.train import error_texts
from millpond.train.balance.curve import Ints
from millpond.train.data.errors import DataError
from millpond.train.local.prefetch import ReadingMeter, prefetched
from millpond.train.local.selection import Selection, places_of
from millpond.train.task.structure import size_of
from millpond.train.task.task import SampleSet, items_of

_TRIED = 8
"""Samples whose size in memory is taken for that of all; of whole groups, as a device tells what follows."""


class MemorySamples:
    """Samples in memory, as a data set's ``__getitems__`` has returned them: a list, or a batch whose tensors
    have the samples first. Sample ``number`` is at ``places[number]`` of them.
    """

    thread_safe = True

    def __init__(self, items: Any, places: Ints) -> None:
        self._items, self._places, self._count = items, places, len(places)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        found = self.__getitems__([index])
        return found[0] if isinstance(found, list) else found

    def __getitems__(self, wanted: Sequence[int]) -> Any:
        return _taken(self._items, self._places[np.asarray(wanted, np.int64)])

    def evict(self) -> None:
        """Give the memory back."""
        self._items = []


class MiniEpochReader:
    """Divides selections into mini-epochs of up to ``samples`` samples, of which two take at most ``room``
    bytes of memory. ``meter`` measures what they take.
    """

    def __init__(self, samples: int, room: int, meter: ReadingMeter) -> None:
        self._samples, self._room, self._meter = samples, room, meter

    def slices(self, chosen: Selection, shuffle: torch.Generator) -> Iterator[Selection]:
        """Yield the mini-epochs of a selection, in memory, each valid until the next one. The samples are
        divided evenly: a short rest would be repeated as often as the others. Raises DataError, and any
        exception of the data set.
        """
        wanted = self._divided(chosen, shuffle)
        self._meter.divided(len(wanted))
        for _, (current, memory) in prefetched(wanted, partial(self._read, chosen), 1, 1):
            yield current
            for part in memory:
                part.evict()

    def _divided(self, chosen: Selection, shuffle: torch.Generator) -> list[Ints]:
        """Return the places of the samples of each mini-epoch. Raises DataError if a group does not fit."""
        groups, fitting = chosen.groups, self._fitting(chosen)
        self._meter.fitting = fitting
        if groups.max() > fitting:
            raise DataError(error_texts.SMALL_TIER(fitting, groups.max()))
        parts = -(-len(chosen) // min(self._samples, fitting))
        order = torch.randperm(len(groups), generator=shuffle).numpy()
        return list(places_of(groups, np.array_split(order, min(parts, len(groups)))))

    def _fitting(self, chosen: Selection) -> int:
        """Return how many samples half of the room holds, 1 at least."""
        ends = np.cumsum(chosen.groups)
        few = np.arange(ends[min(int(np.searchsorted(ends, _TRIED)), len(ends) - 1)])
        wanted = chosen.wanted(few)
        found = self._meter.read(lambda: [items_of(*each) for each in wanted], len(few))
        each = max(size_of(found) / len(few), 1.0)
        return max(int(self._room / 2 / each), 1)

    def _read(self, chosen: Selection, places: Ints) -> tuple[Selection, list[MemorySamples]]:
        """Return some samples of a selection, in memory, read in the order of storage."""
        places, groups = chosen.by_part(places)
        memory = [self._in_memory(part, indices) for part, indices in chosen.wanted(places)]
        own = [np.arange(len(part)) for part in memory]
        return Selection(chosen.task, memory, own, groups, in_memory=True), memory

    def _in_memory(self, part: SampleSet, indices: Ints) -> MemorySamples:
        order = np.argsort(indices, kind="stable")
        with reading():
            items = self._meter.read(lambda: items_of(part, indices[order]), len(indices))
        return MemorySamples(items, np.argsort(order))


def _taken(items: Any, wanted: Ints) -> Any:
    if isinstance(items, list):
        return [items[place] for place in wanted.tolist()]
    if isinstance(items, Tensor):
        return items[torch.from_numpy(wanted)]
    if isinstance(items, Mapping):
        return {key: _taken(item, wanted) for key, item in items.items()}
    if isinstance(items, tuple):
        found = [_taken(item, wanted) for item in items]
        return type(items)(*found) if hasattr(items, "_fields") else tuple(found)
    return items[wanted]

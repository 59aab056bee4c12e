# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): local training in mini-epochs: random slices of a worker's samples, each trained on in
memory as often as the job has epochs, while the next one is read from the flash.

Without them each of ``epochs`` passes reads all samples from the flash; with them a round reads each sample
once (Xu et al., *Data-Aware Storage Tiering for Deep Learning*). A slice is of whole groups of samples, as is
each batch in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from millpond.linux.progress import reading
from millpond.train import error_texts
from millpond.train.balance.curve import Ints
from millpond.train.data.errors import DataError
from millpond.train.local.fast_tier import FastTier
from millpond.train.local.prefetch import ReadingMeter
from millpond.train.local.selection import Selection, places_of
from millpond.train.local.slices import Place, following
from millpond.train.task.task import SampleSet, items_of

if TYPE_CHECKING:
    from millpond.train.local.slices import Wanted

_TRIED = 8
"""Samples whose size in memory is taken for that of all; of whole groups, as a device tells what follows."""


class _ShuffledGroups:
    """One pass over a selection, group by group; see PassOrder."""

    def __init__(self, chosen: Selection, shuffle: torch.Generator) -> None:
        self._chosen = chosen
        self._order = torch.randperm(len(chosen.groups), generator=shuffle).numpy()
        self.ends = np.cumsum(chosen.groups[self._order])

    def wanted(self, place: Place) -> Wanted:
        return self._chosen.wanted(self._members(place)[0])

    def groups(self, place: Place) -> Ints:
        """Return the sizes of the groups of a mini-epoch, in the order of its samples."""
        return self._members(place)[1]

    def _members(self, place: Place) -> tuple[Ints, Ints]:
        (places,) = places_of(self._chosen.groups, [self._order[place.start : place.stop]])
        return self._chosen.by_part(places)


class MiniEpochReader:
    """Divides selections into mini-epochs of up to ``samples`` samples, of which two take at most ``room``
    bytes of memory. ``meter`` measures what they take.
    """

    def __init__(self, samples: int, room: int, meter: ReadingMeter) -> None:
        self._samples, self._room, self._meter = samples, room, meter

    def slices(self, chosen: Selection, shuffle: torch.Generator) -> Iterator[Selection]:
        """Yield the mini-epochs of a selection, in memory, each valid until the next one. Raises DataError,
        LocalError, and any exception of the data set.
        """
        order = _ShuffledGroups(chosen, shuffle)
        with contextlib.closing(FastTier(order, self._room, read=self._read)) as tier:
            fitting = self._meter.fitting = tier.fitting(_TRIED)
            if (largest := int(chosen.groups.max())) > fitting:
                raise DataError(error_texts.SMALL_TIER(fitting, largest))
            most = min(self._samples, fitting)
            for fetched in tier.slices(following(order, None, most), most, passes=1):
                slot, groups = fetched.slot, order.groups(fetched.place)
                yield Selection(chosen.task, [slot], [np.arange(len(slot))], groups, in_memory=True)

    def _read(self, part: SampleSet, indices: Ints) -> Any:
        with reading():
            return self._meter.read(lambda: items_of(part, indices), len(indices))

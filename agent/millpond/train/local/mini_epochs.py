# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): local training in mini-epochs: random slices of a worker's samples, each trained on in
memory in all epochs of a job, or as often as a rule says, while the next one is read from the flash.

Without them each of ``epochs`` passes reads all samples from the flash; with them a round reads each sample
once (Xu et al., *Data-Aware Storage Tiering for Deep Learning*). A slice is of whole groups of samples, as is
each batch in it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from millpond.linux.progress import reading
from millpond.train import error_texts
from millpond.train.balance.curve import Ints
from millpond.train.data.errors import DataError
from millpond.train.local.fast_tier import FastTier
from millpond.train.local.prefetch import ReadingMeter
from millpond.train.local.repeated_slices import RepeatedSlices
from millpond.train.local.selection import Selection, places_of
from millpond.train.local.slices import Place
from millpond.train.repeats import FixedRepeats, RepeatRule
from millpond.train.task.task import SampleSet, items_of

if TYPE_CHECKING:
    from millpond.train.local.slices import Wanted

Scored = tuple[float, float | None, float | None]
"""The training loss of a repetition, the training error and the validation error, None where not known."""
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
    bytes of memory, and repeats each as ``rule`` says. ``meter`` measures what they take.
    """

    def __init__(self, samples: int, room: int, rule: RepeatRule, meter: ReadingMeter) -> None:
        self._samples, self._room, self._rule, self._meter = samples, room, rule, meter

    def repetitions(
        self, chosen: Selection, shuffle: torch.Generator, score: Callable[[Selection], Scored]
    ) -> Iterator[tuple[Selection, int]]:
        """Yield the mini-epochs of a selection, in memory, with the number of the repetition; each is valid
        until the next mini-epoch. After a repetition ``score`` returns what the rule looks at. The scores are
        those of this selection alone, so whoever does an exchange again repeats as often. Raises DataError,
        LocalError, and any exception of the data set.
        """
        order = _ShuffledGroups(chosen, shuffle)
        with contextlib.closing(FastTier(order, self._room, read=self._read)) as tier:
            fitting = self._meter.fitting = tier.fitting(_TRIED)
            if (largest := int(chosen.groups.max())) > fitting:
                raise DataError(error_texts.SMALL_TIER(fitting, largest))
            slices = RepeatedSlices(tier, order, min(self._samples, fitting), self._rule)
            for fetched, repeat in slices:
                slot, groups = fetched.slot, order.groups(fetched.place)
                mini_epoch = Selection(chosen.task, [slot], [np.arange(len(slot))], groups, in_memory=True)
                yield mini_epoch, repeat
                if not isinstance(self._rule, FixedRepeats):
                    _report(slices, score(mini_epoch))
            self._meter.add_mini_epochs(slices.waited, slices.repeats)

    def _read(self, part: SampleSet, indices: Ints) -> Any:
        with reading():
            return self._meter.read(lambda: items_of(part, indices), len(indices))


def _report(slices: RepeatedSlices, scored: Scored) -> None:
    """Report what is finite: a host refuses the update of a training that has diverged."""
    if all(math.isfinite(value) for value in scored if value is not None):
        slices.report(*scored)

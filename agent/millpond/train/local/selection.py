# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the samples of a worker's exchanges, and the batches of its local training.

Samples in groups, see ``data_plan``, are in the same batches: whatever a host chooses, each step of training
depends on whole groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from millpond.linux.progress import reading
from millpond.train import error_texts
from millpond.train.balance.curve import Ints
from millpond.train.balance.data_plan import held_count, held_out, order
from millpond.train.balance.ranges import Ranges
from millpond.train.data.errors import DataError
from millpond.train.data.labelled_images import LabelledImages
from millpond.train.data.streamed import StreamedSamples
from millpond.train.protocol import Folder, StreamTiming, Work
from millpond.train.task.made_up import Synthetic
from millpond.train.task.task import Batch, SampleSet, Task


class SampleFolders:
    """The samples of a worker, by folder, in the order of an epoch. A share ``held`` of the private ones is
    held out.
    """

    def __init__(
        self, task: Task, seed: int, folders: Sequence[Folder], parts: Sequence[SampleSet], held: float = 0.0
    ) -> None:
        self._task, self._seed, self._folders, self._parts = task, seed, folders, parts
        self.held = tuple(
            0 if folder.public else held_count(len(part), held, folder.group)
            for folder, part in zip(folders, parts, strict=True)
        )
        self._epoch: int | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of samples to train on, by folder."""
        return tuple(len(part) - held for part, held in zip(self._parts, self.held, strict=True))

    @property
    def group(self) -> int:
        """The least samples of a group of private ones."""
        return max((folder.group for folder in self._folders if not folder.public), default=1)

    def take(self, request: Work) -> Selection:
        """Return the samples of a request. Raises DataError for positions that do not exist."""
        if len(request.ranges) != len(self._parts):
            raise DataError(error_texts.OTHER_FOLDERS(len(request.ranges), len(self._parts)))
        if request.epoch != self._epoch:
            self._orders = [
                order(len(part), self._seed, request.epoch, f.source, f.public, f.group, held)
                for f, part, held in zip(self._folders, self._parts, self.held, strict=True)
            ]
            self._epoch = request.epoch
        found, groups = [], []
        for folder, ranges, own in zip(self._folders, request.ranges, self._orders, strict=True):
            for start, stop in ranges:
                if not 0 <= start < stop <= len(own):
                    raise DataError(error_texts.OTHER_SAMPLES(start, stop, len(own)))
                groups.append(_groups(stop - start, folder.group))
            found.append(_at(own, ranges))
        self._expect(found, request)
        return Selection(self._task, self._varied(request), found, np.concatenate([_groups(0, 1), *groups]))

    def _varied(self, request: Work) -> list[SampleSet]:
        """Return the data sets as they are trained on in an epoch: images with crops of their own."""
        found = list[SampleSet]()
        for part, folder in zip(self._parts, self._folders, strict=True):
            if isinstance(part, LabelledImages):
                pool = f"{'public' if folder.public else 'private'} {folder.source}"
                part = part.varied(f"{self._seed} {request.epoch} {pool}")
            found.append(part)
        return found

    def _expect(self, found: Sequence[Ints], request: Work) -> None:
        """Have streamed samples of this request and the coming ones fetched."""
        for number, part in enumerate(self._parts):
            if isinstance(part, StreamedSamples):
                own = self._orders[number]
                part.expect(found[number], [_at(own, each[number]) for each in request.coming])

    def observe(self, samples: int, seconds: float) -> None:
        """Note how long the training of so many samples took, waiting not counted: streams go by it."""
        for part in self._parts:
            if isinstance(part, StreamedSamples):
                part.observe(samples, seconds)

    def everything(self) -> Selection:
        """Return all samples to train on. Raises DataError if there are none."""
        ranges = tuple(((0, count),) if count else () for count in self.counts)
        return self.take(Work(0, 0, 1, ranges))

    def held_out(self) -> Selection:
        """Return the samples that are held out. Raises DataError if there are none."""
        found = [
            held_out(len(part), folder.source, held)
            for folder, part, held in zip(self._folders, self._parts, self.held, strict=True)
        ]
        return Selection(self._task, self._parts, found, _groups(0, 1))

    def synthetic(self, count: int, whole: int = 0) -> Synthetic:
        """Return ``count`` samples that are made up in the shape of the real ones, see ``Synthetic``. Raises
        DataError if there are none.
        """
        like = next((part for part in self._parts if len(part)), None)
        if like is None:
            raise DataError(error_texts.NO_SAMPLES())
        return Synthetic(self._task, like, count, whole)


def _at(order: Ints, ranges: Ranges) -> Ints:
    return np.concatenate([order[:0], *(order[start:stop] for start, stop in ranges)])


class Selection:
    """Samples of an exchange: ``indices`` into ``parts``, in ``groups`` of these sizes. Those of a mini-epoch
    are ``in_memory``: they have been read.
    """

    def __init__(
        self,
        task: Task,
        parts: Sequence[SampleSet],
        indices: Sequence[Ints],
        groups: Ints,
        *,
        in_memory: bool = False,
    ) -> None:
        used = [(part, own) for part, own in zip(parts, indices, strict=True) if len(own)]
        if not used:
            raise DataError(error_texts.EMPTY_EXCHANGE())
        self.task = task
        self._parts = [part for part, _ in used]
        self._indices = [own for _, own in used]
        self._ends = np.cumsum([len(own) for own in self._indices])
        self.groups, self.in_memory = groups, in_memory

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def stream(self) -> StreamTiming | None:
        """The choice for a stream and its measurements: the ``stream_timing`` of a data set that is one."""
        found = (getattr(part, "stream_timing", None) for part in self._parts)
        return next((timing for timing in found if isinstance(timing, StreamTiming)), None)

    def threads(self, most: int) -> int:
        """Return how many threads may read at once, of ``most``."""
        return most if self.task.is_thread_safe(self._parts) else min(most, 1)

    def batch(self, places: Ints) -> Batch:
        """Return the batch of some of the samples."""
        with reading():
            return self.task.fetch(self.wanted(places))

    def wanted(self, places: Ints) -> list[tuple[SampleSet, Ints]]:
        """Return the data sets that have some of the samples, and their indices there."""
        which = self._part_of(places)
        found = []
        for number in np.unique(which).tolist():
            own = self._indices[number]
            at = own[places[which == number] - (self._ends[number] - len(own))]
            found.append((self._parts[number], at))
        return found

    def by_part(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the places of whole groups in the order of the data sets, and the sizes of the groups."""
        ordered = places[np.argsort(self._part_of(places), kind="stable")]
        group_of = np.repeat(np.arange(len(self.groups)), self.groups)[ordered]
        starts = np.flatnonzero(np.diff(group_of, prepend=-1))
        return ordered, np.diff(starts, append=len(ordered))

    def each_group(self) -> Iterator[Selection]:
        """Yield the samples of each group alone."""
        for places in places_of(self.groups, ([number] for number in range(len(self.groups)))):
            parts, indices = zip(*self.wanted(places), strict=True)
            yield Selection(self.task, parts, indices, np.array([len(places)]), in_memory=self.in_memory)

    def _part_of(self, places: Ints) -> Ints:
        return np.searchsorted(self._ends, places, side="right")


def batches(groups: Ints, batch: int, steps: int, shuffle: torch.Generator) -> Iterator[Ints]:
    """Yield the places of all samples, in shuffled ``groups`` of these sizes: in batches of ``batch`` or
    less, or without it in ``steps`` of about as many groups, or fewer. A batch has a group at least, and is
    of one sample, which BatchNorm does not take, only where that is wanted or there are no more.
    """
    order = torch.randperm(len(groups), generator=shuffle).numpy()
    ends = np.cumsum(groups[order])
    cuts = _cuts(ends, batch) if batch else _equal(len(order), min(steps, int(ends[-1]) // 2))
    sizes = np.diff(ends[cuts - 1], prepend=0)
    for alone in np.flatnonzero(sizes == 1)[::-1].tolist() if batch != 1 else ():
        if len(cuts) > 1:
            cuts = np.delete(cuts, max(0, alone - 1))  # it joins the one before, or the next one
    yield from places_of(groups, np.split(order, cuts[:-1]))


def places_of(groups: Ints, parts: Iterable[Ints | list[int]]) -> Iterator[Ints]:
    """Yield for each part, some of the ``groups`` of these sizes, the places of their samples."""
    starts = np.cumsum(groups) - groups
    for part in parts:
        size = groups[part]
        yield np.repeat(starts[part] - (np.cumsum(size) - size), size) + np.arange(size.sum())


def _groups(count: int, group: int) -> Ints:
    """Return the sizes of the groups of so many samples; the last one has the rest, too."""
    sizes = np.full(max(1, count // group) if count else 0, group)
    sizes[-1:] += count - sizes.sum()
    return sizes


def _cuts(ends: Ints, batch: int) -> Ints:
    """Return the ends of batches, in groups of which ``ends`` are the samples up to each."""
    cuts: list[int] = []
    samples = 0
    while not cuts or cuts[-1] < len(ends):
        last = cuts[-1] if cuts else 0
        cuts.append(max(last + 1, int(np.searchsorted(ends, samples + batch, side="right"))))
        samples = int(ends[cuts[-1] - 1])
    return np.array(cuts)


def _equal(count: int, parts: int) -> Ints:
    """Return the ends of ``parts`` parts of ``count`` that differ by one at most."""
    parts = max(1, min(parts, count))
    return np.cumsum([count // parts + (number < count % parts) for number in range(parts)])

# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the samples of a worker's exchanges, and the batches of its local training.

Samples in groups, see ``data_plan``, are in the same batches: whatever a host chooses, each step of training
depends on whole groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from millpond.train.balance.curve import Ints
from millpond.train.balance.data_plan import order
from millpond.train.data.errors import DataError
from millpond.train.data.samples import Samples
from millpond.train.protocol import Folder, Work


class SampleFolders:
    """The samples of a worker, by folder, in the order of an epoch."""

    def __init__(self, seed: int, folders: Sequence[Folder], parts: Sequence[Samples]) -> None:
        self._seed, self._folders, self.parts = seed, folders, parts
        self._epoch: int | None = None

    def take(self, request: Work) -> Selection:
        """Return the samples of a request. Raises DataError for positions that do not exist."""
        if len(request.ranges) != len(self.parts):
            raise DataError(
                f"samples of {len(request.ranges)} folders are wanted; there are {len(self.parts)}"
            )
        if request.epoch != self._epoch:
            self._orders = [
                order(len(part), self._seed, request.epoch, folder.source, folder.public, folder.group)
                for folder, part in zip(self._folders, self.parts, strict=True)
            ]
            self._epoch = request.epoch
        found, groups = [], []
        for folder, ranges, own in zip(self._folders, request.ranges, self._orders, strict=True):
            for start, stop in ranges:
                if not 0 <= start < stop <= len(own):
                    raise DataError(f"samples {start} to {stop} are wanted; there are {len(own)}")
                groups.append(_groups(stop - start, folder.group))
            found.append(np.concatenate([own[:0], *(own[start:stop] for start, stop in ranges)]))
        return Selection(self.parts, found, np.concatenate([_groups(0, 1), *groups]))

    def synthetic(self, count: int) -> Selection:
        """Return ``count`` samples of noise with the shape of the real ones. Raises DataError if there are
        none.
        """
        like = next((part for part in self.parts if len(part)), None)
        if like is None:
            raise DataError("missing data: there are no samples")
        images = np.random.default_rng(0).random((count, *like.images.shape[1:]), np.float32)
        made = Samples(images, np.zeros(count, np.int64))
        return Selection([made], [np.arange(count)], _groups(count, 1))


class Selection:
    """Samples of an exchange: ``indices`` into ``parts``, in ``groups`` of these sizes."""

    def __init__(self, parts: Sequence[Samples], indices: Sequence[Ints], groups: Ints) -> None:
        used = [(part, own) for part, own in zip(parts, indices, strict=True) if len(own)]
        if not used:
            raise DataError("an exchange without samples is wanted")
        self._parts = [part for part, _ in used]
        self._indices = [own for _, own in used]
        self._ends = np.cumsum([len(own) for own in self._indices])
        self.groups = groups

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, places: Ints | slice) -> tuple[Tensor, Tensor]:
        """Return images and labels of some of the samples."""
        wanted = np.arange(len(self))[places]
        which = np.searchsorted(self._ends, wanted, side="right")
        images, labels = [], []
        for number in np.unique(which):
            part, own = self._parts[number], self._indices[number]
            at = own[wanted[which == number] - (self._ends[number] - len(own))]
            images.append(part.images[at])
            labels.append(part.labels[at])
        whole = len(images) == 1
        return (
            torch.from_numpy(images[0] if whole else np.concatenate(images)),
            torch.from_numpy(labels[0] if whole else np.concatenate(labels)),
        )


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
    starts = np.cumsum(groups) - groups
    for chunk in np.split(order, cuts[:-1]):
        size = groups[chunk]
        yield np.repeat(starts[chunk] - (np.cumsum(size) - size), size) + np.arange(size.sum())


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

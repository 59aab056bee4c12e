# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): samples that are made up in the shape of real ones, to measure how long a batch takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.base.errors import LocalError
from millpond.train import error_texts
from millpond.train.balance.curve import Ints
from millpond.train.task.task import Batch, SampleSet, Task, items_of

_PLAIN = (Tensor, str, bytes, int, float, type(None))


class Synthetic:
    """``count`` samples made up in the shape of sample 0 of ``part``: floats of noise, whole numbers that are
    ``whole``, texts without a letter. Nothing of tensors, arrays and plain values but shape and type is in
    them. Raises LocalError where that is not possible.

    A batch of one sample is repeated. Where that is no tree of tensors with the samples first, as of graphs,
    ``task`` makes the batch of made-up samples.
    """

    in_memory, stream = True, None

    def __init__(self, task: Task, part: SampleSet, count: int, whole: int = 0) -> None:
        self._task, self._count, self._whole = task, count, whole
        self.groups = np.ones(count, np.int64)
        first = np.zeros(1, np.int64)
        self._like, self._sample = task.fetch([(part, first)]), list[Any]()
        leaves = list(_leaves(self._like))
        grows = all(not isinstance(leaf, Tensor) or (leaf.ndim and len(leaf) == 1) for leaf in leaves)
        if grows and all(isinstance(leaf, _PLAIN) for leaf in leaves):
            return
        if isinstance(items := items_of(part, first), list):
            self._sample = [_made_up(items[0], 0, whole)]
        elif not grows:
            raise LocalError(error_texts.NO_BATCH_DIMENSION())

    def __len__(self) -> int:
        return self._count

    def threads(self, most: int) -> int:
        """Return how many threads may make samples up at once, of ``most``."""
        return min(most, 1)

    def batch(self, places: Ints) -> Batch:
        """Return a batch of as many samples as ``places``."""
        if self._sample:
            return self._task.collated(len(places) * self._sample)
        return _made_up(self._like, len(places), self._whole)


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _leaves(item)
    else:
        yield batch


def _made_up(like: Any, count: int, whole: int) -> Any:
    """Return what has the shape of ``like``, a sample; with a ``count``, so many times, a batch of one."""
    if isinstance(like, (np.ndarray, np.generic)) and like.dtype.kind in "biuf":
        return np.asarray(_made_up(torch.from_numpy(np.array(like)), count, whole))
    if isinstance(like, Tensor):
        shape = (count, *like.shape[1:]) if count else like.shape
        if like.is_floating_point():
            return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(like.dtype)
        return torch.full(shape, True if like.dtype == torch.bool else whole, dtype=like.dtype)
    if isinstance(like, Mapping):
        return {key: _made_up(item, count, whole) for key, item in like.items()}
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*(_made_up(item, count, whole) for item in like))
    if count and isinstance(like, list) and len(like) == 1 and isinstance(like[0], (str, bytes)):
        return count * [type(like[0])()]  # one per sample
    if isinstance(like, (list, tuple)):
        return type(like)(_made_up(item, count, whole) for item in like)
    if type(like) is int:
        return whole
    return type(like)() if type(like) in (str, bytes, float, bool) else like

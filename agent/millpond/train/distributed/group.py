"""Edge (torch.distributed, clock): the processes that train one model with a script, see ``train.group``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from millpond.base.errors import LocalError
from millpond.train.balance.data_plan import DataPlan, Pool, Share
from millpond.train.distributed.allreduce import AllReduce, ExchangeStep
from millpond.train.distributed.tuner import BatchTuner

GroupPolicy = Literal["balance", "fixed"]

_USUAL = 32
"""Samples of a rank's first batches, where the script does not say."""
_STAND_IN = 2
"""BatchNorm has no variance of one sample."""


class MapStyle(Protocol):
    """A torch map-style Dataset."""

    def __len__(self) -> int:
        """Samples."""

    def __getitem__(self, index: int, /) -> Any:
        """One sample, what ``default_collate`` takes."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A batch that was handed out: how many samples of it count, when it was begun, and who plans by it."""

    samples: int
    begun: float
    tuning: BatchTuner


@dataclass(slots=True)
class _Turn:
    """The batch whose loss is to come."""

    work: _Work | None = None


class Loader:
    """The batches of a rank; each iteration is an epoch, of as many steps on every rank."""

    def __init__(
        self,
        dataset: MapStyle,
        pools: list[Pool],
        rank: int,
        tuning: BatchTuner,
        seed: int,
        turn: _Turn,
    ) -> None:
        self._dataset, self._pools, self._rank, self._tuning = dataset, pools, rank, tuning
        self._seed, self._epoch = seed, 0
        self._turn = turn

    def __iter__(self) -> Iterator[Any]:
        """Raises LocalError when a batch was not given to ``step``."""
        plan = DataPlan(self._seed, self._epoch, self._pools, len(self._tuning.batches))
        self._epoch += 1
        position = plan.begin()
        while any(left := plan.left(position)):
            position, shares = plan.deal(position, self._tuning.among(self._able(left)))
            work = _Work(shares[self._rank].size, time.perf_counter(), self._tuning)
            batch = self._read(shares[self._rank])
            self._turn.work = work
            yield batch
            if self._turn.work is work:
                raise LocalError("the next batch is wanted, but the last one's loss was not given to step")

    def _able(self, left: Sequence[int]) -> list[bool]:
        """By rank, whether it can read any of what is left of the pools."""
        readers = {
            rank for pool, count in zip(self._pools, left, strict=True) if count for rank in pool.readers
        }
        return [rank in readers for rank in range(len(self._tuning.batches))]

    def _read(self, share: Share) -> Any:
        """Its samples. For none some that do not count: the script's optimizer has to make the step."""
        wanted = [index for part in share.parts for index in part.indices]
        return default_collate([self._dataset[index] for index in wanted or self._stand_ins()])

    def _stand_ins(self) -> range:
        return range(min(_STAND_IN, len(self._dataset)))


class ProcessGroup:
    """This process among those of the default process group, or alone. Raises LocalError for a model that
    cannot be exchanged, see ``AllReduce``, and for an unknown policy.
    """

    def __init__(self, model: nn.Module, policy: GroupPolicy) -> None:
        if policy not in ("balance", "fixed"):
            raise LocalError(f"policy '{policy}' is unknown: 'balance' or 'fixed'")
        self._exchange = AllReduce(model)
        self._balanced = policy == "balance"
        self._loaders: dict[tuple[int, bool, int, int], Loader] = {}
        self._kept: list[MapStyle] = []  # so that no other gets its id
        self._turn = _Turn()
        self._samples = [0] * self.ranks

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        return self._exchange.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._exchange.ranks

    @property
    def samples(self) -> tuple[int, ...]:
        """Those that counted so far, by rank."""
        return tuple(self._samples)

    def loader(
        self, dataset: MapStyle, *, private: bool = False, batch: int | None = None, seed: int = 0
    ) -> Loader:
        """Batches of ``dataset`` in an order that follows from ``seed`` and the epoch; the same loader again
        if it is asked for again. Every rank can read all samples, and each is taken once by one of them; if
        they are ``private``, each rank has others, as many as it likes, and takes those. A step has ``batch``
        samples in all, 32 per rank if None. A rank that has none left while others have gets two again that
        do not count. Raises LocalError if somebody has no samples or the batch is too small.
        """
        batch = _USUAL * self.ranks if batch is None else batch
        key = id(dataset), private, batch, seed
        if key not in self._loaders:
            tuning = BatchTuner(batch, self.ranks, balanced=self._balanced)
            pools = self._pools(dataset, private)
            self._kept.append(dataset)
            self._loaders[key] = Loader(dataset, pools, self.rank, tuning, seed, self._turn)
        return self._loaders[key]

    def step(self, loss: Tensor) -> ExchangeStep:
        """``loss`` is the *sum* over the samples of the last batch. Its ``backward``, then the exchange: the
        gradients become those of the mean over all ranks' samples. Raises LocalError for a loss that is not
        a scalar, and for one without a batch.
        """
        work, self._turn.work = self._turn.work, None
        if work is None:
            raise LocalError("step without a batch: take one from group.loader before each")
        if loss.numel() != 1:
            raise LocalError(
                f"the loss has the shape {tuple(loss.shape)}: step wants one number, the sum over the batch"
            )
        if work.samples:
            loss.backward()  # type: ignore[no-untyped-call]
        step = self._exchange.step(work.samples, time.perf_counter() - work.begun)
        work.tuning.observe(step.batches, step.seconds)
        self._samples = [sum(pair) for pair in zip(self._samples, step.batches, strict=True)]
        return step

    def _pools(self, dataset: MapStyle, private: bool) -> list[Pool]:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise LocalError(
                f"a {type(dataset).__name__} is no map-style Dataset: it has no length or no items"
            )
        counts = self._exchange.gather(len(dataset))
        if 0 in counts:
            raise LocalError(f"rank {counts.index(0)} has no samples")
        if private:
            return [Pool(count, (rank,)) for rank, count in enumerate(counts)]
        if len(set(counts)) > 1:
            raise LocalError(f"the ranks have {counts} samples: use private=True for data that differs")
        return [Pool(counts[0], tuple(range(self.ranks)))]


@contextmanager
def joined(model: nn.Module, policy: GroupPolicy) -> Iterator[ProcessGroup]:
    """See ``train.group``."""
    own = "RANK" in os.environ and not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    try:
        yield ProcessGroup(model, policy)
    finally:
        if own:
            dist.destroy_process_group()

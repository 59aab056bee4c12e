# SPDX-License-Identifier: Apache-2.0
"""Edge (torch.distributed, clock): processes that train one model with a script, ``millpond.train.group``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from millpond.base.errors import LocalError
from millpond.train import error_texts
from millpond.train.balance.curve import Ints
from millpond.train.balance.data_plan import DataPlan, Pool, Position, Share, order
from millpond.train.data.read_ahead import ReadAhead, Streamed
from millpond.train.distributed.allreduce import AllReduce
from millpond.train.distributed.channel import GroupChannel, own_channel
from millpond.train.distributed.collectives import Alone, Collectives, ExchangeStep, TorchCollectives
from millpond.train.distributed.tuner import BatchTuner

if TYPE_CHECKING:
    from millpond.train.task.task import SampleSet

GroupPolicy = Literal["balance", "fixed"]

_USUAL = 32
"""Samples of a rank's first batches, where the script gives no batch."""
_STAND_IN = 2
"""Samples that do not count, for a rank without any: BatchNorm has no variance of one sample."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A batch that was handed out: its samples that count, its begin, and the tuner of its loader."""

    samples: int
    begun: float
    tuner: BatchTuner


@dataclass(slots=True)
class _Turn:
    """The batch whose loss ``step`` awaits, and the last one that was handed out."""

    work: _Work | None = None
    last: _Work | None = None


class Loader:
    """Iterates over the batches of a rank; each iteration is an epoch, of as many steps on every rank."""

    def __init__(
        self,
        dataset: SampleSet,
        pools: list[Pool],
        rank: int,
        tuner: BatchTuner,
        seed: int,
        turn: _Turn,
        source: str,
    ) -> None:
        self._dataset, self._pools, self._rank, self._tuner = dataset, pools, rank, tuner
        self._seed, self._epoch = seed, 0
        self._turn, self._source = turn, source

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch. Raises LocalError when a batch's loss was not given to ``step``."""
        plan = DataPlan(self._pools, len(self._tuner.batches))
        orders = self._orders()
        self._epoch += 1
        position = plan.begin()
        while any(left := plan.left(position)):
            position, shares = plan.deal(position, self._tuner.among(self._able(left)))
            work = _Work(shares[self._rank].size, time.perf_counter(), self._tuner)
            wanted = self._indices(shares[self._rank], orders)
            if isinstance(self._dataset, ReadAhead):
                self._dataset.expect([wanted, *self._coming(self._dataset.ahead, plan, position, orders)])
            batch, began = self._read(wanted), time.perf_counter()
            self._turn.work = self._turn.last = work
            yield batch
            if self._turn.work is work:
                raise LocalError(error_texts.NO_STEP())
            if isinstance(self._dataset, ReadAhead):
                self._dataset.observe(len(wanted), time.perf_counter() - began)

    def _orders(self) -> list[Ints]:
        if isinstance(self._dataset, ReadAhead):
            return [self._dataset.order(self._seed, self._epoch)]
        return [
            order(pool.count, self._seed, self._epoch, self._name(number), False, pool.group)
            for number, pool in enumerate(self._pools)
        ]

    def _coming(
        self, steps: int, plan: DataPlan, position: Position, orders: Sequence[Ints]
    ) -> Iterator[list[int]]:
        """Yield the samples of the next steps, if the batches remain as they are."""
        for _ in range(steps):
            if any(left := plan.left(position)):
                position, shares = plan.deal(position, self._tuner.among(self._able(left)))
                yield self._indices(shares[self._rank], orders)

    def _name(self, number: int) -> str:
        """Return the name of a pool. Groups are the same whatever the rank: of all launches and jobs together
        no difference of exchanges tells of less than a group.
        """
        return self._source if self._pools[number].group > 1 else str(number)

    def _able(self, left: Sequence[int]) -> list[bool]:
        """Return by rank whether it can read any remaining sample of the pools."""
        readers = {
            rank for pool, count in zip(self._pools, left, strict=True) if count for rank in pool.readers
        }
        return [rank in readers for rank in range(len(self._tuner.batches))]

    def _indices(self, share: Share, orders: Sequence[Ints]) -> list[int]:
        places = [(part.pool, *places) for part in share.parts for places in part.ranges]
        return [int(index) for pool, start, stop in places for index in orders[pool][start:stop]]

    def _read(self, wanted: Sequence[int]) -> Any:
        """Read samples; if there are none some that do not count: the optimizer makes a step."""
        wanted = wanted or self._stand_ins()
        if isinstance(self._dataset, ReadAhead):
            return self._dataset.batch(wanted)
        return default_collate([self._dataset[index] for index in wanted])

    def _stand_ins(self) -> range:
        return range(min(_STAND_IN, len(self._dataset)))


class ProcessGroup:
    """This process as a rank among those of its ``collectives``. Its steps are of the batches of its own
    loaders, or of those of the group ``beside``. Raises LocalError for a model that cannot be exchanged, see
    ``AllReduce``, and for an unknown policy.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: GroupPolicy,
        collectives: Collectives,
        beside: ProcessGroup | None = None,
    ) -> None:
        if policy not in ("balance", "fixed"):
            raise LocalError(f"policy '{policy}' is unknown: 'balance' or 'fixed'")
        self._collectives, self._beside = collectives, beside
        self._all_reduce = AllReduce(model, collectives)
        self._balanced = policy == "balance"
        self._loaders: dict[tuple[int, bool, int, int], Loader] = {}
        self._kept: list[object] = []  # so that no other dataset gets its id
        self._turn = _Turn()
        self._samples = [0] * self.ranks

    @property
    def rank(self) -> int:
        """Return the rank of this process, from 0."""
        return self._collectives.rank

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self._collectives.ranks

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the samples that counted so far, by rank."""
        return tuple(self._samples)

    def loader(
        self,
        dataset: SampleSet | Streamed,
        *,
        private: bool = False,
        batch: int | None = None,
        seed: int = 0,
    ) -> Loader:
        """Return a loader of ``dataset`` whose order follows from ``seed`` and the epoch; the same arguments
        give the same loader again. Every rank can read all samples, and each sample is taken once by one of
        the ranks; if the samples are ``private``, each rank has samples of its own, in any number, and takes
        these. A step has ``batch`` samples in all, 32 per rank if None. A rank that has none left while other
        ranks have gets two again that do not count. In a confined launch a device's batches are whole groups
        of its policy's ``least_samples``, and samples that are not ``private`` are for ranks without such
        groups: the host. What ``millpond.data.stream`` returns is fetched ahead of need, in the same batches.
        Raises LocalError if a rank has no samples or the batch is too small.
        """
        batch = _USUAL * self.ranks if batch is None else batch
        key = id(dataset), private, batch, seed
        if key not in self._loaders:
            tuner = BatchTuner(batch, self.ranks, balanced=self._balanced)
            self._kept.append(dataset)
            found = self._by_index(dataset, private, batch)
            pools, source = self._pools(found, private), self._collectives.source
            self._loaders[key] = Loader(found, pools, self.rank, tuner, seed, self._turn, source)
        return self._loaders[key]

    def _by_index(self, dataset: SampleSet | Streamed, private: bool, batch: int) -> SampleSet:
        if not isinstance(dataset, Streamed):
            return dataset
        if private:
            raise LocalError("a stream is of public data: private data is read where it lies")
        return dataset.by_index(-(-batch // self.ranks))

    def step(self, loss: Tensor, count: int | None = None) -> ExchangeStep:
        """Run ``backward`` of ``loss``, the *sum* over the samples of the last batch, and exchange gradients:
        they become those of the mean over all ranks' samples, or over ``count`` of each, such as the tokens
        that the loss is a sum over. Raises LocalError for a loss that is not a scalar, for a negative count,
        and for a loss without a batch.
        """
        if count is not None and int(count) < 0:
            raise LocalError(f"the loss is a sum over {count}: a count is 0 or more")
        work = self._beside._turn.last if self._beside else self._turn.work
        self._turn.work = None
        if work is None:
            raise LocalError(error_texts.NO_BATCH())
        if loss.numel() != 1:
            raise LocalError(error_texts.LARGE_LOSS(tuple(loss.shape)))
        if work.samples:
            loss.backward()  # type: ignore[no-untyped-call]
        counted = work.samples if count is None else int(count)
        seconds = time.perf_counter() - work.begun
        step = self._all_reduce.step(work.samples, counted if work.samples else 0, seconds)
        if self._beside is None:
            work.tuner.observe(step.batches, step.seconds)
        self._samples = [sum(pair) for pair in zip(self._samples, step.batches, strict=True)]
        return step

    def report(self, name: str, total: float, samples: int) -> float:
        """Add up a metric over all ranks, which all call this: its ``total`` over ``samples`` samples of this
        rank, 0 of 0 if it has none. Returns the mean over the samples of all. In a confined launch this is
        shown under its ``name``, an identifier in the script's files. Raises LocalError without samples.
        """
        if not name.isidentifier():
            raise LocalError("a metric's name must be an identifier, such as 'accuracy'")
        found, count = self._collectives.add(name, float(total), int(samples))
        if not count:
            raise LocalError("a metric of no samples was reported")
        return found / count

    def _pools(self, dataset: SampleSet, private: bool) -> list[Pool]:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise LocalError(
                f"a {type(dataset).__name__} is no map-style Dataset: it has no length or no items"
            )
        counts, least = self._collectives.gather(len(dataset)), self._collectives.least
        if 0 in counts:
            raise LocalError(error_texts.EMPTY_RANK(counts.index(0)))
        if private:
            return [
                _own_pool(count, rank, group)
                for (rank, group), count in zip(enumerate(least), counts, strict=True)
            ]
        if len(set(counts)) > 1:
            raise LocalError(error_texts.UNEQUAL_RANKS(counts))
        return [Pool(counts[0], tuple(rank for rank in range(self.ranks) if least[rank] == 1))]


def _own_pool(count: int, rank: int, least: int) -> Pool:
    if count < least:
        raise LocalError(error_texts.SMALL_RANK(rank, count, least))
    return Pool(count, (rank,), least)


@contextmanager
def group(
    model: nn.Module, *, policy: GroupPolicy = "balance", beside: ProcessGroup | None = None
) -> Iterator[ProcessGroup]:
    """Join the processes that train ``model`` with this script, each with its part of every batch; a step is
    exactly that of one process with all samples. The members are the ranks of torch's default process group.
    Without one, a gloo group is made from the environment, as ``millpond launch`` and ``torchrun`` set it,
    and ended with the ``with`` block; if RANK is not set there, the process trains alone. In a confined
    launch, ``millpond launch --private``, they are the ranks of the launch.

    All ranks begin with the model of rank 0. With the policy "balance" batches follow the ranks' speeds; with
    "fixed" they are equal, and the same data and seeds give the same bits. A second model that is trained on
    the batches of a first one, such as a generator's on its critic's, names the first one's group as
    ``beside``. Raises LocalError, in ``with``,
    for a model without parameters, and for parameters that are not float32. A model may be on a GPU.
    """
    channel = own_channel()
    own = channel is None and "RANK" in os.environ and not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    try:
        yield ProcessGroup(model, policy, _collectives(channel), beside)
    finally:
        if own:
            dist.destroy_process_group()


def _collectives(channel: GroupChannel | None) -> Collectives:
    if channel:
        return channel.collectives()
    return TorchCollectives() if dist.is_initialized() and dist.get_world_size() > 1 else Alone()

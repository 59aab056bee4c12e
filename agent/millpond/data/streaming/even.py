# SPDX-License-Identifier: Apache-2.0
"""Edge (torch.distributed, a data service): the same number of batches for each rank, as
DistributedDataParallel needs it.

The ranks divide the order of an epoch among themselves, so none is leased: each fetches its samples by their
indices, ahead of need.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from millpond.base.errors import LocalError
from millpond.base.schema import dump
from millpond.data.streaming.by_index import IndexedStream
from millpond.data.streaming.client import StreamSource
from millpond.data.streaming.dataset import StreamDataset, StreamOptions
from millpond.data.streaming.protocol.epoch_order import even_steps, samples_at
from millpond.data.streaming.protocol.leases import EpochState, state_of
from millpond.train.balance.ranges import Ranges, count


class EvenStream(StreamDataset):
    """Iterates over one epoch of a data set: on each rank as many batches, of the same sizes. Each sample
    comes at most once over all ranks; the up to ``ranks`` - 1 that are left out are others in each epoch.

    A batch counts as done when it is yielded. All ranks begin an epoch together. Raises LocalError for
    options of consumers that lease.
    """

    def __init__(self, source: StreamSource, options: StreamOptions) -> None:
        if options.batch is None:
            raise LocalError("even batches have a size: give the stream a 'batch'")
        if options.run or options.chunk is not None:
            raise LocalError("even batches are divided by rank: such a stream has no 'run' and no 'chunk'")
        super().__init__(source, replace(options, chunk=options.batch))
        self._size = options.batch
        self._samples: IndexedStream | None = None
        self._under_way = False  # an iteration

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this rank. Raises RemoteError; LocalError in a process of a DataLoader, and on
        all ranks if their streams are not alike.
        """
        if get_worker_info():
            raise LocalError(
                "even batches are read by the process that trains: a DataLoader has no processes"
            )
        rank, ranks = _place()
        samples = self._opened()
        state, left = self._begun(len(samples), ranks)
        _require_alike((state, self._size, self._options.seed, self._options.shuffle), ranks)
        order = samples.order(self._options.seed, state.epoch)
        steps = list(even_steps(left, self._size, rank, ranks))
        self._under_way = True
        try:
            for number, (own, rest) in enumerate(steps):
                ahead = steps[number : number + 1 + samples.ahead]
                samples.expect([samples_at(order, each).tolist() for each, _ in ahead])
                batch = samples.batch(samples_at(order, own).tolist())
                self._state = _saved(state, rest)
                began = time.monotonic()
                yield batch
                samples.observe(count(own), time.monotonic() - began)
            self._state = EpochState(state.epoch + 1, samples=state.samples)
        finally:
            self._under_way = False

    @property
    def _iterates(self) -> bool:
        return self._under_way

    def _opened(self) -> IndexedStream:
        """Return the samples; the connection remains for the next epochs."""
        if self._samples is None:
            self._samples = self.by_index(self._size)
            self._tuner = self._samples.tuner  # its choice is that of this stream
        return self._samples

    def _begun(self, samples: int, ranks: int) -> tuple[EpochState, Ranges]:
        """Return the state to go on from, and the positions left: of the next epoch if too few are."""
        state = state_of(self._state, samples)
        if samples < ranks:
            raise LocalError(f"{samples} samples are too few for {ranks} ranks")
        left = (*state.returned, (state.cursor, samples))
        if count(left) >= ranks:
            return state, left
        return EpochState(state.epoch + 1, samples=samples), ((0, samples),)

    @property
    def waited(self) -> float:
        """The seconds that iterations have waited for samples so far."""
        return self._samples.waited if self._samples else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the epoch, the same on all ranks, from which any number of ranks goes on."""
        return dict(dump(self._state))


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, of the default process group. Raises LocalError."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LocalError("even batches need the ranks: call torch.distributed.init_process_group before")
    return 0, 1


def _require_alike(what: object, ranks: int) -> None:
    """Raise LocalError on all ranks if ``what`` is not the same on each: they would make other batches, or
    another number of them, and wait for ever.
    """
    if ranks == 1:
        return
    digest = hashlib.blake2b(repr(what).encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MIN)
    if int(ends.sum()):
        text = "the ranks' streams differ in data set, seed, batch, shuffle or state"
        raise LocalError(f"{text}: give all of them the same, and end an epoch on all at the same batch")


def _saved(state: EpochState, left: Ranges) -> EpochState:
    """Return the state with these positions left; the last range ends with the epoch."""
    if not left:
        return replace(state, cursor=state.samples, returned=())
    return replace(state, cursor=left[-1][0], returned=left[:-1])

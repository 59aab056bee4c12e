# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, a data service): a streamed data set as torch takes it, see ``millpond.data.stream``."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from millpond.base.errors import LocalError
from millpond.base.schema import dump, load
from millpond.data.streaming.by_index import IndexedStream
from millpond.data.streaming.client import Pieces, StreamClient, StreamSource, Taken, batch_of
from millpond.data.streaming.passes import PassCounter
from millpond.data.streaming.protocol.consumer import RunWish, Told
from millpond.data.streaming.protocol.inbox import Piece
from millpond.data.streaming.protocol.leases import EpochState
from millpond.data.streaming.protocol.tuner import StreamChoice, StreamTuner
from millpond.data.streaming.served_set import decoder
from millpond.train.balance.ranges import Ranges, count

_AT_ONCE = 32
"""Samples that are taken at once where single ones are yielded."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a data set is streamed: samples of a ``batch``, None for single samples; bytes of ``memory`` on the
    way; the order's ``seed`` and ``shuffle`` window, the name of the ``run`` that several consumers share;
    samples of a ``chunk``, None to have it tuned; and what is applied to each sample or batch.
    """

    batch: int | None = None
    memory: int = 256 << 20
    seed: int = 0
    shuffle: int = 0
    run: str = ""
    chunk: int | None = None
    apply: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class MarkedBatch:
    """A batch of a reading process, with the consumer and the positions that it is of."""

    consumer: str
    epoch: int
    ranges: Ranges
    batch: Any


class StreamDataset(IterableDataset[Any]):
    """Iterates over one epoch of a data set that a data service serves: each sample once over all consumers
    of the run. What was yielded counts as done; what an iteration that is left has not yielded is for the
    next one, or another consumer. Of a process that is killed, what it asked the next batch after counts.

    In a torch DataLoader each process is a consumer, and what a process has read ahead counts as done when it
    is handed over; ``StreamLoader`` counts what was trained on.
    """

    def __init__(self, source: StreamSource, options: StreamOptions) -> None:
        super().__init__()
        if options.batch is not None and options.batch < 1:
            raise LocalError(f"a batch of {options.batch} samples is none")
        self._source, self._options = source, options
        self.run = options.run or uuid.uuid4().hex
        """The name of the run, which other processes give to share it."""
        self._state = EpochState()
        self._client: StreamClient | None = None
        self._untold: list[Told] = []
        self._yielded = 0
        self._passes = PassCounter()
        self.turn = ""
        """The name of an iteration whose batches come with their positions, for the process that trains to
        say that they are done.
        """
        self._tuner = StreamTuner(options.batch or _AT_ONCE, options.memory, options.chunk)
        self._waited = 0.0

    def __iter__(self) -> Iterator[Any]:
        """Yield samples, or batches. Raises RemoteError."""
        worker = get_worker_info()
        turn = self.turn or self._passes.begin(worker.id, worker.num_workers) if worker else uuid.uuid4().hex
        consumer = reader(turn, worker.id) if worker and self.turn else uuid.uuid4().hex
        with self.connected(consumer) as client:
            self._client = client
            client.begin(-1, turn)
            try:
                yield from self._all(client, consumer)
            finally:
                self._client = None
                self._waited += client.waited
                if not self.turn:
                    client.finish_step(self._yielded)

    @property
    def _iterates(self) -> bool:
        return self._client is not None

    @property
    def batch(self) -> int | None:
        """The samples of a batch; None if samples are yielded."""
        return self._options.batch

    @property
    def waited(self) -> float:
        """The seconds that iterations in this process have waited for samples so far."""
        return self._waited + (self._client.waited if self._client else 0.0)

    @property
    def choice(self) -> StreamChoice:
        """The chunk and the bytes on the way that were chosen last, in this process."""
        return self._tuner.choice

    @contextlib.contextmanager
    def connected(self, consumer: str, *, quiet: bool = False) -> Iterator[StreamClient]:
        """Return a consumer of the run, which leaves it at the end. A ``quiet`` one takes no samples. What
        the service has not heard then, as of a lost connection, the next consumer tells it.
        """
        options = self._options
        wish = RunWish(self.run, consumer, options.seed, options.shuffle, self._state)
        with StreamClient(self._source, wish, self._tuner, quiet=quiet) as client:
            untold, self._untold = self._untold, []
            client.tell(untold)
            try:
                yield client
            finally:
                if not self.turn:  # else the process that trains says so
                    client.leave()
                    self._untold += client.settle()  # the next iteration must not find this one

    def _all(self, client: StreamClient, consumer: str) -> Iterator[Any]:
        change = self._change(client)
        for epoch, ranges, pieces in self._pieces(client):
            if self.turn:
                yield MarkedBatch(consumer, epoch, ranges, change(pieces))
                continue
            for each in self._each(pieces, change):
                self._yielded += 1 if self._options.batch is None else count(ranges)
                yield each
            client.finish_step()
            self._yielded = 0

    def _pieces(self, client: StreamClient) -> Iterator[Taken]:
        """Yield what the client takes in the epoch, and let it measure the steps. A DataLoader that keeps an
        order waits for one process while others cannot go on: there it does not wait for what others do.
        """
        to_end = bool(self.turn) or get_worker_info() is None
        while (taken := client.take(self._options.batch or _AT_ONCE, to_end=to_end))[2]:
            began = time.monotonic()
            yield taken
            client.observe(count(taken[1]), time.monotonic() - began)

    def _change(self, client: StreamClient) -> Callable[[Pieces], Any]:
        """Return what makes a batch of pieces."""
        decode, apply = decoder(client.description().decode), self._options.apply
        if apply is None:
            return lambda pieces: batch_of(pieces, decode)
        return lambda pieces: apply(batch_of(pieces, decode))

    def _each(self, pieces: Pieces, change: Callable[[Pieces], Any]) -> Iterator[Any]:
        if self._options.batch is not None:
            yield change(pieces)
            return
        for piece in pieces:
            for index in range(piece.start, piece.stop):
                yield _one(change([Piece(piece.samples, index, index + 1)]))

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the epoch, over all consumers of the run, from which any number of them goes
        on. Of several processes each calls this, and what it returns then is the state of all. Raises
        RemoteError.
        """
        if self._client:
            self._client.finish_step(self._yielded)
            self._yielded = 0
            return dict(dump(self._client.state()))
        with self.connected(uuid.uuid4().hex, quiet=True) as client:
            return dict(dump(client.state()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Where several processes share a ``run`` that needs a new name: what was done
        after the state was saved is to be done again. Raises LocalError.
        """
        if self._iterates:
            raise LocalError("a state is loaded between iterations")
        self._state = load(EpochState, dict(state), "the state of the stream")
        self._untold = []
        if not self._options.run:
            self.run = uuid.uuid4().hex

    def by_index(self, batch: int) -> IndexedStream:
        """Return the samples by their indices, for a group's loader whose ranks take ``batch`` each."""
        options = self._options
        return IndexedStream(self._source, options.memory, options.shuffle, batch, options.apply)


def reader(turn: str, number: int) -> str:
    """Return the name of a consumer that reads for another process."""
    return f"{turn} {number}"


def _one(batch: Any) -> Any:
    """Return the only sample of a batch."""
    if isinstance(batch, dict):
        return {key: _one(value) for key, value in batch.items()}
    if isinstance(batch, list) and len(batch) == 1 and isinstance(batch[0], bytes | str):
        return batch[0]
    return tuple(_one(value) for value in batch) if isinstance(batch, list) else batch[0]

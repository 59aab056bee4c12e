# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, processes): batches of a stream that processes of their own read, decode and hand over."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from millpond.base.errors import LocalError
from millpond.base.schema import dump
from millpond.data.streaming.client import StreamClient
from millpond.data.streaming.dataset import MarkedBatch, StreamDataset, reader


class StreamLoader:
    """Iterates over the batches of ``stream``, of which ``workers`` processes are consumers. A batch counts
    as done when the next one, or the state, is asked for, wherever the processes are by then. ``options`` are
    those of a torch DataLoader. Raises LocalError.
    """

    def __init__(self, stream: StreamDataset, workers: int, **options: Any) -> None:
        if workers < 1 or not stream.batch:
            raise LocalError("a loader of a stream has at least one process, and the stream a batch")
        self._stream, self._workers, self._options = stream, workers, options
        self._client: StreamClient | None = None
        self._handed: MarkedBatch | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch. Raises RemoteError, and RuntimeError if a process dies."""
        stream = copy.copy(self._stream)
        stream.turn = uuid.uuid4().hex
        own = reader(stream.turn, -1)
        batches = iter(self._reading(stream))  # forks, while there is no thread of the client
        with self._stream.connected(own, quiet=True) as client:
            self._client = client
            client.begin(-1, stream.turn)
            try:
                yield from self._handed_over(batches)
            finally:
                self._finish()
                self._client = None
                del batches  # ends the processes, which would lease again
                for number in range(self._workers):
                    client.leave(reader(stream.turn, number))

    def _reading(self, stream: StreamDataset) -> DataLoader[MarkedBatch]:
        workers = self._workers
        return DataLoader(stream, batch_size=None, num_workers=workers, in_order=False, **self._options)

    def _handed_over(self, batches: Iterator[MarkedBatch]) -> Iterator[Any]:
        for marked in batches:
            self._handed = marked
            yield marked.batch
            self._finish()

    def _finish(self) -> None:
        if self._handed and self._client:
            handed, self._handed = self._handed, None
            self._client.finish(handed.consumer, handed.epoch, handed.ranges)

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the epoch, see ``StreamDataset.state_dict``."""
        self._finish()
        return dict(dump(self._client.state())) if self._client else self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, see ``StreamDataset.load_state_dict``."""
        self._stream.load_state_dict(state)

# SPDX-License-Identifier: Apache-2.0
"""Edge (a data service): streamed samples by their indices, fetched ahead of need, for a group's loader.

The data plan of a group says which samples each rank takes in a step. As long as batches remain as they are
it says so for the next steps, too, so these are fetched meanwhile; where they change, what has come in vain
is dropped and the difference fetched.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from millpond.data.streaming.client import StreamClient, StreamSource, batch_of
from millpond.data.streaming.protocol.epoch_order import epoch_order
from millpond.data.streaming.protocol.tuner import StreamTuner
from millpond.data.streaming.served_set import Decode, decoder
from millpond.train.balance.curve import Ints
from millpond.train.protocol import StreamTiming

_MOST_AHEAD = 32


class IndexedStream:
    """Samples of a data service in batches of about ``batch``, as ``ReadAhead``. ``tuner`` chooses the bytes
    on the way. Raises RemoteError.
    """

    def __init__(
        self, source: StreamSource, memory: int, shuffle: int, batch: int, apply: Decode | None
    ) -> None:
        self.tuner = StreamTuner(batch, memory, batch)
        self._client = StreamClient(source, None, self.tuner)
        weakref.finalize(self, self._client.close)
        opened = self._client.description()
        self._shards, self._shuffle, self._batch = opened.shards, shuffle, batch
        self._decode, self._apply = decoder(opened.decode), apply
        self._places: dict[int, tuple[int, int]] = {}
        self._asked: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return sum(self._shards)

    def __getitem__(self, index: int) -> Any:
        return self.batch([range(len(self))[index]])

    @property
    def ahead(self) -> int:
        """The steps whose samples are to be fetched before they are needed."""
        size = self._batch * self.tuner.costs.sample_bytes
        return min(_MOST_AHEAD, max(1, math.ceil(self.tuner.choice.window / size)))

    @property
    def stream_timing(self) -> StreamTiming:
        """The choice and its measurements, for a job's ``millpond data explain``."""
        return self.tuner.timing

    @property
    def waited(self) -> float:
        """The seconds that were spent waiting for samples."""
        return self._client.waited

    def order(self, seed: int, epoch: int) -> Ints:
        """Return the indices of all samples in the order of an epoch."""
        return epoch_order(self._shards, seed, epoch, self._shuffle)

    def expect(self, coming: Sequence[Sequence[int]]) -> None:
        """Fetch the samples of the coming batches, and forget others."""
        wanted = {index for each in coming for index in each}
        for number, indices in list(self._asked.items()):
            if wanted.isdisjoint(indices):
                self._drop(number)
        for each in coming:
            if new := [index for index in each if index not in self._places]:
                number = self._client.fetch(new)
                self._asked[number] = new
                self._places |= {index: (number, place) for place, index in enumerate(new)}

    def batch(self, indices: Sequence[int]) -> Any:
        """Return samples as one batch; those that were not expected are fetched now. Raises RemoteError."""
        missing = [index for index in indices if index not in self._places]
        if missing:
            self.expect([*self._asked.values(), missing])
        pieces = self._client.fetched([self._places[index] for index in indices])
        found = batch_of(pieces, self._decode)
        return self._apply(found) if self._apply else found

    def observe(self, samples: int, seconds: float) -> None:
        """Note the seconds of a step, which says how far ahead to fetch."""
        self._client.observe(samples, seconds)

    def _drop(self, number: int) -> None:
        for index in self._asked.pop(number):
            del self._places[index]
        self._client.drop(number)

# SPDX-License-Identifier: Apache-2.0
"""Edge (a data service): labelled images in a public folder of another device, as a map-style data set.

A service that is away is an error that another try may mend: the worker is prepared again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from millpond.base.errors import Refused, RemoteError
from millpond.train import error_texts
from millpond.train.balance.curve import Ints
from millpond.train.data.errors import DataError
from millpond.train.data.read_ahead import ReadAhead
from millpond.train.protocol import StreamTiming


class StreamedSamples:
    """The samples that ``connect`` opens: those of ``folder`` on device ``source``. Raises DataError."""

    def __init__(self, connect: Callable[[], ReadAhead], folder: str, source: str) -> None:
        self._folder, self._source = folder, source
        try:
            self._samples = connect()
        except RemoteError as error:
            raise self._described(error) from error

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        images, labels = self.__getitems__([range(len(self))[index]])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a batch: images float32 [N, C, H, W] and labels int64 [N]. Raises DataError."""
        try:
            return tuple(self._samples.batch(indices))
        except RemoteError as error:
            raise self._described(error) from error

    def expect(self, present: Ints, coming: Sequence[Ints]) -> None:
        """Fetch the samples of the present exchange, and of as many of the coming ones as keep the link busy;
        forget others.
        """
        ahead = [each.tolist() for each in coming[: self._samples.ahead]]
        self._samples.expect([present.tolist(), *ahead])

    def observe(self, samples: int, seconds: float) -> None:
        """Note how long a step took, waiting not counted: how far ahead is fetched follows from it."""
        self._samples.observe(samples, seconds)

    @property
    def stream_timing(self) -> StreamTiming:
        """The choice for the stream and its measurements, see ``Selection.stream``."""
        return self._samples.stream_timing

    def _described(self, error: RemoteError) -> DataError:
        if isinstance(error, Refused) and error.code == "data":
            return DataError(error_texts.SERVICE_REFUSES(self._source, self._folder))
        return DataError(error_texts.SERVICE_AWAY(self._source), transient=True)

# SPDX-License-Identifier: Apache-2.0
"""Pure: data sets elsewhere, whose samples a loader fetches before it needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from millpond.train.balance.curve import Ints
from millpond.train.protocol import StreamTiming


@runtime_checkable
class ReadAhead(Protocol):
    """Samples by their indices; those that are expected are fetched meanwhile."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    @property
    def ahead(self) -> int:
        """The steps whose samples are to be expected beside those of the present one."""

    @property
    def stream_timing(self) -> StreamTiming:
        """The choice and its measurements, as a worker of a job tells them."""

    def order(self, seed: int, epoch: int) -> Ints:
        """Return the indices of all samples in the order of an epoch, the same on every rank."""

    def expect(self, coming: Sequence[Sequence[int]]) -> None:
        """Fetch the samples of the present and the coming batches, and forget others."""

    def batch(self, indices: Sequence[int]) -> Any:
        """Return samples as one batch."""

    def observe(self, samples: int, seconds: float) -> None:
        """Note the seconds of a step with so many samples."""


@runtime_checkable
class Streamed(Protocol):
    """A data set whose samples come from elsewhere, see ``millpond.data.stream``."""

    def by_index(self, batch: int) -> ReadAhead:
        """Return the samples for a rank that takes about ``batch`` in a step."""

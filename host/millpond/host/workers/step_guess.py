# SPDX-License-Identifier: Apache-2.0
"""Pure: find out whether a state is the last one moved by the mean alone, which nodes have.

FedAvg subtracts the mean from parameters and adds it to buffers; integers are rounded. Which is which shows
in a sample of each tensor. A wrong guess costs a second transfer: nodes compare the digest of the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.aggregate.messages import Advance
from millpond.train.state.layout import Tensor, spans

Vector = NDArray[np.float32]
_MOST_FIXED = 4096
"""The most values that are rounded, or no step is guessed."""
_OF_EACH = 64
"""The values of each tensor in a sample."""


class StepGuess:
    """Guesses steps of states of ``tensors``. ``state`` and ``mean`` are samples of those that nodes have."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        own = [(tensor, span) for tensor, span in spans(tuple(tensors)) if span.stop > span.start]
        self._spans = [span for tensor, span in own if tensor.dtype == "float32"]
        rounded = [np.arange(span.start, span.stop) for tensor, span in own if tensor.dtype != "float32"]
        self._fixed = np.concatenate([np.empty(0, np.int64), *rounded])
        places = [
            np.linspace(span.start, span.stop - 1, min(_OF_EACH, span.stop - span.start)).astype(np.int64)
            for span in self._spans
        ]
        self._places = np.concatenate([np.empty(0, np.int64), *places])
        self._starts = np.cumsum([0, *map(len, places)])[:-1]
        self.state: Vector | None = None
        self.mean: Vector | None = None

    def sample(self, values: Vector) -> Vector:
        """Return a copy of some of the values."""
        found: Vector = values[self._places]
        return found

    def forget(self) -> None:
        """Note that the nodes have no state and no mean."""
        self.state = self.mean = None

    def to(self, values: Vector) -> Advance | None:
        """Return the step from the last state to ``values``, None if there is none by the mean alone."""
        if self.state is None or self.mean is None or len(self._fixed) > _MOST_FIXED or not self._spans:
            return None
        found = self.sample(values)
        subtracted = np.logical_and.reduceat(self.state - self.mean == found, self._starts)
        added = np.logical_and.reduceat(self.state + self.mean == found, self._starts)
        if not np.all(subtracted | added):
            return None
        parts = tuple(
            (span.start, span.stop) for span, less in zip(self._spans, subtracted, strict=True) if not less
        )
        fixed = zip(self._fixed.tolist(), values[self._fixed].tolist(), strict=True)
        return Advance(parts, tuple(fixed))

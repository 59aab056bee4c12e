# SPDX-License-Identifier: Apache-2.0
"""Pure: the weighted average of many models, bit by bit the same whatever the order and the tree.

Floating-point addition depends on its order, so the sums are kept in whole numbers. A value ``w`` of a worker
with ``n`` samples enters its accumulator, an int64, as ``n * q`` with ``q = round(w * 2**S)``. Whole numbers
add exactly in any order and any grouping, and ``w * 2**S`` is exact in float64: only its exponent moves.

*No overflow.* Every update has ``|w| <= bound <= 2**b``, and all samples together are fewer than ``2**k``.
Then ``|sum n*q| <= sum n * (2**(b+S) + 1/2) < 2**(k+b+S) + 2**(k-1)``, which for ``S = 62 - b - k`` and
``k <= 62`` stays below ``2**63``. ``add`` refuses whatever breaks either bound.

*Error.* ``q`` is at most 1/2 off, so the average, a mean of ``q * 2**-S``, is at most ``2**-(S+1)`` off
however many workers there are; the final rounding to float32 comes on top, as it does for any method. For
1440 samples (k = 11) and the default bound of 65536 (b = 16), S is 35 and the error 1.5e-11; for a million
samples (k = 20) it is 7.5e-9, where half a float32 step at 0.1 is 3.7e-9.

Tensors of whole numbers, such as BatchNorm's counters, have S = 0 and a bound of 2**24: their sum is exact.

Memory: 8 bytes per value for the sum, 4 for the average, and a scratch of fixed size, whatever the number of
workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from millpond.base.errors import LocalError, RemoteError
from millpond.train.state import layout
from millpond.train.state.layout import Tensor

BOUND = 65536.0
_WHOLE_BOUND = float(1 << 24)
_WHOLE_BITS = 24
_LARGEST = float(np.finfo(np.float32).max)
_CHUNK = 1 << 16
Vector = NDArray[np.float32]


class RefusedUpdate(RemoteError):
    """A worker's update does not count; names the ``worker`` and the fault."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(f"{worker}: update refused: {text}")
        self.worker = worker


class ExactSum:
    """A running sum of updates, each weighted by its samples; two sums of one kind can be merged."""

    def __init__(self, tensors: tuple[Tensor, ...], most_samples: int, *, bound: float = BOUND) -> None:
        """Sum states of ``tensors``, ``most_samples`` in all, values up to ``bound``. Raises LocalError."""
        self.tensors, self.most_samples, self.bound = tensors, most_samples, bound
        self.scale_bits = scale_bits(most_samples, bound)
        self.samples = 0
        self.workers: frozenset[str] = frozenset()
        self._sum = np.zeros(layout.size(tensors), np.int64)

    def add(self, vector: Vector, samples: int, worker: str) -> None:
        """Count an update, float32 [size]. Raises RefusedUpdate, and then nothing has changed."""
        self._check_share({worker}, samples, worker)
        if vector.dtype != np.float32 or vector.shape != self._sum.shape:
            raise RefusedUpdate(
                worker, f"{vector.dtype} {vector.shape} where float32 {self._sum.shape} belongs"
            )
        for span, whole in _chunks(self.tensors):
            self._check_values(vector, span, _WHOLE_BOUND if whole else self.bound, worker)
        scaled, counted = np.empty(_CHUNK, np.float64), np.empty(_CHUNK, np.int64)
        for span, whole in _chunks(self.tensors):
            f, q = scaled[: span.stop - span.start], counted[: span.stop - span.start]
            np.multiply(vector[span], 1.0 if whole else 2.0**self.scale_bits, out=f, dtype=np.float64)
            np.rint(f, out=f)
            np.copyto(q, f, casting="unsafe")
            q *= samples
            self._sum[span] += q
        self.samples += samples
        self.workers |= {worker}

    def merge(self, other: ExactSum) -> None:
        """Add the updates that ``other`` has counted. Raises RefusedUpdate, LocalError; then nothing has
        changed.
        """
        mine = (self.tensors, self.most_samples, self.bound)
        if mine != (other.tensors, other.most_samples, other.bound):
            raise LocalError("two sums of different models or bounds cannot be merged")
        if other.samples:
            self._check_share(other.workers, other.samples, ", ".join(sorted(other.workers)))
            self._sum += other._sum
            self.samples += other.samples
            self.workers |= other.workers

    def average(self) -> Vector:
        """Return the mean over all samples, float32 [size], integers rounded. Raises LocalError if none."""
        if not self.samples:
            raise LocalError("there is no update to average")
        out = np.empty(self._sum.shape, np.float32)
        for span, whole in _chunks(self.tensors):
            if whole:
                out[span] = np.rint(self._sum[span] / self.samples)
            else:
                out[span] = self._sum[span] / (self.samples * 2.0**self.scale_bits)
        return out

    def _check_share(self, workers: set[str] | frozenset[str], samples: int, worker: str) -> None:
        if twice := self.workers & workers:
            raise RefusedUpdate(worker, f"{min(twice)} was counted before")
        if samples < 1:
            raise RefusedUpdate(worker, f"it claims {samples} samples")
        if self.samples + samples > self.most_samples:
            total = self.samples + samples
            raise RefusedUpdate(
                worker, f"with its {samples} samples there are {total}, not {self.most_samples}"
            )

    def _check_values(self, vector: Vector, span: slice, bound: float, worker: str) -> None:
        part = vector[span]
        if within(part, bound):
            return
        first = int(np.argmin(np.abs(part) <= bound))
        name, value = layout.name_at(self.tensors, span.start + first), float(part[first])
        what = "is" if not math.isfinite(value) else f"is beyond {bound:g}:"
        raise RefusedUpdate(worker, f"a value of '{name}' {what} {value:g}")


def within(values: Vector, bound: float) -> bool:
    """Return whether all values are finite and none exceeds ``bound`` as a float32, itself 1e-15 or more."""
    bound = float(np.float32(bound))
    with np.errstate(over="ignore", invalid="ignore"):
        # One look at memory, where min and max take two. Rounding never makes a sum of squares smaller than
        # the rounded square of one of them, so none beyond the bound passes.
        square = float(np.dot(values, values))
    if square < bound * bound:
        return True
    return bool(
        max(-values.min(), values.max()) <= min(bound, _LARGEST)
    )  # false for NaN, which min and max pass on


def scale_bits(most_samples: int, bound: float = BOUND) -> int:
    """Return S of the module's derivation. Raises LocalError if so many such samples leave no precision."""
    if most_samples < 1 or not 0 < bound < math.inf:
        raise LocalError(f"no sums of {most_samples} samples of values up to {bound}")
    mantissa, exponent = math.frexp(bound)
    bits = 62 - (exponent - (mantissa == 0.5)) - most_samples.bit_length()
    if bits < 16 or most_samples.bit_length() > 62 - _WHOLE_BITS:
        raise LocalError(f"{most_samples} samples of values up to {bound:g} are too many for exact sums")
    return bits


def _chunks(tensors: tuple[Tensor, ...]) -> Iterator[tuple[slice, bool]]:
    """Yield parts of at most _CHUNK values, none empty, and whether each is of whole numbers."""
    for start, stop, whole in _runs(tensors):
        for at in range(start, stop, _CHUNK):
            yield slice(at, min(at + _CHUNK, stop)), whole


def _runs(tensors: tuple[Tensor, ...]) -> Iterator[tuple[int, int, bool]]:
    """Join neighbouring tensors of one sort: a model has many small ones."""
    start, stop, whole = 0, 0, False
    for tensor, span in layout.spans(tensors):
        if (tensor.dtype in layout.INTEGERS) != whole:
            yield start, stop, whole
            start, whole = stop, not whole
        stop = span.stop
    yield start, stop, whole

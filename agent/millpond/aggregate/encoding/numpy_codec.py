# SPDX-License-Identifier: Apache-2.0
"""Pure: vectors to bytes and back in numpy, with the bits of the kernels in C."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from millpond.aggregate.encoding.layout import NOT_FINITE, Bounds, Buffer, Encoding, checked_count

_LANES = 8
Vector = NDArray[np.float32]


class NumpyCodec:
    """See Codec."""

    def encode(self, encoding: Encoding, values: Buffer, out: Buffer, *feedback: Buffer) -> Bounds:
        count, encode = checked_count(encoding, values, out, feedback), encoding.kind.encode
        sums, data = np.frombuffer(values, np.float32), np.frombuffer(out, np.uint8)
        with np.errstate(over="ignore", invalid="ignore"):
            if feedback:
                kept, left = (np.frombuffer(each, np.float32) for each in feedback)
                sums = np.add(sums, kept, out=left)
            if not np.isfinite(sums).all():
                return NOT_FINITE
            return _bounds([encode(sums[span], data[place]) for span, place in encoding.pieces(count)])

    def decode(self, encoding: Encoding, data: Buffer, out: Buffer) -> bool:
        count, decode = checked_count(encoding, out, data), encoding.kind.decode
        values, given = np.frombuffer(out, np.float32), np.frombuffer(data, np.uint8)
        return all(decode(given[place], values[span]) for span, place in encoding.pieces(count))


def _bounds(decoded: list[Vector]) -> Bounds:
    """Return the bounds of the decoded values of all blocks: their squares are added in eight lanes."""
    found = np.concatenate(decoded)
    if not np.isfinite(found).all():
        return NOT_FINITE
    squares = np.zeros(-(-len(found) // _LANES) * _LANES)
    np.square(found, dtype=np.float64, out=squares[: len(found)])
    lanes = squares.reshape(-1, _LANES).sum(axis=0)
    return Bounds(float(np.abs(found).max()), functools.reduce(float.__add__, lanes.tolist(), 0.0))

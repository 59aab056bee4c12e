# SPDX-License-Identifier: Apache-2.0
"""Pure: vectors to bytes and back in numpy, with the bits of ``encodings.c``."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from millpond.aggregate.encoding.layout import NOT_FINITE, Bounds, Buffer, Encoding, checked_count

_LANES = 8
_SMALLEST = np.float32(2.0**-100)
Vector = NDArray[np.float32]


class NumpyCodec:
    """See Codec."""

    def encode(
        self,
        encoding: Encoding,
        values: Buffer,
        out: Buffer,
        kept: Buffer | None = None,
        left: Buffer | None = None,
    ) -> Bounds:
        count = checked_count(encoding, values, out, kept, left)
        given, data = np.frombuffer(values, np.float32), np.frombuffer(out, np.uint8)
        with np.errstate(over="ignore", invalid="ignore"):
            if encoding.name == "bfloat16":
                return _bounds(given, [_encode_bfloat16(given, data)])
            if kept is None or left is None:
                raise ValueError(f"{encoding.name} needs what was kept")
            sums = np.frombuffer(left, np.float32)
            np.add(given, np.frombuffer(kept, np.float32), out=sums)
            if not np.isfinite(sums).all():
                return NOT_FINITE
            encode = _encode_int8 if encoding.name == "int8" else _encode_top
            return _bounds(sums, [encode(sums[span], data[place]) for span, place in encoding.pieces(count)])

    def decode(self, encoding: Encoding, data: Buffer, out: Buffer) -> bool:
        count = checked_count(encoding, out, data, decodes=True)
        values, given = np.frombuffer(out, np.float32), np.frombuffer(data, np.uint8)
        if encoding.name == "bfloat16":
            values.view(np.uint32)[:] = given.view(np.uint16).astype(np.uint32) << 16
            return True
        decode = _decode_int8 if encoding.name == "int8" else _decode_top
        return all(decode(values[span], given[place]) for span, place in encoding.pieces(count))


def _encode_int8(values: Vector, data: NDArray[np.uint8]) -> Vector:
    """Encode a block, and leave in ``values`` what that loses. Returns the values as they are decoded."""
    largest = np.abs(values).max(keepdims=True)
    scale = np.where(largest < _SMALLEST, np.float32(0), largest / np.float32(127))
    numbers = np.rint(values / np.where(scale > 0, scale, np.float32(1)))
    data[:4] = scale.view(np.uint8)
    data[4:] = numbers.astype(np.int8).view(np.uint8)
    decoded: Vector = (numbers + np.float32(0)) * scale  # no zero is negative
    values -= decoded
    return decoded


def _decode_int8(values: Vector, data: NDArray[np.uint8]) -> bool:
    scale = data[:4].copy().view(np.float32)
    with np.errstate(over="ignore"):
        if not np.isfinite(scale).all() or np.signbit(scale).any():
            return False
        np.multiply(data[4:].view(np.int8).astype(np.float32), scale, out=values)
    return True


def _encode_bfloat16(values: Vector, data: NDArray[np.uint8]) -> Vector:
    bits = values.view(np.uint32)
    upper = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    data.view(np.uint16)[:] = upper
    return (upper.astype(np.uint32) << 16).view(np.float32)


def _encode_top(values: Vector, data: NDArray[np.uint8]) -> Vector:
    """Encode a block, and leave in ``values`` what that loses. Returns the values that are sent."""
    top = len(data) // 6
    order = np.argsort(-np.abs(values), kind="stable")  # of equal magnitudes, the first ones come first
    positions = np.sort(order[:top])
    sent = values[positions]
    data[: 4 * top] = sent.view(np.uint8)
    data[4 * top :] = positions.astype(np.uint16).view(np.uint8)
    values[positions] = 0
    return sent


def _decode_top(values: Vector, data: NDArray[np.uint8]) -> bool:
    top = len(data) // 6
    positions = data[4 * top :].copy().view(np.uint16).astype(np.int64)
    values[:] = 0
    if (np.diff(positions) <= 0).any() or positions[-1] >= len(values):
        return False
    values[positions] = data[: 4 * top].copy().view(np.float32)
    return True


def _bounds(given: Vector, decoded: list[Vector]) -> Bounds:
    """Return the bounds of the decoded values of all blocks: their squares are added in eight lanes."""
    found = np.concatenate(decoded)
    if not (np.isfinite(given).all() and np.isfinite(found).all()):
        return NOT_FINITE
    squares = np.zeros(-(-len(found) // _LANES) * _LANES)
    np.square(found, dtype=np.float64, out=squares[: len(found)])
    lanes = squares.reshape(-1, _LANES).sum(axis=0)
    return Bounds(float(np.abs(found).max()), functools.reduce(float.__add__, lanes.tolist(), 0.0))

# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): vectors to bytes and back, in C where a compiler built it, else in numpy.

Both give the same bits. The C loops need no numpy, which an agent does without.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Protocol

from millpond.aggregate.encoding.layout import (
    NOT_FINITE,
    TOP_VALUES,
    Bounds,
    Buffer,
    Encoding,
    checked_count,
)
from millpond.base import shared_library

LIBRARY = Path(__file__).with_name("_encodings.so")
_VERSION = 1
_KINDS = {"bfloat16": 1, "int8": 2, "top-k": 3}


class Codec(Protocol):
    """Encodes and decodes parts of vectors that begin with a block. Buffers are contiguous and can be
    written to; they hold float32 values, or the bytes of ``encoding``, not float32, for as many values.
    """

    def encode(
        self,
        encoding: Encoding,
        values: Buffer,
        out: Buffer,
        kept: Buffer | None = None,
        left: Buffer | None = None,
    ) -> Bounds:
        """Write ``values`` to ``out``. An encoding that feeds back adds what was ``kept`` of earlier vectors,
        and writes to ``left`` what is to be kept now.
        """

    def decode(self, encoding: Encoding, data: Buffer, out: Buffer) -> bool:
        """Write the values of ``data`` to ``out``. Returns whether ``data`` is valid; ``out`` is of no use
        otherwise.
        """


class NativeCodec:
    """The loops in C. Raises LocalError without the library."""

    def __init__(self) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library = shared_library.load(LIBRARY, _VERSION)
        self._encode, self._decode = library.encode, library.decode
        self._encode.argtypes = (number, *(pointer,) * 4, *(size,) * 3, ctypes.POINTER(ctypes.c_float))
        self._encode.restype = ctypes.c_double
        self._decode.argtypes = (number, pointer, pointer, size, size, size)

    def encode(
        self,
        encoding: Encoding,
        values: Buffer,
        out: Buffer,
        kept: Buffer | None = None,
        left: Buffer | None = None,
    ) -> Bounds:
        count, largest = checked_count(encoding, values, out, kept, left), ctypes.c_float()
        places = [_address(buffer) for buffer in (out, values, kept, left)]
        squares = self._encode(_KINDS[encoding.name], *places, count, *_top_of(encoding, count), largest)
        return NOT_FINITE if squares < 0 else Bounds(largest.value, squares)

    def decode(self, encoding: Encoding, data: Buffer, out: Buffer) -> bool:
        count, kind = checked_count(encoding, out, data, decodes=True), _KINDS[encoding.name]
        return not self._decode(kind, _address(out), _address(data), count, *_top_of(encoding, count))


def _top_of(encoding: Encoding, count: int) -> tuple[int, int]:
    return encoding.kept(TOP_VALUES), encoding.kept(count % TOP_VALUES)


def _address(buffer: Buffer | None) -> int | None:
    return None if not buffer else ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@functools.cache
def codec() -> Codec:
    """Return the loops in C where they are built and load, else those of numpy."""
    if shared_library.is_usable(LIBRARY, _VERSION):
        return NativeCodec()
    from millpond.aggregate.encoding.numpy_codec import NumpyCodec  # an agent does without where it can

    return NumpyCodec()

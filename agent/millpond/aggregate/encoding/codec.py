# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): vectors to bytes and back, in C where a compiler built it, else in numpy.

Both give the same bits. The C loops need no numpy, which an agent does without.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, Protocol

from millpond.aggregate.encoding.layout import NOT_FINITE, Bounds, Buffer, Encoding, checked_count
from millpond.base import shared_library

_VERSION = 2


class Codec(Protocol):
    """Encodes and decodes parts of vectors that begin with a block. Buffers are contiguous and can be
    written to; they hold float32 values, or the bytes of ``encoding``, not float32, for as many values.
    """

    def encode(self, encoding: Encoding, values: Buffer, out: Buffer, *feedback: Buffer) -> Bounds:
        """Write ``values`` to ``out``. An encoding that feeds back adds what was kept of earlier vectors, the
        first buffer of ``feedback``, and writes to the second what is to be kept now.
        """

    def decode(self, encoding: Encoding, data: Buffer, out: Buffer) -> bool:
        """Write the values of ``data`` to ``out``. Returns whether ``data`` is valid; ``out`` is of no use
        otherwise.
        """


class NativeCodec:
    """The loops in C. Raises LocalError for an encoding without a library."""

    def encode(self, encoding: Encoding, values: Buffer, out: Buffer, *feedback: Buffer) -> Bounds:
        count, largest = checked_count(encoding, values, out, feedback), ctypes.c_float()
        places = [*map(_address, (out, values, *feedback)), None, None][:4]
        squares = _kernel(encoding.name).encode(*places, count, *_sizes(encoding, count), largest)
        return NOT_FINITE if squares < 0 else Bounds(largest.value, squares)

    def decode(self, encoding: Encoding, data: Buffer, out: Buffer) -> bool:
        count = checked_count(encoding, out, data)
        places = _address(out), _address(data)
        return not _kernel(encoding.name).decode(*places, count, *_sizes(encoding, count))


def library_of(name: str) -> Path:
    """Return where the kernel of an encoding is, if a compiler built it."""
    return Path(__file__).parent / "kinds" / f"_{name.replace('-', '_')}.so"


@functools.cache
def _kernel(name: str) -> Any:
    library = shared_library.load(library_of(name), _VERSION)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.encode.argtypes = (*(pointer,) * 4, *(size,) * 3, ctypes.POINTER(ctypes.c_float))
    library.encode.restype = ctypes.c_double
    library.decode.argtypes = (pointer, pointer, *(size,) * 3)
    return library


@functools.lru_cache(64)
def _sizes(encoding: Encoding, count: int) -> tuple[int, int]:
    """Return the bytes of a whole block, and of the last one if it is shorter."""
    return encoding.size(encoding.block), encoding.size(count % encoding.block)


def _address(buffer: Buffer) -> int | None:
    return None if not buffer else ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@functools.lru_cache(64)
def codec(encoding: Encoding) -> Codec:
    """Return the loops of an encoding in C where they are built and load, else those of numpy."""
    if shared_library.is_usable(library_of(encoding.name), _VERSION):
        return NativeCodec()
    from millpond.aggregate.encoding.numpy_codec import NumpyCodec  # an agent does without where it can

    return NumpyCodec()

# SPDX-License-Identifier: Apache-2.0
"""Edge: rows of arrays in files, read as they are needed and kept in the types that the files have.

Files are read and never mapped: a volume may serve direct I/O only, a file that is cut while it is mapped
kills the process, and mapped pages would count as the worker's memory.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.train import error_texts
from millpond.train.data.errors import TRANSIENT, DataError

Array = NDArray[Any]
Indices = Sequence[int] | NDArray[np.int64]

IN_MEMORY = 64 << 20
"""Bytes of a file, or of a folder's pictures, up to which they are kept in memory."""
_LARGEST = 16 << 30
_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Rows(Protocol):
    """The rows of an array: ``shape`` and ``dtype`` are those of one row."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> Array:
        """Return some of the rows, [N, *shape]. Raises DataError."""


class ArrayRows:
    """Rows of an array in memory."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.shape, self.dtype = array.shape[1:], array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def read(self, indices: Indices) -> Array:
        found: Array = self._array[np.asarray(indices, np.int64)]
        return found


class FileRows:
    """Rows that lie in a file one after the other, from byte ``start`` on."""

    def __init__(
        self, path: Path, name: str, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._name, self._start = name, start
        self._count, self.shape, self.dtype = shape[0], shape[1:], dtype
        self._size = math.prod(self.shape) * dtype.itemsize
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        # Elsewhere, as of a volume, what the kernel reads ahead may not be where a read looks for it.
        self._on_disk = os.major(os.fstat(self._file).st_dev) != 0

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Indices) -> Array:
        """Implement ``Rows``. Neighbours are read at once; of all others the kernel is told ahead, so that a
        disk has many requests at a time.
        """
        wanted = np.asarray(indices, np.int64)
        found: Array = np.empty((len(wanted), *self.shape), self.dtype)
        if not found.size:
            return found
        places, view = wanted * self._size + self._start, memoryview(found.data).cast("B")
        cuts = [0, *(np.flatnonzero(np.diff(wanted) != 1) + 1).tolist(), len(wanted)]
        runs = [(int(places[i]), view[i * self._size : j * self._size]) for i, j in itertools.pairwise(cuts)]
        try:
            for place, part in runs if self._on_disk and len(runs) > 1 else ():
                os.posix_fadvise(self._file, place, len(part), os.POSIX_FADV_WILLNEED)
            for place, part in runs:
                self._fill(part, place)
        except OSError as error:
            raise unreadable(self._name, error) from None
        return found

    def _fill(self, part: memoryview, place: int) -> None:
        while part:
            read = os.preadv(self._file, [part], place)
            if not read:
                raise DataError(error_texts.SHORTER(self._name), self._name)
            part, place = part[read:], place + read


class PictureRows:
    """Pictures in files, decoded as they are needed; ``decode`` returns one as an array of ``shape``."""

    def __init__(self, names: Sequence[str], decode: Callable[[str], Array]) -> None:
        self._names, self._decode = names, decode
        first = decode(names[0])
        self.shape, self.dtype = first.shape, first.dtype

    def __len__(self) -> int:
        return len(self._names)

    def read(self, indices: Indices) -> Array:
        found = np.empty((len(indices), *self.shape), self.dtype)
        for place, index in enumerate(indices):
            image = self._decode(self._names[index])
            if (image.shape, image.dtype) != (self.shape, self.dtype):
                name = self._names[index]
                this, others = _picture(image.shape, image.dtype), _picture(self.shape, self.dtype)
                raise DataError(error_texts.OTHER_PICTURE(name, this, others), name)
            found[place] = image
        return found


def in_memory(rows: Rows) -> Rows:
    """Return the rows, read into memory if they are few and small."""
    if len(rows) * math.prod(rows.shape) * rows.dtype.itemsize > IN_MEMORY:
        return rows
    return ArrayRows(rows.read(np.arange(len(rows))))


def _picture(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    channels, height, width = shape
    colours = "grey" if channels == 1 else "RGB"
    return f"{width}x{height} {colours}{' of 16 bits' if dtype != np.uint8 else ''}"


def unreadable(name: str, error: OSError) -> DataError:
    """Return the error of a file that cannot be read."""
    return DataError(error_texts.UNREADABLE(name, error.strerror), name, transient=error.errno in TRANSIENT)


def content(root: Path, name: str) -> bytes:
    """Return the bytes of a file, at most its size when opened. Raises DataError if that is too large."""
    try:
        with (root / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGEST:
                raise DataError(error_texts.TOO_LARGE(name, _LARGEST), name)
            return file.read(size)
    except OSError as error:
        raise unreadable(name, error) from None


def npy(root: Path, name: str) -> Rows:
    """Open a ``.npy`` file. Raises DataError."""
    try:
        with (root / name).open("rb") as file:
            version = np.lib.format.read_magic(file)
            shape, fortran, dtype = _NPY_HEADERS[version](file)
            start, size = file.tell(), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(name, error) from None
    except (ValueError, EOFError, KeyError):
        raise DataError(error_texts.NOT_WHOLE_NPY(name), name) from None
    whole = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or not shape or min(shape) < 0 or start + whole > size:
        raise DataError(error_texts.NOT_WHOLE_NPY(name), name)
    if not fortran:
        return in_memory(FileRows(root / name, name, start, shape, dtype))
    try:
        found = np.lib.format.read_array(io.BytesIO(content(root, name)), allow_pickle=False)
    except (ValueError, EOFError, MemoryError):
        raise DataError(error_texts.NOT_WHOLE_NPY(name), name) from None
    return ArrayRows(found)


def idx(root: Path, name: str) -> Rows:
    """Open an IDX file of bytes, also one packed as ``.gz``: 00 00 08, the number of dimensions, each as 32
    bits big endian, values. Raises DataError.
    """
    try:
        if name.endswith(".gz"):
            return ArrayRows(_idx(zlib.decompressobj(wbits=31).decompress(content(root, name), _LARGEST)))
        if (root / name).stat().st_size <= IN_MEMORY:
            return ArrayRows(_idx(content(root, name)))
        with (root / name).open("rb") as file:
            shape, start = _idx_header(file.read(4 + 4 * 255))
            if start + math.prod(shape) > os.fstat(file.fileno()).st_size:
                raise ValueError
        return FileRows(root / name, name, start, shape, np.dtype(np.uint8))
    except OSError as error:
        raise unreadable(name, error) from None
    except (struct.error, zlib.error, ValueError):
        raise DataError(error_texts.NOT_WHOLE_IDX(name), name) from None


def _idx(data: bytes) -> Array:
    shape, start = _idx_header(data)
    return np.frombuffer(data, np.uint8, math.prod(shape), start).reshape(shape)


def _idx_header(data: bytes) -> tuple[tuple[int, ...], int]:
    """Return the shape, and the place of the first value. Raises ValueError, struct.error."""
    zero, kind, dimensions = struct.unpack_from("!HBB", data)
    if (zero, kind) != (0, 8) or not dimensions:
        raise ValueError("not bytes")
    return struct.unpack_from(f"!{dimensions}I", data, 4), 4 + 4 * dimensions

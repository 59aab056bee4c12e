# SPDX-License-Identifier: Apache-2.0
"""Pure: the place of each tensor of a model's state in the flat vector: parameters first, then buffers.

Buffers are all that no optimizer changes: running statistics, counts, masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a model's state: its name, shape and dtype (``float32``, ``int64``, ...), and whether it
    is a ``buffer``, which a file does not tell. A constant that float32 cannot carry is ``raw``, such as
    ``raw float64``: each of its bytes is a value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: bool = field(default=False, compare=False)


FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")


RAW = {"float64": 8, "complex64": 8, "int64": 8, "uint64": 8, "int32": 4, "uint32": 4, "uint16": 2}
"""The bytes of an element of each type that constants may have which float32 cannot carry."""
_RAW = "raw "


def raw(dtype: str) -> str:
    """Return the dtype of an entry whose values are bytes."""
    return _RAW + dtype


def raw_type(dtype: str) -> str:
    """Return the type of the bytes of an entry that is raw, "" of others."""
    return dtype.removeprefix(_RAW) if dtype.startswith(_RAW) else ""


def values_of(tensor: Tensor) -> int:
    """Return the number of values of an entry."""
    return math.prod(tensor.shape) * RAW.get(raw_type(tensor.dtype), 1)


def size(tensors: tuple[Tensor, ...]) -> int:
    """Return the number of values in the flat vector of a state."""
    return sum(map(values_of, tensors))


def parameters_end(tensors: tuple[Tensor, ...]) -> int:
    """Return the number of values of parameters, which come before those of buffers."""
    return size(tuple(tensor for tensor in tensors if not tensor.buffer))


def spans(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, slice]]:
    """Yield each tensor with its part of the flat vector, in order."""
    start = 0
    for tensor in tensors:
        stop = start + values_of(tensor)
        yield tensor, slice(start, stop)
        start = stop


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match one of ``patterns`` of the shell, such as "head.*"."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def name_at(tensors: tuple[Tensor, ...], index: int) -> str:
    """Return the name of the tensor that holds value ``index`` of the flat vector. Raises IndexError."""
    for tensor, span in spans(tensors):
        if span.start <= index < span.stop:
            return tensor.name
    raise IndexError(index)

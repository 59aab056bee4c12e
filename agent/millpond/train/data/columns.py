# SPDX-License-Identifier: Apache-2.0
"""Pure (torch): samples, trees of tensors, as columns: a small head and raw bytes, without pickle.

A chunk of samples is cut in parts of samples with one structure. In a part each leaf of the tree is a column
of all samples' values, which lie one after the other in the payload; the head, msgpack, has the structure and
of each column kind, type, shape (or shapes), offset and size. Columns of received samples are views of the
payload, and a batch is a slice of them wherever no chunk ends within it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from millpond.base.errors import LocalError, ProtocolError
from millpond.train import error_texts

_ALIGNED = 64
_MOST_SAMPLES = 1 << 31
_ARRAY_TYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
_NUMBERS = {"int": np.dtype("<i8"), "float": np.dtype("<f8"), "bool": np.dtype("?")}
_SCALARS: dict[type, str] = {int: "int", float: "float", bool: "bool", bytes: "bytes", str: "str"}
_BRANCHES: dict[type, str] = {dict: "dict", tuple: "tuple", list: "list"}
_TYPES = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}


class _Mixed(Exception):
    """Values that are no one column."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An encoded chunk: its head, and the pieces of its payload, ``size`` bytes in all."""

    head: bytes
    pieces: tuple[memoryview, ...]
    size: int


@dataclass(slots=True)
class _Payload:
    """A payload that is put together, aligned."""

    pieces: list[memoryview] = field(default_factory=list)
    size: int = 0

    def add(self, data: memoryview) -> tuple[int, int]:
        """Append bytes. Returns their offset and size."""
        if gap := -self.size % _ALIGNED:
            self.pieces.append(memoryview(bytes(gap)))
            self.size += gap
        start = self.size
        self.pieces.append(data)
        self.size += data.nbytes
        return start, data.nbytes


def pack(samples: Sequence[Any]) -> Packed:
    """Encode samples. Raises LocalError for one that is no tree of tensors, arrays and plain values."""
    payload = _Payload()
    parts = [[len(part), node(payload)] for part, node in _parts(list(samples))]
    return Packed(msgpack.packb(parts), tuple(payload.pieces), payload.size)


def pack_batch(batch: Any, count: int) -> Packed:
    """Encode a tree of tensors that have ``count`` samples each, in the first dimension. Raises
    LocalError.
    """
    payload = _Payload()
    node = _batched(batch, count)(payload)
    return Packed(msgpack.packb([[count, node]]), tuple(payload.pieces), payload.size)


_Writer = Callable[[_Payload], list[Any]]
"""A column that is known to be one; it writes its bytes and returns its node of the head."""


def _parts(samples: list[Any]) -> Iterator[tuple[list[Any], _Writer]]:
    """Yield samples of one structure that follow each other."""
    if not samples:
        return
    try:
        yield samples, _column(samples)
    except _Mixed as error:
        if len(samples) == 1:
            raise LocalError(f"a sample cannot be streamed: {error}") from None
        yield from _parts(samples[: len(samples) // 2])
        yield from _parts(samples[len(samples) // 2 :])


def _column(values: list[Any]) -> _Writer:
    first = values[0]
    kinds = {type(value) for value in values}
    one_type = {getattr(value, "dtype", None) for value in values} == {getattr(first, "dtype", 0)}
    if isinstance(first, Tensor) and one_type and all(value.shape == first.shape for value in values):
        return _batched(torch.stack(values), len(values))
    if isinstance(first, Tensor) and one_type:
        return _arrays("tensor", str(first.dtype).removeprefix("torch."), [_raw(each) for each in values])
    if isinstance(first, np.ndarray | np.generic) and one_type and first.dtype.kind in "biufc":
        return _arrays("array", first.dtype.str, [np.asarray(each) for each in values])
    if len(kinds) == 1 and (kind := type(first)) in _BRANCHES:
        return _branch(_BRANCHES[kind], values)
    if len(kinds) == 1 and _SCALARS.get(type(first)) in _NUMBERS:
        return _numbers(_SCALARS[type(first)], values)
    if len(kinds) == 1 and isinstance(first, bytes | str):
        return _texts(_SCALARS[type(first)], values)
    if kinds <= {type(None), *_SCALARS} - {bytes}:
        return lambda _payload: ["plain", values]
    raise _Mixed(f"it holds a {type(first).__name__}")


def _branch(kind: str, values: list[Any]) -> _Writer:
    first = values[0]
    keys = list(first) if kind == "dict" else list(range(len(first)))
    same = all(list(each) == keys if kind == "dict" else len(each) == len(keys) for each in values)
    if not same or (kind == "dict" and not all(isinstance(key, str) for key in keys)):
        raise _Mixed("its structure is not that of the others" if len(values) > 1 else "its keys are no text")
    columns = [_column([each[key] for each in values]) for key in keys]
    return lambda payload: [kind, keys, [column(payload) for column in columns]]


def _numbers(kind: str, values: list[Any]) -> _Writer:
    try:
        found = np.array(values, _NUMBERS[kind])
    except OverflowError:
        raise _Mixed("it holds a number of more than 64 bits") from None
    return lambda payload: [kind, "", [], None, *payload.add(_bytes(found))]


def _texts(kind: str, values: list[Any]) -> _Writer:
    data = [value.encode() if isinstance(value, str) else value for value in values]
    sizes = [len(each) for each in data]
    return lambda payload: [kind, "", None, sizes, *payload.add(memoryview(b"".join(data)))]


def _arrays(kind: str, dtype: str, values: list[np.ndarray[Any, Any]]) -> _Writer:
    """Write arrays, of tensors as rows of bytes: the last dimension of their shape is left to the type."""
    shapes = [list(each.shape) for each in values]
    same = all(shape == shapes[0] for shape in shapes)

    def write(payload: _Payload) -> list[Any]:
        flat = np.concatenate([each.reshape(-1) for each in values]) if len(values) > 1 else values[0]
        place = payload.add(_bytes(flat))
        if kind == "tensor":  # of the wire's bytes
            return [kind, dtype, shapes[0][:-1] if same else None, _cut(shapes, same), *place]
        return [kind, dtype, shapes[0] if same else None, None if same else shapes, *place]

    return write


def _cut(shapes: list[list[int]], same: bool) -> list[list[int]] | None:
    return None if same else [shape[:-1] for shape in shapes]


def _raw(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor, [*shape, size of an element]."""
    own = tensor.detach().cpu().contiguous()
    found: np.ndarray[Any, Any] = own.reshape(-1).view(torch.uint8).numpy()
    return found.reshape(*own.shape, own.element_size())


def _batched(batch: Any, count: int) -> _Writer:
    if isinstance(batch, Tensor | np.ndarray):
        if not batch.ndim or len(batch) != count:
            raise LocalError(f"a batch of {count} samples holds a tensor of shape {tuple(batch.shape)}")
        if isinstance(batch, Tensor):
            kind, dtype, data = "tensor", str(batch.dtype).removeprefix("torch."), _bytes(_raw(batch))
        else:
            kind, dtype, data = "array", batch.dtype.str, _bytes(batch)
        return lambda payload: [kind, dtype, list(batch.shape[1:]), None, *payload.add(data)]
    if type(batch) in _BRANCHES and batch:
        kind = _BRANCHES[type(batch)]
        keys = list(batch) if kind == "dict" else list(range(len(batch)))
        columns = [_batched(batch[key], count) for key in keys]
        return lambda payload: [kind, keys, [column(payload) for column in columns]]
    raise LocalError(f"a batch cannot be streamed: it holds a {type(batch).__name__}")


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    if not array.size:
        return memoryview(b"")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class Columns:
    """Received samples of one structure: a column or a branch of columns."""

    def __init__(self, node: Any, count: int, payload: memoryview) -> None:
        self._count = count
        self.kind, self.keys, self.values = _read(node, count, payload)

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int | NDArray[np.int64]) -> Any:
        """Return one sample as it was sent; of tensors and arrays alone, also several as a batch."""
        if self.kind in ("dict", "tuple", "list"):
            found = [column.sample(index) for column in self.values]
            if self.kind == "dict":
                return dict(zip(self.keys, found, strict=True))
            return tuple(found) if self.kind == "tuple" else found
        value = rows(self.values, index)
        return value.item() if self.kind in _NUMBERS else value

    def batch(self, start: int, stop: int) -> Any:
        """Return some samples as ``default_collate`` does, as views where that is possible."""
        if self.kind in ("dict", "tuple", "list"):
            found = [column.batch(start, stop) for column in self.values]
            return dict(zip(self.keys, found, strict=True)) if self.kind == "dict" else found
        values = self.values[start:stop]
        if isinstance(values, np.ndarray):
            return torch.from_numpy(values)
        return values if isinstance(values, Tensor) else default_collate(values)


@dataclass(frozen=True, slots=True)
class ReceivedSamples:
    """Received samples: parts of one structure each."""

    parts: tuple[Columns, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[Any]:
        return (part.sample(index) for part in self.parts for index in range(len(part)))

    def sample(self, index: Any) -> Any:
        """Return one sample as it was sent, or several of one part, as ``Columns.sample``."""
        for part in self.parts[:-1]:
            if index < len(part):
                return part.sample(index)
            index -= len(part)
        return self.parts[-1].sample(index)

    def batches(self, start: int, stop: int) -> Iterator[Any]:
        """Yield a batch of the samples in a range for each part of them."""
        for part in self.parts:
            first, last = max(0, start), min(len(part), stop)
            if first < last:
                yield part.batch(first, last)
            start, stop = start - len(part), stop - len(part)


def kept_as_is(samples: Sequence[Any]) -> Columns:
    """Return samples of which no columns can be made, such as images of a library."""
    return Columns(["plain", samples], len(samples), memoryview(b""))


def rows(values: Any, wanted: int | NDArray[np.int64]) -> Any:
    """Return a row of a tensor, or some of them."""
    if isinstance(values, Tensor) and isinstance(wanted, np.ndarray):
        return values[torch.from_numpy(wanted)]
    return values[wanted]


def joined(batches: Sequence[Any]) -> Any:
    """Return one batch of several with one structure, whose tensors have the samples first. Raises LocalError
    for others.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, np.ndarray):
        return np.concatenate(batches)
    if isinstance(first, Mapping) and all(each.keys() == first.keys() for each in batches):
        return {key: joined([each[key] for each in batches]) for key in first}
    if isinstance(first, list) and first and isinstance(first[0], bytes | str):
        return [value for each in batches for value in each]
    if isinstance(first, list | tuple):
        parts = map(joined, zip(*batches, strict=True))
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise LocalError(error_texts.UNLIKE_BATCHES())


def unpack(head: bytes, payload: memoryview) -> ReceivedSamples:
    """Return the samples of a chunk; their columns are views of ``payload``. Raises ProtocolError."""
    try:
        parts = msgpack.unpackb(head)
        if any(type(count) is not int or not 0 <= count <= _MOST_SAMPLES for count, _ in parts):
            raise ValueError("a number of samples that cannot be")
        return ReceivedSamples(tuple(Columns(node, count, payload) for count, node in parts))
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RecursionError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise ProtocolError(f"a chunk's samples cannot be read: {error!s:.100}") from None


def _read(node: Any, count: int, payload: memoryview) -> tuple[str, list[Any], Any]:
    """Return the kind, keys and values of a node, each length checked."""
    if node[0] in ("dict", "tuple", "list"):
        kind, keys, children = node
        if len(keys) != len(children):
            raise ValueError("keys and columns differ in number")
        return kind, keys, [Columns(child, count, payload) for child in children]
    if node[0] == "plain":
        if len(node[1]) != count:
            raise ValueError("a column of another length")
        return "plain", [], list(node[1])
    kind, dtype, shape, shapes, start, size = node
    data = payload.cast("B")[start : start + size]
    if min(start, size) < 0 or len(data) != size:
        raise ValueError("a column beyond the payload")
    if kind in ("bytes", "str"):
        return kind, [], _texts_in(kind, data, shapes, count)
    view = _viewer(kind, dtype)
    _check_shapes(kind, count, shape, shapes)
    if shapes is None:
        return kind, [], view(data, [count, *shape])
    return kind, [], _ragged(view, data, shapes)


def _check_shapes(kind: str, count: int, shape: Any, shapes: Any) -> None:
    """Raise ValueError unless a column of this kind may have one ``shape``, or these, one for each sample."""
    if min([0, count, *(shape if shapes is None else ())]) < 0:
        raise ValueError("a negative size")
    if kind in _NUMBERS and (shape or shapes is not None):
        raise ValueError("a number that has a shape")
    if shapes is not None and (len(shapes) != count or any(each < 0 for shape in shapes for each in shape)):
        raise ValueError("a column of another length")


class _Texts(Sequence[Any]):
    """Bytes, or texts, that stay in ``data`` and are copied out of it when they are asked for."""

    def __init__(self, data: memoryview, sizes: list[int], is_text: bool) -> None:
        self._data, self._is_text = data, is_text
        self._ends = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        found = self._data[self._ends[index] : self._ends[index + 1]]
        return str(found, "utf-8") if self._is_text else bytes(found)


def _texts_in(kind: str, data: memoryview, sizes: list[int], count: int) -> _Texts:
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("a size that cannot be")
    if len(sizes) != count or sum(sizes) != len(data):
        raise ValueError("a column of another length")
    found = _Texts(data, sizes, kind == "str")
    for _text in found if kind == "str" else ():
        pass  # one that is no text is found here, not in the loop
    return found


_View = Callable[[memoryview, list[int]], Any]


def _viewer(kind: str, dtype: str) -> _View:
    """Return what makes tensors or arrays of bytes."""
    if kind == "tensor":
        return lambda data, shape: _tensor(data, _TYPES[dtype], shape)
    if kind not in _NUMBERS and not _ARRAY_TYPE.fullmatch(dtype):  # np.dtype would parse any text
        raise ValueError(f"no numbers: {dtype!s:.20}")
    found = _NUMBERS[kind] if kind in _NUMBERS else np.dtype(dtype)
    return lambda data, shape: np.frombuffer(data, found).reshape(shape)


def _tensor(data: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype) if 0 in shape else torch.empty(0).reshape(shape)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _ragged(view: _View, data: memoryview, shapes: list[list[int]]) -> list[Any]:
    whole = sum(math.prod(shape) for shape in shapes)
    size = len(data) // whole if whole else 0
    if size * whole != len(data):
        raise ValueError("a column of another size")
    ends = np.cumsum([0, *(math.prod(shape) * size for shape in shapes)]).tolist()
    return [view(data[start:stop], shape) for start, stop, shape in zip(ends, ends[1:], shapes, strict=False)]

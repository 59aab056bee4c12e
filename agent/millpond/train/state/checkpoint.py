# SPDX-License-Identifier: Apache-2.0
"""Edge: a model's state as a safetensors file, in the model's own dtypes, whole or not there at all.

The file is written here and not by the safetensors package, which forgets the order of tensors and has no
stable order of metadata. So the same state gives the same bytes, and the header lists tensors in the model's
order. Any safetensors library reads it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from millpond.base.errors import LocalError
from millpond.linux.files import sync_folder
from millpond.train.state import layout
from millpond.train.state.layout import Tensor

Vector = NDArray[np.float32]

_CODES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "uint8": "U8",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
}  # fmt: skip
_RAW_CODES = {
    "float64": "F64", "complex64": "C64", "int64": "I64", "int32": "I32",
    "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
_CODES |= {layout.raw(dtype): code for dtype, code in _RAW_CODES.items()}
_DTYPES = {code: dtype for dtype, code in reversed(_CODES.items())}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after ``round`` of ``job``: ``vector`` float32 [size], laid out as ``tensors``. ``about`` has
    further metadata.
    """

    vector: Vector
    tensors: tuple[Tensor, ...]
    job: str
    round: int
    about: dict[str, str] = field(default_factory=dict)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file, replacing an old one in one step. Raises LocalError; then the old one is as it was."""
    if len(checkpoint.vector) != layout.size(checkpoint.tensors):
        raise LocalError(f"{path}: {len(checkpoint.vector)} values do not fit the model's tensors")
    temporary = path.with_name(f".{path.name}.part")  # one name, so that no kill leaves two behind
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(temporary, _content(checkpoint))
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise LocalError(f"{path}: the checkpoint cannot be saved: {error.strerror}") from None


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _content(checkpoint: Checkpoint) -> Iterator[bytes]:
    """Yield header length, JSON header, tensors; wide ones first, so that all are aligned to their width."""
    places = sorted(layout.spans(checkpoint.tensors), key=lambda place: -_element(place[0].dtype))
    offsets: dict[str, list[int]] = {}
    end = 0
    for tensor, span in places:
        start, end = end, end + (span.stop - span.start) * _width(tensor.dtype)
        offsets[tensor.name] = [start, end]
    about = {"job": checkpoint.job, "round": str(checkpoint.round), **checkpoint.about}
    header: dict[str, Any] = {"__metadata__": about}
    for tensor in checkpoint.tensors:
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": offsets[tensor.name],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor, span in places:
        yield _packed(checkpoint.vector[span], tensor.dtype)


def load(path: Path) -> Checkpoint:
    """Read a file that ``save`` wrote. Raises LocalError."""
    try:
        content = path.read_bytes()
        found = {name: entry["data"] for name, entry in safetensors.deserialize(content)}  # type: ignore[no-untyped-call]
        header = json.loads(content[8 : 8 + struct.unpack_from("<Q", content)[0]])
        about = header.pop("__metadata__")
        tensors = tuple(
            Tensor(name, tuple(entry["shape"]), _DTYPES[entry["dtype"]]) for name, entry in header.items()
        )
        job, round_ = about.pop("job"), int(about.pop("round"))
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}") from None
    except (safetensors.SafetensorError, KeyError, ValueError):
        raise LocalError(f"{path} is not a checkpoint of millpond, or is damaged") from None
    vector = np.empty(layout.size(tensors), np.float32)
    for tensor, span in layout.spans(tensors):
        vector[span] = _unpacked(found[tensor.name], tensor)
    return Checkpoint(vector, tensors, job, round_, about)


def _element(dtype: str) -> int:
    """Return the bytes of an element of a tensor."""
    return layout.RAW.get(layout.raw_type(dtype), 0) or _width(dtype)


def _width(dtype: str) -> int:
    """Return the bytes of a value in a file."""
    if layout.raw_type(dtype):
        return 1
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _packed(values: Vector, dtype: str) -> bytes:
    if layout.raw_type(dtype):
        return values.astype(np.uint8).tobytes()
    if dtype == "bfloat16":  # numpy has none: the upper half of float32, rounded to even
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.astype("<u2").tobytes()
    if dtype in layout.INTEGERS:
        values = np.rint(values)
    return values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()


def _unpacked(data: bytes, tensor: Tensor) -> NDArray[Any]:
    if layout.raw_type(tensor.dtype):
        return np.frombuffer(data, np.uint8)
    count = math.prod(tensor.shape)
    if tensor.dtype == "bfloat16":
        upper = np.frombuffer(data, "<u2", count).astype(np.uint32)
        return (upper << 16).view(np.float32)
    return np.frombuffer(data, np.dtype(tensor.dtype).newbyteorder("<"), count)

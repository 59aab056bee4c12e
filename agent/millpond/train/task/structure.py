# SPDX-License-Identifier: Apache-2.0
"""Pure: the structure of a batch: the places, types, shapes and bytes of its parts, without any value."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from millpond.train.protocol import BatchPart

GUESSED_IMAGES: Final = "millpond.train.task.guessed_images:GuessedImages"
"""The task of a job that only looks at labelled images, and has no code of its own."""


def parts_of(batch: Any) -> tuple[BatchPart, ...]:
    """Return the parts of a batch, any tree of tensors."""
    return tuple(_parts(batch, ""))


def size_of(tree: Any) -> int:
    """Return the bytes that samples take in memory; of objects other than tensors, arrays and plain values
    those that Python tells of.
    """
    if isinstance(size := getattr(tree, "nbytes", None), int):
        return size
    if isinstance(tree, Mapping):
        return sum(map(size_of, tree.values()))
    if isinstance(tree, list | tuple):
        return sum(map(size_of, tree))
    return sys.getsizeof(tree)


def _parts(batch: Any, place: str) -> Iterator[BatchPart]:
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        yield BatchPart(
            place or "batch", str(batch.dtype).removeprefix("torch."), tuple(map(int, batch.shape[1:]))
        )
    elif isinstance(batch, Mapping):
        for key, each in batch.items():
            yield from _parts(each, f"{place}.{key}".lstrip("."))
    elif isinstance(batch, (list, tuple)) and not all(isinstance(each, (str, bytes)) for each in batch):
        for number, each in enumerate(batch):
            yield from _parts(each, f"{place}[{number}]")
    else:
        kind = type(batch[0]).__name__ if isinstance(batch, (list, tuple)) and batch else type(batch).__name__
        yield BatchPart(place or "batch", kind)

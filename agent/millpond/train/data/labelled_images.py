# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): labelled images as a torch map-style data set: bytes stay bytes until they are in a batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millpond.train import error_texts
from millpond.train.data import folders
from millpond.train.data.errors import DataError
from millpond.train.data.rows import Array, ArrayRows, Rows
from millpond.train.job.variation import Variation


class LabelledImages:
    """Images of parts with one shape, as stored: [N, H, W], [N, C, H, W] or [N, H, W, C], uint8 or floats,
    and int64 ``labels`` [N]. ``shape`` is [C, H, W]; ``name`` is that of their folder. Several threads may
    read.
    """

    thread_safe = True

    def __init__(
        self,
        parts: Sequence[Rows],
        labels: NDArray[np.int64],
        names: Sequence[str],
        name: str = "",
        variation: Variation | None = None,
    ) -> None:
        self._parts, self.labels, self._names, self.name = parts, labels, names, name
        self._ends = np.cumsum([len(part) for part in parts])
        self._variation, self._draws = variation or Variation(), ""
        whole, crop = _shape(parts[0].shape), self._variation.crop
        if crop > min(whole[1:]):
            raise DataError(error_texts.SMALL_IMAGES(name, described(whole), crop), name)
        self.shape = (whole[0], crop, crop) if crop else whole

    def varied(self, draws: str) -> LabelledImages:
        """Return the same images for training: what is at random in them follows from the text ``draws`` and
        the index.
        """
        if not (self._variation.crop or self._variation.flip):
            return self
        found = copy.copy(self)
        found._draws = draws
        return found

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([range(len(self))[index]])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch: images float32 [N, C, H, W], bytes scaled from 0..255 to 0..1, and labels int64
        [N]. Raises DataError.
        """
        wanted = np.asarray(indices, np.int64)
        labels = torch.from_numpy(self.labels[wanted])
        if len(self._parts) == 1:
            return torch.from_numpy(np.ascontiguousarray(self._read(0, wanted, wanted))), labels
        images: NDArray[np.float32] = np.empty((len(wanted), *self.shape), np.float32)
        which = np.searchsorted(self._ends, wanted, side="right")
        for number in np.unique(which).tolist():
            places = np.flatnonzero(which == number)
            start = self._ends[number] - len(self._parts[number])
            images[places] = self._read(number, wanted[places] - start, wanted[places])
        return torch.from_numpy(images), labels

    @property
    def is_uniform(self) -> bool:
        """Whether all images are stored in one shape and type, so that ``stored`` can be called."""
        return len({(part.shape, part.dtype) for part in self._parts}) == 1

    def stored(self, indices: Sequence[int] | NDArray[np.int64]) -> tuple[Array, NDArray[np.int64]]:
        """Return images as they are stored, of which ``scaled`` makes those of a batch, and labels. Raises
        DataError.
        """
        wanted = np.asarray(indices, np.int64)
        which = np.searchsorted(self._ends, wanted, side="right")
        images = np.empty((len(wanted), *self._parts[0].shape), self._parts[0].dtype)
        for number in np.unique(which).tolist():
            places = np.flatnonzero(which == number)
            start = self._ends[number] - len(self._parts[number])
            images[places] = self._parts[number].read(wanted[places] - start)
        return images, self.labels[wanted]

    def _read(self, number: int, indices: NDArray[np.int64], of_all: NDArray[np.int64]) -> Array:
        """Return images of a part, scaled and varied, [N, C, H, W]; ``of_all`` are their indices here."""
        found = scaled(self._parts[number].read(indices), self._names[number])
        crop, flips = self._variation.crop, self._variation.flip and bool(self._draws)
        if not (crop or flips):
            return found
        crop = crop or max(found.shape[2:])
        seed = int.from_bytes(sha256(self._draws.encode()).digest()[:16])
        images = [
            _part(image, crop, np.random.default_rng((seed, index)) if self._draws else None, flips)
            for image, index in zip(found, of_all.tolist(), strict=True)
        ]
        return np.stack(images)


def _part(image: Array, side: int, random: np.random.Generator | None, flips: bool) -> Array:
    """Return a part of an image [C, H, W]: at random, or its middle."""
    room = [max(0, size - side) for size in image.shape[1:]]
    top, left = (random.integers(0, free + 1) for free in room) if random else (free // 2 for free in room)
    part = image[:, top : top + side, left : left + side]
    return part[:, :, ::-1] if random and flips and random.integers(2) else part


def scaled(stored: Array, name: str) -> Array:
    """Return stored images [N, ...] as float32 [N, C, H, W], bytes scaled from 0..255 to 0..1. Raises
    DataError, with the ``name``, for values that are not finite.
    """
    found = stored[:, None] if stored.ndim == 3 else stored
    found = found.transpose(0, 3, 1, 2) if _is_channels_last(stored.shape[1:]) else found
    if stored.dtype == np.uint8:
        return found.astype(np.float32) / np.float32(255)
    with np.errstate(over="ignore"):  # a float64 too large becomes infinite, and is refused below
        found = found.astype(np.float32)
    if not np.isfinite(found).all():
        raise DataError(error_texts.NOT_FINITE(name), name)
    return found


def of_arrays(images: Array, labels: Array, name: str = "") -> LabelledImages:
    """Return a data set of arrays in memory. Raises DataError."""
    return _joined(name, [_checked(name, ArrayRows(images), labels)])


def load(
    root: Path, folder: str, format_: str, classes: Sequence[str] = (), variation: Variation | None = None
) -> LabelledImages:
    """Return the images of a folder (absolute or below ``root``), see ``folders``. Raises DataError."""
    varied = variation or Variation()
    found = folders.parts(root, folder, format_, classes, varied.resize)
    return _joined(folder, [_checked(*part) for part in found], varied)


def _joined(
    name: str, parts: list[tuple[str, Rows, NDArray[np.int64]]], variation: Variation | None = None
) -> LabelledImages:
    for other_name, part, _ in parts[1:]:
        first, other = _shape(parts[0][1].shape), _shape(part.shape)
        if first != other:
            text = error_texts.OTHER_SHAPES(other_name, described(other), parts[0][0], described(first))
            raise DataError(text, other_name, parts[0][0])
    names, images, labels = zip(*parts, strict=True)
    return LabelledImages(images, np.concatenate(labels), names, name, variation)


def _checked(name: str, images: Rows, labels: Array) -> tuple[str, Rows, NDArray[np.int64]]:
    shape = (len(images), *images.shape)
    if len(shape) not in (3, 4) or 0 in shape[1:] or images.dtype.kind not in "buif":
        raise DataError(error_texts.NOT_IMAGES(name, images.dtype, shape), name)
    if images.dtype.kind in "ui" and images.dtype != np.uint8:
        raise DataError(error_texts.OTHER_TYPE(name, images.dtype), name)
    if labels.dtype.kind not in "iu" or labels.size != len(images) or labels.ndim not in (1, 2):
        raise DataError(error_texts.OTHER_LABELS(name, len(images), labels.dtype, labels.shape), name)
    if labels.size == 0:
        raise DataError(error_texts.HOLDS_NO_SAMPLES(name), name)
    if labels.min() < 0:
        raise DataError(error_texts.NEGATIVE_LABEL(name), name)
    return name, images, labels.reshape(-1).astype(np.int64)


def _is_channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] in (1, 3, 4) and shape[0] not in (1, 3, 4)


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 2:
        return (1, *shape)
    return (shape[2], *shape[:2]) if _is_channels_last(shape) else shape


def described(shape: Sequence[int]) -> str:
    """Return a shape as text, such as 3x32x32."""
    return "x".join(map(str, shape))

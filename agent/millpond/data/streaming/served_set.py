# SPDX-License-Identifier: Apache-2.0
"""Edge (files, torch): a folder of samples as a data service reads it, and what its consumers decode.

Images are sent as they are stored, and scaled at the worker, unless the worker wants them decoded at the
server: bytes need a quarter of the link that floats do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.base.errors import LocalError, MillpondError, RemoteError
from millpond.data.streaming.protocol.messages import At
from millpond.train.balance.curve import Ints
from millpond.train.data import labelled_images
from millpond.train.data.columns import Packed, pack, pack_batch
from millpond.train.data.errors import DataError
from millpond.train.data.labelled_images import LabelledImages
from millpond.train.data.parquet import ParquetRows
from millpond.train.data.tar import TarSamples
from millpond.train.task.guessed_images import format_of

Decode = Callable[[Any], Any]
"""Changes a batch."""
Read = Callable[[Ints], Packed]
"""Encodes samples, by their indices."""
IMAGES = "images"


@dataclass(frozen=True, slots=True)
class ReadSamples:
    """Samples as they were read: a list, or the batch of ``count`` samples that is yet to be decoded by
    ``decode``. Stored images need a quarter of the bytes of scaled ones.
    """

    found: Any
    count: int
    decode: str = ""

    def decoded(self) -> Sequence[Any]:
        """Return each sample as its functions get it."""
        return list(zip(*decoder(self.decode)(self.found), strict=True)) if self.decode else self.found

    def packed(self, start: int, stop: int) -> Packed:
        """Encode a part, as it is. Raises LocalError."""
        if not self.decode:
            return pack(self.found[start:stop])
        part = tuple(column[start:stop] for column in self.found)
        return pack_batch(part, len(part[0]))


Transform = Callable[[ReadSamples], Packed]
"""Changes samples, and encodes them. Raises LocalError."""


class TransformerLost(LocalError):
    """The process that applies transforms has died, hangs, or sent an invalid answer: no sample is at fault,
    as far as is known.
    """


@dataclass(frozen=True, slots=True)
class ServedSet:
    """A data set: the samples of each shard, what ``read`` encodes of some, and what is left to decode."""

    shards: tuple[int, ...]
    sample_bytes: int
    decode: str
    read: Read


def folder_of(root: Path, name: str) -> tuple[str, Path]:
    """Return the one name of a folder below ``root``, however it is named, and the folder. Raises
    LocalError.
    """
    root = root.resolve()
    try:
        found = (root / name).resolve()
        if found.is_relative_to(root) and found.is_dir():
            return found.relative_to(root).as_posix(), found
    except (OSError, ValueError, RuntimeError):  # too long, with a zero byte, a ring of links
        pass
    raise LocalError(f"the data service has no folder '{name}'")


def check_links(root: Path, folder: Path) -> None:
    """Raise LocalError if a symbolic link below ``folder`` leads out of ``root``."""
    root, left, known = root.resolve(), [folder.resolve()], set[Path]()
    while left:
        known.add(here := left.pop())
        with os.scandir(here) as entries:
            for entry in entries:
                found = Path(entry).resolve() if entry.is_symlink() else None
                if found and not found.is_relative_to(root):
                    raise LocalError(f"the data service does not follow the link '{entry.name}' to elsewhere")
                if entry.is_dir() and (inner := found or Path(entry)) not in known:
                    left.append(inner)


def open_set(
    folder: Path,
    at: At,
    transform: Transform | None = None,
    format_: str = "",
    classes: Sequence[str] = (),
) -> ServedSet:
    """Open a folder of tar or Parquet shards, or of labelled images; of images in ``format_``, if there is
    one, with the labels of ``classes``. ``transform`` changes each sample, here. Raises LocalError,
    DataError.
    """
    found: Any
    if not format_ and next(folder.glob("*.tar"), None):
        found = TarSamples(folder)
        shards = found.shards
    elif not format_ and next(folder.glob("*.parquet"), None):
        found = ParquetRows(folder)
        shards = found.groups
    else:
        found = labelled_images.load(folder.parent, folder.name, format_ or format_of(folder), classes)
        if transform is None:
            return _images(found, at)
        shards = (len(found),)
    return _samples(found, shards, transform)


def _samples(found: Any, shards: tuple[int, ...], transform: Transform | None) -> ServedSet:
    def read(indices: Ints) -> Packed:
        if isinstance(found, LabelledImages) and found.is_uniform:
            pixels, labels = found.stored(indices)
            batch = torch.from_numpy(pixels), torch.from_numpy(labels)
            samples = ReadSamples(batch, len(indices), IMAGES)
        elif isinstance(found, LabelledImages):
            samples = ReadSamples(list(zip(*found.__getitems__(indices.tolist()), strict=True)), len(indices))
        else:
            samples = ReadSamples(found.__getitems__(indices), len(indices))
        return transform(samples) if transform else samples.packed(0, samples.count)

    return _served(shards, "", read)


def _images(images: LabelledImages, at: At) -> ServedSet:
    raw = at == "worker" and images.is_uniform

    def read(indices: Ints) -> Packed:
        if not raw:
            return pack_batch(images.__getitems__(indices.tolist()), len(indices))
        pixels, labels = images.stored(indices)
        return pack_batch((torch.from_numpy(pixels), torch.from_numpy(labels)), len(indices))

    return _served((len(images),), IMAGES if raw else "", read)


def _served(shards: tuple[int, ...], decode: str, read: Read) -> ServedSet:
    """Return a set; the bytes of a sample are those of the first. Raises LocalError for one without."""
    if not sum(shards):
        raise LocalError("the data set has no samples")
    named = naming(read)
    return ServedSet(shards, max(1, named(np.zeros(1, np.int64)).size), decode, named)


def naming(read: Read) -> Read:
    """Return ``read`` with errors, of whatever library, that name the file or the sample: LocalError."""

    def run(indices: Ints) -> Packed:
        try:
            return read(indices)
        except (DataError, TransformerLost):  # the first names the file
            raise
        except Exception as error:
            if len(indices) == 1:
                raise LocalError(f"sample {indices[0]}: {in_words(error)}") from error
            for index in indices:
                run(np.array([index]))
            raise LocalError(f"samples {indices.min()} to {indices.max()}: {in_words(error)}") from error

    return run


def in_words(error: BaseException) -> str:
    """Return the text of an error; of one that is not millpond's with its type."""
    return str(error) if isinstance(error, MillpondError) else f"{type(error).__name__}: {error!s:.200}"


def decoder(name: str) -> Decode:
    """Return what decodes a batch at the worker. Raises RemoteError for a name that is unknown here."""
    if not name:
        return lambda batch: batch
    if name != IMAGES:
        raise RemoteError(f"the data set has to be decoded by '{name}', which this version does not know")
    return _scale


def _scale(batch: Sequence[Any]) -> Any:
    images, labels = batch
    scaled = labelled_images.scaled(images.numpy(), "the data set")
    return [torch.from_numpy(np.ascontiguousarray(scaled)), labels]

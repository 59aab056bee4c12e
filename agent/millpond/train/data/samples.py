# SPDX-License-Identifier: Apache-2.0
"""Edge: labelled images from folders, in the formats that people keep them in.

| format | files of a folder                                                             |
|--------|-------------------------------------------------------------------------------|
| npy    | ``images.npy`` and ``labels.npy``, or shards ``images-*.npy``, ``labels-*.npy`` |
| idx    | MNIST's ``*-images*-idx3-ubyte`` and ``*-labels*-idx1-ubyte``, also ``.gz``     |
| images | one sub-folder of PNG or JPEG per class                                       |

Files are read whole and never mapped: a volume may serve direct I/O only. Bytes behind an array are ignored.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.train.data.errors import TRANSIENT, DataError

Array = NDArray[Any]
Pair = tuple[Array, Array]


_LARGEST = 16 << 30


@dataclass(frozen=True, slots=True)
class Samples:
    """``images`` float32 [N, C, H, W], integers scaled from 0..255 to 0..1; ``labels`` int64 [N]."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def load(root: Path, folders: Sequence[str], format_: str, classes: Sequence[str] = ()) -> Samples:
    """Return all samples of ``folders`` (absolute or below ``root``), in order. Raises DataError.

    ``classes`` names the sub-folders of format ``images`` by label; without, it is their sorted names.
    """
    parts: list[tuple[str, Samples]] = []
    classes = classes or _classes(root, folders, format_)
    for folder in folders:
        parts += [(name, _samples(*pair, name)) for name, pair in _read(root, folder, format_, classes)]
    if not parts:
        return Samples(np.zeros((0, 1, 1, 1), np.float32), np.zeros(0, np.int64))
    return _joined(parts)


def load_each(root: Path, folders: Sequence[str], format_: str, classes: Sequence[str] = ()) -> list[Samples]:
    """Return the samples of each folder, with the labels, and of the one shape, that ``load`` gives to all
    together. Raises DataError.
    """
    classes = classes or _classes(root, folders, format_)
    found = [load(root, (folder,), format_, classes) for folder in folders]
    _check_shapes(list(zip(folders, found, strict=True)), of_the_job=True)
    return found


def _classes(root: Path, folders: Sequence[str], format_: str) -> Sequence[str]:
    if format_ != "images":
        return ()
    return sorted({name for folder in folders for name in _sub_folders(root, folder)})


def _read(root: Path, folder: str, format_: str, classes: Sequence[str]) -> Iterator[tuple[str, Pair]]:
    if not (root / folder).is_dir():
        raise DataError(f"missing data: there is no folder {folder}")
    if format_ == "npy":
        return _read_npy(root, folder)
    if format_ == "idx":
        return _read_idx(root, folder)
    return _read_images(root, folder, classes)


def _joined(parts: list[tuple[str, Samples]]) -> Samples:
    _check_shapes(parts, of_the_job=False)
    if len(parts) == 1:
        return parts[0][1]
    return Samples(
        np.concatenate([part.images for _, part in parts]), np.concatenate([part.labels for _, part in parts])
    )


def _check_shapes(parts: list[tuple[str, Samples]], *, of_the_job: bool) -> None:
    """Raise DataError unless all are of one shape. Names that are ``of_the_job`` may leave a device."""
    for name, part in parts[1:]:
        first_name, first = parts[0]
        if part.images.shape[1:] != first.images.shape[1:]:
            raise DataError(
                f"{name} holds samples of {_shape(part.images)}, {first_name} of {_shape(first.images)}",
                *(() if of_the_job else (name, first_name)),
            )


def _shape(images: Array) -> str:
    return "x".join(map(str, images.shape[1:]))


def _samples(images: Array, labels: Array, name: str) -> Samples:
    """Make samples of arrays as stored: [N, H, W], [N, C, H, W] or [N, H, W, C]; [N] or [N, 1]."""
    if images.ndim not in (3, 4) or 0 in images.shape[1:] or images.dtype.kind not in "biuf":
        raise DataError(f"{name} holds {images.dtype} of shape {images.shape}, not images", name)
    if labels.dtype.kind not in "iu" or labels.size != len(images) or labels.ndim not in (1, 2):
        raise DataError(
            f"{name}: {len(images)} images have labels of {labels.dtype} in shape {labels.shape}, "
            f"not one whole number each",
            name,
        )
    if labels.size == 0:
        raise DataError(f"missing data: {name} holds no samples", name)
    if labels.min() < 0:
        raise DataError(f"{name}: a label is negative", name)
    return Samples(_scaled(_channels_first(images), name), labels.reshape(-1).astype(np.int64))


def _channels_first(images: Array) -> Array:
    if images.ndim == 3:
        return images[:, None]
    if images.shape[3] in (1, 3, 4) and images.shape[1] not in (1, 3, 4):
        return images.transpose(0, 3, 1, 2)
    return images


def _scaled(images: Array, name: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a float64 too large becomes infinite, and is refused below
        scaled = np.array(images, np.float32, order="C")
    if images.dtype.kind in "iu":
        scaled /= 255
    if not np.isfinite(scaled).all():
        raise DataError(f"{name} holds values that are not finite", name)
    return scaled


def _content(root: Path, name: str) -> bytes:
    """Read a file, at most its size when opened. Raises DataError if that is over ``_LARGEST``."""
    try:
        with (root / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGEST:
                raise DataError(f"{name} is larger than {_LARGEST} bytes", name)
            return file.read(size)
    except OSError as error:
        raise DataError(f"{name}: {error.strerror}", name, transient=error.errno in TRANSIENT) from None


def _partner(root: Path, folder: str, name: str) -> str:
    if not (root / folder / name).is_file():
        raise DataError(f"missing data: {folder} has no {name}", name)
    return f"{folder}/{name}"


def _read_npy(root: Path, folder: str) -> Iterator[tuple[str, Pair]]:
    names = [path.name for path in (root / folder).glob("images*.npy")]
    shards = sorted(name for name in names if name == "images.npy" or name.startswith("images-"))
    if not shards:
        raise DataError(f"missing data: {folder} has no images.npy")
    for shard in shards:
        labels = _partner(root, folder, "labels" + shard.removeprefix("images"))
        name = f"{folder}/{shard}"
        yield name, (_npy(root, name), _npy(root, labels))


def _npy(root: Path, name: str) -> Array:
    content = _content(root, name)
    try:
        array: Array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, MemoryError):
        raise DataError(f"{name} is not a whole .npy file of numbers", name) from None
    return array


def _read_idx(root: Path, folder: str) -> Iterator[tuple[str, Pair]]:
    names = {path.name for path in (root / folder).glob("*images*idx3-ubyte*")}
    names = {name for name in names if name.endswith("ubyte") or _is_only_copy(name, names)}
    if not names:
        raise DataError(f"missing data: {folder} has no *-images-idx3-ubyte")
    for name in sorted(names):
        plain = name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
        packed = (root / folder / f"{plain}.gz").is_file() and not (root / folder / plain).is_file()
        labels = _partner(root, folder, f"{plain}.gz" if packed else plain)
        yield f"{folder}/{name}", (_idx(root, f"{folder}/{name}"), _idx(root, labels))


def _is_only_copy(name: str, names: set[str]) -> bool:
    return name.endswith("ubyte.gz") and name.removesuffix(".gz") not in names


def _idx(root: Path, name: str) -> Array:
    """Read an IDX file of bytes: 00 00 08, number of dimensions, each as 32 bits big endian, values."""
    content = _content(root, name)
    try:
        if name.endswith(".gz"):
            content = zlib.decompressobj(wbits=31).decompress(content, _LARGEST)
        zero, kind, dimensions = struct.unpack_from("!HBB", content)
        shape = struct.unpack_from(f"!{dimensions}I", content, 4)
        if (zero, kind) != (0, 8):
            raise ValueError
        values = np.frombuffer(content, np.uint8, math.prod(shape), 4 + 4 * dimensions)
        return values.reshape(shape)
    except (struct.error, zlib.error, ValueError):
        raise DataError(f"{name} is not a whole IDX file of bytes", name) from None


def _sub_folders(root: Path, folder: str) -> list[str]:
    if not (root / folder).is_dir():
        raise DataError(f"missing data: there is no folder {folder}")
    return sorted(p.name for p in (root / folder).iterdir() if p.is_dir() and not p.name.startswith("."))


def _read_images(root: Path, folder: str, classes: Sequence[str]) -> Iterator[tuple[str, Pair]]:
    found = _sub_folders(root, folder)
    if not found:
        raise DataError(f"missing data: {folder} has no sub-folder per class")
    if unknown := set(found) - set(classes):
        raise DataError(
            f"{folder}/{min(unknown)} is not one of the job's classes", f"{folder}/{min(unknown)}"
        )
    images: list[Array] = []
    labels: list[int] = []
    for sub in found:
        for file in sorted(p.name for p in (root / folder / sub).iterdir() if _is_image(p)):
            image = _image(root, name := f"{folder}/{sub}/{file}")
            if images and image.shape != images[0].shape:
                raise DataError(
                    f"{name} is {_describe(image)}; the images before it are {_describe(images[0])}", name
                )
            images.append(image)
            labels.append(classes.index(sub))
    if not images:
        raise DataError(f"missing data: {folder} has no PNG or JPEG images")
    yield folder, (np.stack(images), np.array(labels))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in (".png", ".jpg", ".jpeg") and not path.name.startswith(".")


def _describe(image: Array) -> str:
    channels, height, width = image.shape
    return f"{width}x{height} {'grey' if channels == 1 else 'RGB'}"


def _image(root: Path, name: str) -> Array:
    """Read one picture as uint8 [C, H, W], C 1 for grey and 3 for all others. Raises DataError."""
    from PIL import Image  # a worker that reads arrays does without pillow

    content = _content(root, name)
    try:
        with Image.open(io.BytesIO(content)) as picture:
            grey = picture.mode in ("1", "L")
            pixels = np.asarray(picture.convert("L" if grey else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise DataError(f"{name} is not a picture that can be read", name) from None
    return pixels[None] if grey else pixels.transpose(2, 0, 1)

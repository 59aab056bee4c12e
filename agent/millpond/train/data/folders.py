# SPDX-License-Identifier: Apache-2.0
"""Edge: the files of labelled images in a folder, in the formats that people keep them in.

| format | files of a folder                                                             |
|--------|-------------------------------------------------------------------------------|
| npy    | ``images.npy`` and ``labels.npy``, or shards ``images-*.npy``, ``labels-*.npy`` |
| idx    | MNIST's ``*-images*-idx3-ubyte`` and ``*-labels*-idx1-ubyte``, also ``.gz``     |
| images | one sub-folder of PNG or JPEG per class                                       |

Bytes behind an array are ignored.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from millpond.train import error_texts
from millpond.train.data import rows
from millpond.train.data.errors import TRANSIENT, DataError
from millpond.train.data.rows import Array, PictureRows, Rows
from millpond.train.job.file import class_names

Part = tuple[str, Rows, Array]
"""The name of a file or folder, its images and their labels."""


def parts(root: Path, folder: str, format_: str, classes: Sequence[str], resize: int = 0) -> Iterator[Part]:
    """Yield the images of a folder (absolute or below ``root``). ``classes`` names the sub-folders of format
    ``images`` by label, and ``resize`` is the side to which pictures are scaled. Raises DataError.
    """
    _listed(root, folder)
    if format_ == "npy":
        return _npy(root, folder)
    if format_ == "idx":
        return _idx(root, folder)
    return _images(root, folder, classes, resize)


def _listed(root: Path, folder: str, below: str = "") -> list[str]:
    """Return the names in a folder, or in a sub-folder of it. Raises DataError, which names the folder."""
    try:
        return [path.name for path in (root / folder / below).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(error_texts.NO_FOLDER(folder)) from None
    except OSError as error:
        text = error_texts.UNREADABLE(folder, error.strerror)
        raise DataError(text, transient=error.errno in TRANSIENT) from None


def _partner(root: Path, folder: str, name: str) -> str:
    if not (root / folder / name).is_file():
        raise DataError(error_texts.NO_SUCH_FILE(folder, name), name)
    return f"{folder}/{name}"


def _npy(root: Path, folder: str) -> Iterator[Part]:
    names = [path.name for path in (root / folder).glob("images*.npy")]
    shards = sorted(name for name in names if name == "images.npy" or name.startswith("images-"))
    if not shards:
        raise DataError(error_texts.NO_SUCH_FILE(folder, "images.npy"))
    for shard in shards:
        labels = _partner(root, folder, "labels" + shard.removeprefix("images"))
        name = f"{folder}/{shard}"
        found = rows.npy(root, labels)
        yield name, rows.npy(root, name), found.read(np.arange(len(found)))


def _idx(root: Path, folder: str) -> Iterator[Part]:
    names = {path.name for path in (root / folder).glob("*images*idx3-ubyte*")}
    names = {name for name in names if name.endswith("ubyte") or _is_only_copy(name, names)}
    if not names:
        raise DataError(error_texts.NO_SUCH_FILE(folder, "*-images-idx3-ubyte"))
    for name in sorted(names):
        plain = name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
        packed = (root / folder / f"{plain}.gz").is_file() and not (root / folder / plain).is_file()
        labels = rows.idx(root, _partner(root, folder, f"{plain}.gz" if packed else plain))
        yield f"{folder}/{name}", rows.idx(root, f"{folder}/{name}"), labels.read(np.arange(len(labels)))


def _is_only_copy(name: str, names: set[str]) -> bool:
    return name.endswith("ubyte.gz") and name.removesuffix(".gz") not in names


def _images(root: Path, folder: str, classes: Sequence[str], resize: int) -> Iterator[Part]:
    found = class_names(root / folder)
    if not found:
        raise DataError(error_texts.NO_SUCH_FILE(folder, "sub-folder per class"))
    classes = classes or found
    if unknown := set(found) - set(classes):
        name = f"{folder}/{min(unknown)}"
        raise DataError(error_texts.UNKNOWN_CLASS(folder, name), name)
    names: list[str] = []
    labels: list[int] = []
    for sub in found:
        own = sorted(name for name in _listed(root, folder, sub) if _is_image(name))
        names += [f"{folder}/{sub}/{name}" for name in own]
        labels += [classes.index(sub)] * len(own)
    if not names:
        raise DataError(error_texts.NO_SUCH_FILE(folder, "PNG or JPEG images"))
    pictures = PictureRows(names, lambda name: _picture(root, name, resize))
    yield folder, rows.in_memory(pictures), np.array(labels)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in (".png", ".jpg", ".jpeg") and not name.startswith(".")


def _picture(root: Path, name: str, resize: int = 0) -> Array:
    """Read one picture as uint8 [C, H, W], C 1 for grey and 3 for all others, and 3 for all that are scaled
    to sides of ``resize``; grey values of 16 bits as float32 from 0 to 1. Raises DataError.
    """
    from PIL import Image  # a worker that reads arrays does without pillow

    data = rows.content(root, name)
    try:
        with Image.open(io.BytesIO(data)) as picture:
            deep = picture.mode.startswith("I")  # which convert() would cut to 255
            if resize:
                eight = Image.fromarray((np.asarray(picture) // 257).astype(np.uint8)) if deep else picture
                scaled = eight.convert("RGB").resize((resize, resize), Image.Resampling.BILINEAR)
                return np.asarray(scaled).transpose(2, 0, 1)
            grey = deep or picture.mode in ("1", "L")
            pixels = np.asarray(picture if deep else picture.convert("L" if grey else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise DataError(error_texts.NO_PICTURE(name), name) from None
    if deep:
        pixels = pixels.astype(np.float32) / np.float32(65535)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)

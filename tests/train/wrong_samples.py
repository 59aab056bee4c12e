# SPDX-License-Identifier: Apache-2.0
"""Folders that hold no samples, and what is told of each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from millpond.train.data import labelled_images
from millpond.train.data.errors import DataError

FOLDER = "private/anna-smith"
IMAGES, LABELS = np.zeros((3, 8, 8), np.uint8), np.zeros(3, np.int64)


def npy(images: object = IMAGES, labels: object = LABELS, suffix: str = "") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        np.save(folder / f"images{suffix}.npy", np.asarray(images))
        np.save(folder / f"labels{suffix}.npy", np.asarray(labels))
        return "npy"

    return write


def both(*writes: Callable[[Path], str]) -> Callable[[Path], str]:
    return lambda folder: [write(folder) for write in writes][-1]


def raw(name: str, content: bytes, format_: str = "npy") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        return format_

    return write


def picture(name: str, width: int, mode: str = "L") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new(mode, (width, 8)).save(folder / name)
        return "images"

    return write


def without(name: str, format_: str) -> Callable[[Path], str]:
    def remove(folder: Path) -> str:
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()
        return format_

    return remove


def empty(name: str, format_: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / name).mkdir(exist_ok=True)
        return format_

    return make


def link_to_itself(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.symlink_to(folder)
    return "images"


WRONG: dict[str, Callable[[Path], str]] = {
    "missing data: there is no folder": without("", "npy"),
    "missing data: there is no folder F": without("", "images"),
    "F: Too many levels of symbolic links": link_to_itself,
    "missing data: F has no images.npy": empty("", "npy"),
    "missing data: F has no labels.npy": both(npy(), without("labels.npy", "npy")),
    "missing data: F has no labels-anna.npy": raw("images-anna.npy", b""),
    "missing data: F has no *-images-idx3-ubyte": empty("", "idx"),
    "missing data: F has no anna-labels-idx1-ubyte": raw("anna-images-idx3-ubyte", b"", "idx"),
    "missing data: F has no sub-folder per class": empty("", "images"),
    "missing data: F has no PNG or JPEG images": empty("a", "images"),
    "missing data: F/images.npy holds no samples": npy(IMAGES[:0], LABELS[:0]),
    "F/images-b.npy holds samples of 3x9x9, F/images-a.npy of 1x8x8": both(
        npy(suffix="-a"), npy(np.zeros((3, 3, 9, 9), np.uint8), suffix="-b")
    ),
    "F/images.npy holds float64 of shape (5,), not images": npy(np.zeros(5)),
    "F/images.npy holds float64 of shape (3, 1, 2, 3, 4)": npy(np.zeros((3, 1, 2, 3, 4), np.float64)),
    "F/images.npy holds <U1 of shape (3, 8, 8), not images": npy(np.full((3, 8, 8), "x")),
    "F/images-anna.npy holds >i2 of shape (3, 8)": npy(np.zeros((3, 8), ">i2"), suffix="-anna"),
    "F/images-anna.npy holds >i2: images are uint8": npy(np.zeros((3, 8, 8), ">i2"), suffix="-anna"),
    "F/images.npy: 3 images have labels of <U4": npy(labels=np.array(["anna", "ben", "carl"])),
    "F/images.npy: 3 images have labels of int64 in shape (2,)": npy(labels=LABELS[:2]),
    "F/labels.npy is not a whole .npy file of numbers": npy(labels=np.int8(3)),
    "F/images.npy: a label is negative": npy(labels=LABELS - 1),
    "F/images-anna.npy: a label is negative": npy(labels=LABELS - 1, suffix="-anna"),
    "F/images.npy holds values that are not finite": npy(np.full((3, 8, 8), np.inf)),
    "F/images.npy: Is a directory": both(npy(), without("images.npy", "npy"), empty("images.npy", "npy")),
    "F/images.npy is not a whole .npy file of numbers": both(npy(), raw("images.npy", b"half")),
    "F/labels.npy is not a whole .npy file": both(npy(), raw("labels.npy", b"half")),
    "F/a-labels-idx1-ubyte is not a whole IDX file of bytes": both(
        raw("a-images-idx3-ubyte", b"half"), raw("a-labels-idx1-ubyte", b"", "idx")
    ),
    "F: F/anna is not one of the job's classes": picture("anna/1.png", 8),
    "F/known/b.png is 9x8 RGB; the images before it are 8x8 grey": both(
        picture("known/a.png", 8), picture("known/b.png", 9, "RGB")
    ),
    "F/known/b.png is 8x8 grey of 16 bits": both(
        picture("known/a.png", 8), picture("known/b.png", 8, "I;16")
    ),
    "F/known/b.png is 8x8 grey;": both(picture("known/a.png", 8, "I;16"), picture("known/b.png", 8)),
    "F/known/anna.jpg is not a picture that can be read": raw("known/anna.jpg", b"no picture", "images"),
}
"""Folders by the beginning of what is told of them, where F is the folder."""


def data_error(root: Path, what: str) -> DataError:
    """Return the error of one of these folders below ``root``."""
    folder = root / FOLDER
    folder.mkdir(parents=True)
    format_ = WRONG[what](folder)
    classes = () if what.endswith("no folder F") else ("known", "a")
    with pytest.raises(DataError) as caught:
        found = labelled_images.load(root, FOLDER, format_, classes)
        found.__getitems__(range(len(found)))  # some are found when they are read
    return caught.value

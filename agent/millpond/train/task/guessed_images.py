# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): a task that reads labelled images in whatever format a folder has, to look at them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from millpond.train import error_texts
from millpond.train.data import labelled_images
from millpond.train.data.errors import DataError
from millpond.train.data.labelled_images import LabelledImages

_FORMATS = {
    "npy": ("images.npy", "images-*.npy"),
    "idx": ("*images*idx3-ubyte", "*images*idx3-ubyte.gz"),
    "images": ("*/",),
}


class GuessedImages:
    """Samples without a model worth training. Where classes have folders, each folder's own are taken."""

    def model(self) -> nn.Module:
        """Return a model, as each task has one."""
        return nn.Linear(1, 1)

    def dataset(self, folder: Path, _split: str) -> LabelledImages:
        """Return the images of a folder. Raises DataError."""
        return labelled_images.load(Path(), str(folder), format_of(folder))


def format_of(folder: Path) -> str:
    """Return the format of the images of a folder. Raises DataError for none."""
    for name, patterns in _FORMATS.items():
        if any(next(folder.glob(pattern), None) for pattern in patterns):
            return name
    raise DataError(error_texts.NO_IMAGES(folder))

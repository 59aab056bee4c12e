# SPDX-License-Identifier: Apache-2.0
"""Edge (files): folders of random images, and which of them the kernel has cached."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

SIDE = 64
IMAGE = SIDE**2
"""Bytes."""
_BLOCK = 4096  # images


@contextmanager
def folder(images: int) -> Iterator[Path]:
    """A folder with so many grey images of random bytes, in a file system that outlives the machine's memory;
    the same few MiB again and again, which neither the disk nor the kernel can know.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-bench-", dir="/var/tmp") as name:
        block = np.random.default_rng(0).integers(0, 256, (_BLOCK, 1, SIDE, SIDE), dtype=np.uint8)
        with (Path(name) / "images.npy").open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (images, *block.shape[1:])}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, images, _BLOCK):
                file.write(block[: images - start].data)
        np.save(Path(name) / "labels.npy", np.arange(images) % 10)
        yield Path(name)


def forget(folder: Path) -> None:
    """Have the kernel drop what it has cached of the images."""
    with (folder / "images.npy").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the digits of scikit-learn, divided among devices as private and public data."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
TEST = 360
PUBLIC = 270
ALPHA = 0.5  # of the Dirichlet distribution: the smaller, the less alike the devices' data
FEWEST = 100  # private samples of a device; of many devices a third of an equal share


@dataclass(frozen=True, slots=True)
class DigitSamples:
    """Images uint8 [N, 8, 8] and labels int64 [N]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def take(self, which: NDArray[np.int64]) -> DigitSamples:
        """Return the samples at some indices."""
        return DigitSamples(self.images[which], self.labels[which])


@dataclass(frozen=True, slots=True)
class Division:
    """A held-out test set, and for each device its private and its public samples."""

    test: DigitSamples
    private: tuple[DigitSamples, ...]
    public: tuple[DigitSamples, ...]


def load() -> DigitSamples:
    """Load all 1,797 images."""
    from sklearn.datasets import load_digits  # slow to import, and only the demo needs it

    digits = load_digits()
    return DigitSamples(np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64))


def divide(samples: DigitSamples, devices: int, seed: int) -> Division:
    """Divide samples: test set and public share at random; the rest by class in Dirichlet shares, so that
    devices differ.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(samples.labels))
    test, public, rest = np.split(order, [TEST, TEST + PUBLIC])
    fewest = min(FEWEST, len(rest) // devices // 3)
    while True:
        parts = _dirichlet(samples.labels, rest, devices, random)
        if min(len(part) for part in parts) >= fewest:
            break
    return Division(
        samples.take(test),
        tuple(samples.take(np.sort(part)) for part in parts),
        tuple(samples.take(part) for part in np.array_split(public, devices)),
    )


def _dirichlet(
    labels: NDArray[np.int64], which: NDArray[np.int64], devices: int, random: np.random.Generator
) -> list[NDArray[np.int64]]:
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(devices)]
    for digit in range(CLASSES):
        members = which[labels[which] == digit]
        shares = random.dirichlet([ALPHA] * devices)
        cuts = (np.cumsum(shares)[:-1] * len(members)).astype(int)
        for part, chosen in zip(parts, np.split(members, cuts), strict=True):
            part.append(chosen)
    return [np.concatenate(part) for part in parts]


def write(folder: Path, samples: DigitSamples, trailer: str = "") -> None:
    """Write ``images.npy`` and ``labels.npy``; ``trailer`` follows the arrays, which readers pass over."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, array in (("images", samples.images), ("labels", samples.labels)):
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        (folder / f"{name}.npy").write_bytes(buffer.getvalue() + trailer.encode())

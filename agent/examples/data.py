# SPDX-License-Identifier: Apache-2.0
"""Divides scikit-learn's digits: private and public ones for the devices of an emulated fleet, and test data
beside the examples. The fleet need not run.

    python agent/examples/data.py --fleet $MILLPOND_FLEET
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from millpond import Fleet
from millpond.base.errors import MillpondError

TEST, PUBLIC = 360, 270


def write(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write images uint8 [N, 8, 8] and their labels int64 [N]."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)


def main() -> None:
    """Write the folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, required=True, help="the directory of an emulated fleet")
    flashes = Fleet(parser.parse_args().fleet).flash_folders()
    digits = load_digits()
    images, labels = (digits.images * 15.9375).astype(np.uint8), digits.target.astype(np.int64)  # of 0 to 16
    order = np.random.default_rng(7).permutation(len(labels))
    test, public, private = np.split(order, [TEST, TEST + PUBLIC])
    own_parts, shared_parts = (np.array_split(samples, len(flashes)) for samples in (private, public))
    for flash, own, shared in zip(flashes, own_parts, shared_parts, strict=True):
        write(flash / "private" / "digits", images[own], labels[own])
        write(flash / "public" / "digits", images[shared], labels[shared])
    write(Path(__file__).parent / "test", images[test], labels[test])


if __name__ == "__main__":
    try:
        main()
    except MillpondError as error:
        sys.exit(f"data.py: {error}")

# SPDX-License-Identifier: Apache-2.0
"""Divides scikit-learn's digits for these examples: the devices of an emulated fleet get private and public
ones, a folder beside the examples those to test with. The fleet need not run.

    python agent/examples/data.py --fleet $MILLPOND_FLEET
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

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
    devices = sorted((parser.parse_args().fleet / "devices").iterdir())
    digits = load_digits()
    images, labels = (digits.images * 15.9375).astype(np.uint8), digits.target.astype(np.int64)  # of 0 to 16
    order = np.random.default_rng(7).permutation(len(labels))
    test, public, private = np.split(order, [TEST, TEST + PUBLIC])
    each_own, each_shared = (np.array_split(which, len(devices)) for which in (private, public))
    for device, own, shared in zip(devices, each_own, each_shared, strict=True):
        write(device / "flash" / "private" / "digits", images[own], labels[own])
        write(device / "flash" / "public" / "digits", images[shared], labels[shared])
    write(Path(__file__).parent / "test", images[test], labels[test])


if __name__ == "__main__":
    main()

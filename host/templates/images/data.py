"""Divides scikit-learn's digits: data/csd0, ... for the devices, test for the host."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def write(folder, images, labels):
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)


def main(here=Path(__file__).parent):
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order] * 15.9375).astype(np.uint8)  # of 0 to 16
    test, *devices = np.split(np.arange(len(order)), [360, 900, 1400])
    for number, own in enumerate(devices):
        write(here / "data" / f"csd{number}" / "digits", images[own], found.target[order][own])
    write(here / "test", images[test], found.target[order][test])


if __name__ == "__main__":
    main()

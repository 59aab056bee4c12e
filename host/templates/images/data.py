"""Divides scikit-learn's digits: data/csd0, ... for the devices, test for the host."""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from millpond import Fleet
from millpond.base.errors import MillpondError


def write(folder, images, labels):
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)


def private_folders(fleet, here):
    """Return the private folders of three devices: those of an emulated fleet, or stand-ins in data/."""
    if fleet is None:
        return [here / "data" / f"csd{number}" for number in range(3)]
    return [flash / "private" for flash in Fleet(fleet).flash_folders(3)[:3]]


def main(here=Path(__file__).parent, fleet=None):
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order] * 15.9375).astype(np.uint8)  # of 0 to 16
    test, *devices = np.split(np.arange(len(order)), [360, 900, 1400])
    for folder, own in zip(private_folders(fleet, here), devices):
        write(folder / "digits", images[own], found.target[order][own])
    write(here / "test", images[test], found.target[order][test])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, help="the directory of an emulated fleet; without it: data/")
    os.umask(0o022)  # the devices' users read the files
    try:
        main(fleet=parser.parse_args().fleet)
    except MillpondError as error:
        sys.exit(f"data.py: {error}")

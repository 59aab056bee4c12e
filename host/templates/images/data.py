"""Divides scikit-learn's digits: data/csd0, ... for the devices, test for the host."""

import argparse
import os
import sys
import tomllib
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def write(folder, images, labels):
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)


def places(fleet, here):
    """Return where the private data of three devices go: onto an emulated fleet, or into data/."""
    if fleet is None:
        return [here / "data" / f"csd{number}" for number in range(3)]
    listed = fleet / "fleet.toml"  # a device that was removed keeps its folder
    devices = tomllib.loads(listed.read_text()).get("device", []) if listed.is_file() else []
    flash = [fleet / "devices" / device["name"] / "flash" for device in devices]
    found = [folder / "private" for folder in flash if folder.is_dir()]
    if len(found) < 3:
        sys.exit(f"data.py: {fleet} has {len(found)} emulated devices; it needs three")
    return found[:3]


def main(here=Path(__file__).parent, fleet=None):
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order] * 15.9375).astype(np.uint8)  # of 0 to 16
    test, *devices = np.split(np.arange(len(order)), [360, 900, 1400])
    for place, own in zip(places(fleet, here), devices):
        write(place / "digits", images[own], found.target[order][own])
    write(here / "test", images[test], found.target[order][test])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, help="the directory of an emulated fleet; without it: data/")
    os.umask(0o022)  # the devices' users read the files
    main(fleet=parser.parse_args().fleet)

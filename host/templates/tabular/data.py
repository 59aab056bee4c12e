"""Divides scikit-learn's diabetes data: data/csd0, ... for the devices, test for the host."""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes

from millpond import Fleet
from millpond.base.errors import MillpondError


def write(folder, table):
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "patients.csv", table, delimiter=",", fmt="%.6f")


def private_folders(fleet, here):
    """Return the private folders of three devices: those of an emulated fleet, or stand-ins in data/."""
    if fleet is None:
        return [here / "data" / f"csd{number}" for number in range(3)]
    return [flash / "private" for flash in Fleet(fleet).flash_folders(3)[:3]]


def main(here=Path(__file__).parent, fleet=None):
    found = load_diabetes()
    table = np.column_stack([found.data, found.target])
    table = table[np.random.default_rng(0).permutation(len(table))]
    test, *devices = np.split(table, [110, 250, 350])
    for folder, own in zip(private_folders(fleet, here), devices):
        write(folder / "patients", own)
    write(here / "test", test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, help="the directory of an emulated fleet; without it: data/")
    os.umask(0o022)  # the devices' users read the files
    try:
        main(fleet=parser.parse_args().fleet)
    except MillpondError as error:
        sys.exit(f"data.py: {error}")

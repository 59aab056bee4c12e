"""Divides scikit-learn's diabetes data: data/csd0, ... for the devices, test for the host."""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes


def write(folder, table):
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "patients.csv", table, delimiter=",", fmt="%.6f")


def place(number, fleet, here):
    """Return where the private data of device csd0, csd1, ... go: onto an emulated fleet, or into data/."""
    if fleet is None:
        return here / "data" / f"csd{number}"
    private = fleet / "devices" / f"csd{number}" / "flash" / "private"
    if not private.parent.is_dir():
        sys.exit(f"data.py: {fleet} has no emulated device csd{number}; it needs three of them")
    return private


def main(here=Path(__file__).parent, fleet=None):
    found = load_diabetes()
    table = np.column_stack([found.data, found.target])
    table = table[np.random.default_rng(0).permutation(len(table))]
    test, *devices = np.split(table, [110, 250, 350])
    for number, own in enumerate(devices):
        write(place(number, fleet, here) / "patients", own)
    write(here / "test", test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, help="the directory of an emulated fleet; without it: data/")
    os.umask(0o022)  # the devices' users read the files
    main(fleet=parser.parse_args().fleet)

"""Divides scikit-learn's diabetes data: data/csd0, ... for the devices, test for the host."""

import argparse
import os
import sys
import tomllib
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes


def write(folder, table):
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "patients.csv", table, delimiter=",", fmt="%.6f")


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
    found = load_diabetes()
    table = np.column_stack([found.data, found.target])
    table = table[np.random.default_rng(0).permutation(len(table))]
    test, *devices = np.split(table, [110, 250, 350])
    for place, own in zip(places(fleet, here), devices):
        write(place / "patients", own)
    write(here / "test", test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, help="the directory of an emulated fleet; without it: data/")
    os.umask(0o022)  # the devices' users read the files
    main(fleet=parser.parse_args().fleet)

"""Divides scikit-learn's diabetes data: data/csd0, ... for the devices, test for the host."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes


def write(folder, table):
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "patients.csv", table, delimiter=",", fmt="%.6f")


def main(here=Path(__file__).parent):
    found = load_diabetes()
    table = np.column_stack([found.data, found.target])
    table = table[np.random.default_rng(0).permutation(len(table))]
    test, *devices = np.split(table, [110, 250, 350])
    for number, own in enumerate(devices):
        write(here / "data" / f"csd{number}" / "patients", own)
    write(here / "test", test)


if __name__ == "__main__":
    main()

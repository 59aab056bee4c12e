# SPDX-License-Identifier: Apache-2.0
"""Divides scikit-learn's digits for these examples: the devices of an emulated fleet get private and public
ones, a folder beside the examples those to test with. The fleet need not run.

    python agent/examples/data.py --fleet $MILLPOND_FLEET
"""

from __future__ import annotations

import argparse
from pathlib import Path

from millpond.host.emulation.demo import data


def main() -> None:
    """Write the folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, required=True, help="the directory of an emulated fleet")
    devices = sorted((parser.parse_args().fleet / "devices").iterdir())
    division = data.divide(data.load(), len(devices), seed=7)
    for device, private, public in zip(devices, division.private, division.public, strict=True):
        data.write(device / "flash" / "private" / "digits", private)
        data.write(device / "flash" / "public" / "digits", public)
    data.write(Path(__file__).parent / "test", division.test)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Entry: training on unequal devices, ``make bench-balance``: tables, ``balance.json`` and a picture."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.balance import against_simulation, convergence, csds, exchange, killed, quotas, simulated, squeezed
from bench.balance.experiment import Experiment, choose
from bench.balance.picture import draw
from bench.runner import run_all

EXPERIMENTS = (
    squeezed.EXPERIMENT,
    quotas.EXPERIMENT,
    csds.EXPERIMENT,
    simulated.EXPERIMENT,
    against_simulation.EXPERIMENT,
    exchange.EXPERIMENT,
    killed.EXPERIMENT,
    convergence.EXPERIMENT,
)


def main() -> int:
    """Exit codes: 0 done, 1 an experiment failed, 2 wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="make bench-balance", description="What unequal devices reach of what they could."
    )
    parser.add_argument("--quick", action="store_true", help="short and coarse: to see that it works")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME,...", help="do these experiments only"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(".bench"), help="folder for balance.json and balance.png"
    )
    arguments = parser.parse_args()
    try:
        chosen = choose(EXPERIMENTS, arguments.only)
    except ValueError as error:
        parser.error(str(error))
    arguments.output.mkdir(exist_ok=True)
    return bench(chosen, quick=arguments.quick, output=arguments.output)


def bench(chosen: Sequence[Experiment], *, quick: bool, output: Path) -> int:
    """Do them, print their tables, write what was found; return the exit code."""
    found, whole = run_all("balance", chosen, quick=quick, path=output / "balance.json")
    circumstances = f"{os.cpu_count()} cores; virtual workers sleep for their curves' time"
    draw(found.panels, circumstances, output / "balance.png")
    print(f"written: {output}/balance.png")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())

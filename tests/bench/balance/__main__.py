# SPDX-License-Identifier: Apache-2.0
"""Entry: training on unequal devices, ``make bench-balance``: tables, ``balance.json`` and a picture."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.balance import against_simulation, convergence, csds, exchange, killed, quotas, simulated, squeezed
from bench.balance.experiment import Experiment, Findings, Panel, Run, choose
from bench.balance.picture import draw
from bench.balance.table import table
from bench.rows import Row, write

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
    bench(chosen, quick=arguments.quick, output=arguments.output)
    return 0


def bench(chosen: Sequence[Experiment], *, quick: bool, output: Path) -> None:
    """Do them, print their tables, write what was found after each."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", flush=True)

    rows: list[Row] = []
    panels: list[Panel] = []
    for experiment in chosen:
        found: Findings = experiment.measure(Run(quick, say))
        rows += found.rows
        panels += found.panels
        print("", *table(experiment.title, found.rows), "", sep="\n", flush=True)
        write(rows, output / "balance.json")
    draw(
        panels,
        f"{os.cpu_count()} cores; virtual workers sleep for their curves' time",
        output / "balance.png",
    )
    say(f"written: {output}/balance.json, {output}/balance.png")


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Entry: the command line of a benchmark whose measurements are repeated: tables and one file of rows."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.balance import experiment
from bench.balance.experiment import Experiment, Findings, choose
from bench.runner import run_all
from bench.train.run import Run

Measured = Mapping[str, tuple[str, Callable[[Run], Findings]]]
"""Titles and measurements by name."""


def main(name: str, description: str, measured: Measured) -> int:
    """Run the benchmark ``name``. Exit codes: 0 done, 1 an experiment failed, 2 wrong arguments."""
    parser = _parser(name, description)
    arguments = parser.parse_args()
    repeats = arguments.repeats or (1 if arguments.quick else 5)
    experiments = [
        Experiment(key, title, functools.partial(_measure, measure, repeats))
        for key, (title, measure) in measured.items()
    ]
    try:
        chosen = choose(experiments, arguments.only)
    except ValueError as error:
        parser.error(str(error))
    arguments.output.mkdir(exist_ok=True)
    _, whole = run_all(name, chosen, quick=arguments.quick, path=arguments.output / f"{name}.json")
    return 0 if whole else 1


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"make bench-{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="short and coarse: to see that it works")
    parser.add_argument("--repeats", type=_positive, metavar="N", help="of each measurement: 5, 1 if quick")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME,...", help="do these experiments only"
    )
    parser.add_argument("--output", type=Path, default=Path(".bench"), help=f"folder for {name}.json")
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _measure(measure: Callable[[Run], Findings], repeats: int, run: experiment.Run) -> Findings:
    return measure(Run(repeats, run.quick, run.say))

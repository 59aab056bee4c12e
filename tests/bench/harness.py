# SPDX-License-Identifier: Apache-2.0
"""Entry: the command line of all benchmarks: runs experiments, each with a limit of time, prints their
tables, writes the file of their rows and a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from bench.experiment import Experiment, Findings, HeatMap, Panel, Run, Unmeasured, choose
from bench.picture import draw
from bench.rows import Row, summary, write
from bench.table import table

_QUICK_SECONDS, _SECONDS = 300, 3600
_CLEANUP_SECONDS = 60


class LimitReachedError(Exception):
    """An experiment has not ended in time."""


def main(name: str, description: str, experiments: Sequence[Experiment], note: str = "") -> int:
    """Run the benchmark ``name``. The ``note`` stands below its picture. Exit codes: 0 done, 1 an experiment
    failed, 2 wrong arguments.
    """
    parser = command_line(name, description)
    parser.add_argument("--repeats", type=positive, metavar="N", help="of each measurement: 5, 1 if quick")
    arguments = parser.parse_args()
    chosen = chosen_of(experiments, arguments.only, parser)
    path = folder_of(arguments) / f"{name}.json"
    found, whole = run_all(name, chosen, quick=arguments.quick, repeats=arguments.repeats, path=path)
    if found.panels:
        draw(found.panels, f"{os.cpu_count()} cores{note}", path.with_suffix(".png"))
        print(f"written: {path.with_suffix('.png')}")
    return 0 if whole else 1


def command_line(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of what all benchmarks are told: ``quick``, ``only`` and ``output``."""
    parser = argparse.ArgumentParser(prog=f"make bench-{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="short and coarse: to see that it works")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME,...", help="do these experiments only"
    )
    parser.add_argument("--output", type=Path, default=Path(".bench"), help=f"folder for {name}.json")
    return parser


def chosen_of(
    experiments: Sequence[Experiment], only: Sequence[str], parser: argparse.ArgumentParser
) -> list[Experiment]:
    """Return the named experiments, all without names; ends the process if there is no such one."""
    try:
        return choose(experiments, only)
    except ValueError as error:
        parser.error(str(error))


def folder_of(arguments: argparse.Namespace) -> Path:
    """Return the folder for results, which is made if it is not there."""
    arguments.output.mkdir(exist_ok=True)
    output: Path = arguments.output.absolute()
    return output


def progress() -> Callable[[str], None]:
    """Return what tells a person how far it is, with the seconds since now."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", flush=True)

    return say


def run_all(
    name: str,
    chosen: Sequence[Experiment],
    *,
    quick: bool,
    path: Path,
    repeats: int | None = None,
    failures: tuple[type[Exception], ...] = (),
) -> tuple[Findings, bool]:
    """Run the experiments of the benchmark ``name``, print their tables and write ``path`` after each.

    Returns what was found, and whether all of them have ended well: an experiment that reaches its limit of
    time, or raises one of ``failures``, is named on stderr, and the others go on.
    """
    run = Run(quick, progress(), repeats or (1 if quick else 5))
    rows, panels = list[Row](), list[Panel | HeatMap]()
    expected: tuple[type[Exception], ...] = (LimitReachedError, *failures)
    whole = True
    for experiment in chosen:
        try:
            with limited(_QUICK_SECONDS if quick else experiment.seconds or _SECONDS):
                found = _measured(experiment, run)
        except expected as error:
            print(f"bench-{name}: {experiment.name}: {error}", file=sys.stderr)
            whole = False
            continue
        rows += found.rows
        panels += found.panels
        print("", *table(experiment.title, found.rows), "", sep="\n", flush=True)
        write(rows, path)
    run.say(f"written: {path}")
    return Findings(tuple(rows), tuple(panels)), whole


def _measured(experiment: Experiment, run: Run) -> Findings:
    try:
        found = experiment.measure(run)
    except Unmeasured as error:
        run.say(f"{experiment.name}: {error}")
        figures = error.figures or experiment.figures or (experiment.name,)
        found = [summary(figure, f"not measured: {error}", [], "") for figure in figures]
    return found if isinstance(found, Findings) else Findings(tuple(found))


@contextlib.contextmanager
def limited(seconds: float, cleanup: float = _CLEANUP_SECONDS) -> Iterator[None]:
    """Raise LimitReachedError in the body once it has run for so many seconds, so that it ends what it has
    started. If it still runs ``cleanup`` seconds later, print where each thread stands and exit with 1.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise LimitReachedError(f"it has not ended within {seconds:g} s")

    faulthandler.dump_traceback_later(seconds + cleanup, exit=True)
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def positive(text: str) -> int:
    """Return the number of an argument. Raises ValueError for one below 1."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)

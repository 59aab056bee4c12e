# SPDX-License-Identifier: Apache-2.0
"""Edge: runs experiments, each with a limit of time: prints their tables, writes the file of their rows."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from bench.balance.experiment import Experiment, Findings, Panel, Run
from bench.balance.table import table
from bench.rows import Row, write

_QUICK_SECONDS, _SECONDS = 300, 3600
_CLEANUP_SECONDS = 60


class LimitReachedError(Exception):
    """An experiment has not ended in time."""


def run_all(
    name: str,
    chosen: Sequence[Experiment],
    *,
    quick: bool,
    path: Path,
    failures: tuple[type[Exception], ...] = (),
) -> tuple[Findings, bool]:
    """Run the experiments of the benchmark ``name``, print their tables and write ``path`` after each.

    Returns what was found, and whether all of them have ended well: an experiment that reaches its limit of
    time, or raises one of ``failures``, is named on stderr, and the others go on.
    """
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", flush=True)

    rows, panels = list[Row](), list[Panel]()
    expected: tuple[type[Exception], ...] = (LimitReachedError, *failures)
    whole = True
    for experiment in chosen:
        try:
            with limited(_QUICK_SECONDS if quick else experiment.seconds or _SECONDS):
                found = experiment.measure(Run(quick, say))
        except expected as error:
            print(f"bench-{name}: {experiment.name}: {error}", file=sys.stderr)
            whole = False
            continue
        rows += found.rows
        panels += found.panels
        print("", *table(experiment.title, found.rows), "", sep="\n", flush=True)
        write(rows, path)
    say(f"written: {path}")
    return Findings(tuple(rows), tuple(panels)), whole


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

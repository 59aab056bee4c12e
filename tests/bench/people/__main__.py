# SPDX-License-Identifier: Apache-2.0
"""Entry: what it costs to look at a fleet, ``make bench-people``: tables and ``people.json``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from bench import harness
from bench.experiment import Experiment, Run
from bench.people import browser, costs
from bench.people.fleet import Watched, watched_fleet
from bench.rows import Row

_Measure = Callable[[Run, Watched], Sequence[Row]]


def main() -> int:
    """Run all experiments with one fleet, which the first of them starts. Exit codes: the harness's."""
    with ExitStack() as stack:
        fleet = functools.cache(lambda run: stack.enter_context(watched_fleet(run)))

        def experiment(name: str, title: str, measure: _Measure, *figures: str) -> Experiment:
            return Experiment(name, title, lambda run: measure(run, fleet(run)), figures=figures)

        experiments = (
            experiment("watchers", "Twenty watchers of a job", costs.measure_watchers, "watch_cpu"),
            experiment("top", "millpond top", costs.measure_top, "top_cpu_percent"),
            experiment("scrape", "A scrape of millpond metrics", costs.measure_scrape, "scrape_ms"),
            experiment(
                "dashboard", "The dashboard in a browser", browser.measure_dashboard, *browser.FIGURES
            ),
        )
        return harness.main("people", "What it costs to look at a fleet.", experiments)


if __name__ == "__main__":
    sys.exit(main())

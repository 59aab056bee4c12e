# SPDX-License-Identifier: Apache-2.0
"""Entry: measures the agent image's size and boot time, ``make bench-image``: a table, ``image.json``."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import harness
from bench.experiment import Experiment, Findings, Run
from bench.image import measuring
from bench.image.measuring import Setting
from bench.rows import Row, write

_MEASURED: dict[str, Callable[[Setting], list[Row]]] = {
    "size": measuring.size,
    "boot": measuring.boot,
    "rebuild": measuring.rebuild,
    "reproducible": measuring.reproducible,
    "power": measuring.power,
}

_SECONDS = 2 * 3600
"""For one measurement."""


def main() -> int:
    """Exit codes: 0 done, 1 a measurement failed, 2 wrong arguments."""
    parser = _parser()
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as scratch:
        setting = Setting(arguments.image.absolute(), Path(scratch), arguments.repeats, arguments.cuts)
        experiments = [
            Experiment(name, name, functools.partial(_measure, measure, setting), _SECONDS)
            for name, measure in _MEASURED.items()
        ]
        chosen = harness.chosen_of(experiments, arguments.only, parser)
        fresh = Path(scratch) / "image.json"
        found, whole = harness.run_all("image", chosen, quick=False, path=fresh)
        _write(found.rows, harness.folder_of(arguments) / "image.json")
    return 0 if whole else 1


def _measure(measure: Callable[[Setting], list[Row]], setting: Setting, _run: Run) -> Findings:
    return Findings(tuple(measure(setting)))


def _parser() -> argparse.ArgumentParser:
    parser = harness.command_line("image", "The agent image: sizes and times.")
    parser.add_argument("--image", type=Path, default=Path(".image/qemu-virt"), metavar="DIR")
    parser.add_argument("--repeats", type=int, default=3, help="of boots and rebuilds")
    parser.add_argument("--cuts", type=int, default=20, help="of the power, at random moments of an update")
    return parser


def _write(rows: Sequence[Row], path: Path) -> None:
    """Write the file; figures that were not taken this time stay as they are."""
    before = [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
    names = {row.figure for row in rows}
    write([*(row for row in before if row.figure not in names), *rows], path)


if __name__ == "__main__":
    sys.exit(main())

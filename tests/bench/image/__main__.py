# SPDX-License-Identifier: Apache-2.0
"""Entry: measures the agent image's size and boot time, ``make bench-image``: a table, ``image.json``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.balance.table import table
from bench.image import measuring
from bench.image.measuring import Setting
from bench.rows import Row
from bench.runner import limited

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
    """Exit codes: 0 done, 2 wrong arguments."""
    arguments = _parser().parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(_MEASURED)
    if unknown := [name for name in chosen if name not in _MEASURED]:
        _parser().error(f"there is no {unknown[0]}; there are {', '.join(_MEASURED)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as scratch:
        setting = Setting(arguments.image.absolute(), Path(scratch), arguments.repeats, arguments.cuts)
        for name in chosen:
            with limited(_SECONDS):
                found = _MEASURED[name](setting)
            print("\n".join(table(name, found)), flush=True)
            rows += found
            _write(rows, arguments.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-image", description="The agent image: sizes and times.")
    parser.add_argument("--image", type=Path, default=Path(".image/qemu-virt"), metavar="DIR")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of {', '.join(_MEASURED)}")
    parser.add_argument("--repeats", type=int, default=3, help="of boots and rebuilds")
    parser.add_argument("--cuts", type=int, default=20, help="of the power, at random moments of an update")
    parser.add_argument("--output", type=Path, default=Path(".bench"), metavar="DIR")
    return parser


def _write(rows: list[Row], output: Path) -> None:
    """Figures that were not taken this time stay as they are."""
    output.mkdir(exist_ok=True)
    path = output / "image.json"
    before = json.loads(path.read_text()) if path.exists() else []
    names = {row.figure for row in rows}
    kept = [row for row in before if row["figure"] not in names]
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([*kept, *(dataclasses.asdict(row) for row in rows)], indent=2) + "\n")
    fresh.replace(path)


if __name__ == "__main__":
    sys.exit(main())

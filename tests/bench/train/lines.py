# SPDX-License-Identifier: Apache-2.0
"""Edge (files): counts the lines of the product's training."""

from __future__ import annotations

from pathlib import Path

from bench.experiment import Run
from bench.rows import Row

FOLDERS = ("agent/millpond/train", "host/millpond/host/jobs", "host/millpond/host/workers")
BEFORE, COMMIT = 7501, "e0ca0c9"
"""Lines in the same folders before rounds and steps had one trainer, and the commit that has them."""
TITLE = "Lines of the product's training"
_TOP = Path(__file__).parents[3]


def measure(run: Run) -> list[Row]:
    """Row ``lines``."""
    by_folder = {folder: _lines(_TOP / folder) for folder in FOLDERS}
    total = sum(by_folder.values())
    listed = ", ".join(f"{folder} {lines}" for folder, lines in by_folder.items())
    what = f"all lines of all Python files of {listed}; {total - BEFORE:+d} against {COMMIT}"
    run.say(f"{total} lines, {BEFORE} at {COMMIT}")
    peer = f"commit {COMMIT}: {BEFORE} lines"
    return [Row("lines", what, total, total, total, "lines", peer, 1, None)]


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))

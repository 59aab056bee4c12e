# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, /proc): measures what a loaded folder of images takes of a process's memory."""

from __future__ import annotations

import subprocess
import sys

from bench.experiment import Run
from bench.rows import Row, summary
from bench.task import images

SIZES = {"small": 60 << 20, "large": 240 << 20}
"""Bytes of images; up to 64 MiB are kept in memory."""
TITLE = "Memory of loaded images, in bytes of their files"
_PROGRAM = """
import sys
from pathlib import Path

import numpy as np

from millpond.train.data import labelled_images


def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])


labelled_images.of_arrays(np.zeros((2, 1, 4, 4), np.uint8), np.zeros(2, np.int64)).__getitems__([0, 1])
before = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
found = labelled_images.load(Path(), sys.argv[1], "npy")
peak = status("VmHWM:") - before
for start in range(0, len(found), 32):
    found.__getitems__(list(range(start, min(start + 32, len(found)))))
print(status("VmRSS:") - before, peak)
"""
_WHAT = {
    "": "resident after all batches of 32 have been read, above the process before; ",
    ".peak": "the most that was resident while the folder was opened, above the process before; ",
}


def measure(run: Run) -> list[Row]:
    """Row ``uint8_memory``, and one for each size, also of the peak while it is opened."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, size in SIZES.items():
        with images.folder(size // images.IMAGE) as folder:
            for _ in range(run.repeats):
                argv = [sys.executable, "-c", _PROGRAM, str(folder)]
                done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
                shares = [int(word) / size for word in done.stdout.split()]
                for part, share in zip(_WHAT, shares, strict=True):
                    found.setdefault((name, part), []).append(share)
                run.say(f"{size >> 20} MiB: {shares[0]:.3f} bytes per byte, opened with {shares[1]:.3f}")
    worst = max(SIZES, key=lambda name: max(found[name, ""]))
    rows = [_row("uint8_memory", worst, "", found[worst, ""])]
    rows += [_row(f"uint8_memory.{name}{part}", name, part, values) for (name, part), values in found.items()]
    return rows


def _row(figure: str, name: str, part: str, values: list[float]) -> Row:
    what = f"{_WHAT[part]}images.npy of {SIZES[name] >> 20} MiB of uint8"
    return summary(figure, what, values, "x")

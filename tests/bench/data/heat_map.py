# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, namespaces): epochs over batch and chunk, as Ember's Fig. 7, and the tuner's choice."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.data.shaped import EMULATION, found, serving, sparse_images
from bench.experiment import Findings, HeatMap, Run
from bench.rows import summary

TITLE = "epochs over batch and chunk, and the tuner's choice"
RATE = "1 Gbit/s"
_RATE = 125e6
BATCHES, CHUNKS = (16, 64, 256), (4, 16, 64, 256, 1024)
_MOST = 3
Cell = tuple[int, int | None]
"""Batch and chunk; None where the tuner chooses."""


@dataclass(frozen=True, slots=True)
class Work:
    """A shape of work: samples of an epoch, the shape of each, and seconds of a step and of its samples: it
    sleeps so long, or takes the steps of a ``network`` of three convolutions.
    """

    samples: int
    shape: tuple[int, ...]
    step: float = 0.0
    each: float = 0.0
    network: bool = False


SMALL_MODEL = "model is the limit, 3 KB"
WORKS = {
    "link is the limit, 12 KB": Work(12_000, (3, 64, 64), 1e-3, 2e-5),
    "small samples, 256 bytes": Work(30_000, (16, 16), 1e-3, 1e-5),
    SMALL_MODEL: Work(6_000, (3, 32, 32), 2e-3, 1e-4),
}


@dataclass(frozen=True, slots=True)
class Cells:
    """The seconds of epochs by cell, a value for each repeat, and the chunk that was chosen by batch."""

    seconds: Mapping[Cell, Sequence[float]]
    chosen: Mapping[int, int]
    chunks: Sequence[int]

    def median(self, batch: int, chunk: int | None) -> float:
        """Return the median of a cell."""
        return median(self.seconds[batch, chunk])

    @property
    def over_best(self) -> list[float]:
        """The epoch of the tuner's choice over that of the best chunk, medians, by batch."""
        return [
            self.median(batch, None) / min(self.median(batch, chunk) for chunk in self.chunks)
            for batch in BATCHES
        ]

    def panel(self, title: str) -> HeatMap:
        """Return the map, with the tuner's epochs at the chunks next to its choices."""
        values = [[self.median(batch, chunk) for chunk in self.chunks] for batch in BATCHES]
        marked = {
            (row, self._nearest(self.chosen[batch])): f"tuned {self.median(batch, None):.2f}"
            for row, batch in enumerate(BATCHES)
        }
        return HeatMap(title, "chunk", "batch", "seconds of an epoch", self.chunks, BATCHES, values, marked)

    def _nearest(self, chunk: int) -> int:
        lengths = [abs(each.bit_length() - chunk.bit_length()) for each in self.chunks]
        return lengths.index(min(lengths))


def measure(run: Run) -> Findings:
    """Take all cells of three shapes of work and the tuner's choices, alternating."""
    maps = {name: cells_of(name, work, run) for name, work in WORKS.items()}
    worst = [ratio for each in maps.values() for ratio in each.over_best]
    about = (
        f"epoch with the tuner's chunk over the best cell of its batch; 3 shapes of work, batches {BATCHES}"
    )
    emulation = f"{EMULATION} of {RATE}; steps sleep as long as they would compute"
    row = summary("tuner_over_best", about, worst, "x", emulation=emulation)
    return Findings((row,), tuple(each.panel(name) for name, each in maps.items()))


def cells_of(name: str, work: Work, run: Run) -> Cells:
    """Take all cells of a shape of work, alternating."""
    chunks = CHUNKS[::2] if run.quick else CHUNKS
    work = replace(work, samples=work.samples // 4) if run.quick else work
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        sparse_images(Path(folder) / "set", work.samples, work.shape)
        cells = _cells(Path(folder), work, min(run.repeats, _MOST), chunks)
    told = ", ".join(f"{ratio:.3f}" for ratio in cells.over_best)
    run.say(f"{name}: over the best chunk, batch {BATCHES}: {told}; chosen {cells.chosen}")
    return cells


def _cells(root: Path, work: Work, repeats: int, chunks: Sequence[int]) -> Cells:
    cells: list[Cell] = [(batch, chunk) for batch in BATCHES for chunk in (None, *chunks)]
    spec: dict[str, Any] = {"name": "set", "step": work.step, "each": work.each, "batch": 0}
    spec["network"] = work.network
    spec["cells"] = [{"batch": batch, "chunk": chunk} for batch, chunk in [(64, 64), *cells * repeats]]
    with serving(root, _RATE) as service:
        results = found(service.start("consume", spec))["cells"][1:]  # the first one opens the data set
    seconds, chosen = defaultdict[Cell, list[float]](list), dict[int, int]()
    for cell, result in zip(cells * repeats, results, strict=True):
        seconds[cell].append(result["seconds"])
        if cell[1] is None:
            chosen[cell[0]] = result["chunk"]
    return Cells(seconds, chosen, chunks)

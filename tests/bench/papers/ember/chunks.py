# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, namespaces): Ember's Fig. 7: epochs over batch and chunk."""

from __future__ import annotations

from bench.data.heat_map import BATCHES, RATE, SMALL_MODEL, WORKS, Cells, Work, cells_of
from bench.data.shaped import EMULATION
from bench.experiment import Run
from bench.papers.exhibit import Shown, Value, measured

_NETWORK = Work(1_500, (3, 32, 32), network=True)
_OVER = "time over that of the best chunk"
_KINDS = (("network of three convolutions", _NETWORK), ("steps that sleep", WORKS[SMALL_MODEL]))


def figure_7(run: Run) -> Shown:
    """Take the cells of the network of three convolutions, and of steps that sleep."""
    rows, panels = list[Value](), []
    for name, work in _KINDS:
        cells = cells_of(name, work, run)
        rows += _rows(name, cells)
        panels.append(cells.panel(name))
    difference = (
        "The paper prints colours without numbers: worst where the batch is larger than the chunk, best where"
        " both are close, longer again for large chunks. Here chunks are sent ahead of need, while the model"
        " computes. The tuner's choice stands where the paper leaves tuning to the user."
    )
    which = f"ranges are over the batches of {', '.join(map(str, BATCHES))}"
    emulation = f"{EMULATION} of {RATE}; one consumer; images of CIFAR-10's size, all black; {which}"
    return Shown(tuple(rows), emulation, difference, tuple(panels))


def _rows(name: str, cells: Cells) -> list[Value]:
    """Return the paper's regions of the map as ratios over the best chunk of the same batch, by batch."""
    small, large = min(cells.chunks), max(cells.chunks)
    best = {batch: min(cells.median(batch, chunk) for chunk in cells.chunks) for batch in BATCHES}
    over = {
        chunk: [cells.median(batch, chunk) / best[batch] for batch in BATCHES] for chunk in (small, large)
    }
    return [
        measured(f"{name}: chunk of {small}, smaller than any batch, {_OVER}", "x", "worst", over[small]),
        measured(f"{name}: chunk of {large}, larger than any batch, {_OVER}", "x", "longer", over[large]),
        measured(f"{name}: the tuner's chunk, {_OVER}", "x", None, cells.over_best),
    ]

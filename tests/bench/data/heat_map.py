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
from bench.experiment import Run
from bench.rows import Row, summary

TITLE = "epochs over batch and chunk, and the tuner's choice"
PICTURE = Path(".bench/data-heat-map.png")
_RATE = 125e6
_BATCHES, _CHUNKS = (16, 64, 256), (4, 16, 64, 256, 1024)
_MOST = 3
Cell = tuple[int, int | None]
"""Batch and chunk; None where the tuner chooses."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A shape of work: samples of an epoch, the shape of each, and seconds of a step and of its samples."""

    samples: int
    shape: tuple[int, ...]
    step: float
    each: float


_WORKS = {
    "link is the limit, 12 KB": _Work(12_000, (3, 64, 64), 1e-3, 2e-5),
    "small samples, 256 bytes": _Work(30_000, (16, 16), 1e-3, 1e-5),
    "model is the limit, 3 KB": _Work(6_000, (3, 32, 32), 2e-3, 1e-4),
}


def measure(run: Run) -> list[Row]:
    """Take all cells of three shapes of work and the tuner's choices, alternating."""
    repeats = min(run.repeats, _MOST)
    chunks = _CHUNKS[::2] if run.quick else _CHUNKS
    maps, worst = {}, list[float]()
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        for number, (name, whole) in enumerate(_WORKS.items()):
            work = replace(whole, samples=whole.samples // 4) if run.quick else whole
            sparse_images(Path(folder) / str(number), work.samples, work.shape)
            seconds, chosen = _cells(Path(folder), str(number), work, repeats, chunks)
            maps[name] = {cell: median(values) for cell, values in seconds.items()}, chosen
            ratios = _ratios(seconds, chunks)
            worst += ratios
            told = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            run.say(f"{name}: over the best chunk, batch {_BATCHES}: {told}; chosen {chosen}")
    _draw(maps, chunks)
    about = (
        f"epoch with the tuner's chunk over the best cell of its batch; 3 shapes of work, batches {_BATCHES}"
    )
    emulation = f"{EMULATION} of 1 Gbit/s; steps sleep as long as they would compute"
    return [summary("tuner_over_best", about, worst, "x", emulation=emulation)]


def _cells(
    root: Path, name: str, work: _Work, repeats: int, chunks: Sequence[int]
) -> tuple[dict[Cell, list[float]], dict[int, int]]:
    """Return the seconds of each cell, and the chunk that was chosen for each batch."""
    cells: list[Cell] = [(batch, chunk) for batch in _BATCHES for chunk in (None, *chunks)]
    spec: dict[str, Any] = {"name": name, "step": work.step, "each": work.each, "batch": 0}
    spec["cells"] = [{"batch": batch, "chunk": chunk} for batch, chunk in [(64, 64), *cells * repeats]]
    with serving(root, _RATE) as service:
        results = found(service.start("consume", spec))["cells"][1:]  # the first one opens the data set
    seconds, chosen = defaultdict(list), {}
    for cell, result in zip(cells * repeats, results, strict=True):
        seconds[cell].append(result["seconds"])
        if cell[1] is None:
            chosen[cell[0]] = result["chunk"]
    return seconds, chosen


def _ratios(seconds: Mapping[Cell, list[float]], chunks: Sequence[int]) -> list[float]:
    """Return for each batch the epoch of the tuner's choice over that of the best chunk, medians."""
    middle = {cell: median(values) for cell, values in seconds.items()}
    return [middle[batch, None] / min(middle[batch, chunk] for chunk in chunks) for batch in _BATCHES]


def _draw(maps: Mapping[str, tuple[dict[Cell, float], dict[int, int]]], chunks: Sequence[int]) -> None:
    import matplotlib as mpl  # slow to import

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, len(maps), figsize=(5 * len(maps), 3.4), layout="constrained")
    for axes, (name, (seconds, chosen)) in zip(grid, maps.items(), strict=True):
        values = [[seconds[batch, chunk] for chunk in chunks] for batch in _BATCHES]
        picture = axes.imshow(values, aspect="auto", cmap="viridis_r")
        figure.colorbar(picture, ax=axes, label="seconds of an epoch")
        for row, batch in enumerate(_BATCHES):
            for column in range(len(chunks)):
                axes.text(column, row, f"{values[row][column]:.2f}", ha="center", va="center", fontsize=8)
            nearest = min(
                range(len(chunks)), key=lambda at: abs(chunks[at].bit_length() - chosen[batch].bit_length())
            )
            axes.plot(nearest, row - 0.32, "v", color="#c8553d")
            axes.text(
                nearest + 0.1, row - 0.3, f"tuned {seconds[batch, None]:.2f}", fontsize=7, color="#c8553d"
            )
        axes.set(title=name, xlabel="chunk", ylabel="batch")
        axes.set_xticks(range(len(chunks)), [str(chunk) for chunk in chunks])
        axes.set_yticks(range(len(_BATCHES)), [str(batch) for batch in _BATCHES])
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=130)
    pyplot.close(figure)

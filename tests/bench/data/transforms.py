# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): what it costs that a device's transforms run in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

import millpond.data
from bench.data.shaped import sparse_images
from bench.experiment import Run
from bench.rows import Row, ratios, summary

TITLE = "transforms in a process of their own"
Where = Literal["own", "other"]
_FUNCTIONS = """\
def cheap(sample):
    return sample[0] + 1, sample[1]

def crop(sample):
    return sample[0][:, 8:216, 8:216].flip(-1), sample[1]
"""
_KINDS: Mapping[str, tuple[tuple[int, int, int], int, str]] = {
    "cheap": ((1, 8, 8), 40_000, "one addition to each of 64 values"),
    "crop": ((3, 224, 224), 1_500, "a crop and a flip of images of 224x224 in RGB"),
}
"""Transforms: shape and number of their samples, and what is told of them."""


def measure(run: Run) -> list[Row]:
    """Stream an epoch with each transform, in the service's process and in another, in turn."""
    torch.set_num_threads(1)  # other processes have work for the second core
    seconds: dict[tuple[str, Where], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as name:
        root = Path(name)
        (root / "mine.py").write_text(_FUNCTIONS)
        for kind, (shape, samples, _) in _KINDS.items():
            sparse_images(root / kind, samples // (10 if run.quick else 1), shape)
        with _serving(root, "own") as own, _serving(root, "other") as other:
            addresses: tuple[tuple[Where, str], ...] = (("own", own), ("other", other))
            for kind in _KINDS:
                for _, address in addresses:
                    _epoch(address, kind)
                for _ in range(run.repeats):
                    for where, address in addresses:
                        seconds.setdefault((kind, where), []).append(_epoch(address, kind))
    return [row for kind in _KINDS for row in _rows(kind, seconds, run)]


def _rows(kind: str, seconds: Mapping[tuple[str, Where], list[float]], run: Run) -> Iterator[Row]:
    _, samples, about = _KINDS[kind]
    count = samples // (10 if run.quick else 1)
    own, other = ([count / each for each in seconds[kind, where]] for where in ("own", "other"))
    run.say(f"{kind}: {own[-1]:.0f} samples/s in the service's process, {other[-1]:.0f} in another")
    what, peer = f"samples per second of one consumer, {about}", "the same in the service's process"
    yield summary(f"transform_{kind}", f"{what}, in a confined process", other, "samples/s")
    yield summary(f"transform_{kind}_over_own", f"{what}, over", ratios(other, own), "x", peer=peer)


def _epoch(where: str, kind: str) -> float:
    """Return the seconds of an epoch, its first batch included."""
    began = time.monotonic()
    for _ in millpond.data.stream(f"{where}/{kind}", batch=64, transform=kind):
        pass
    return time.monotonic() - began


@contextmanager
def _serving(root: Path, where: Where) -> Iterator[str]:
    argv = [sys.executable, "-m", "bench.data.transform_service", str(root), str(root / "mine.py"), where]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout
            yield service.stdout.readline().strip()
        finally:
            service.terminate()

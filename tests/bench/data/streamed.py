# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, namespaces): the first batch of a large set, waiting, and memory, over a shaped link."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.data.shaped import EMULATION, ShapedService, found, serving, sparse_images
from bench.experiment import Run
from bench.rows import Row, summary

TITLE = "first batch, waiting and memory of streamed data"
_RATE = 125e6  # bytes per second: 1 Gbit/s
_SHAPE, _BYTES = (3, 64, 64), 3 * 64 * 64
_SAMPLES = 10**10 // _BYTES
_BATCH, _WORKERS, _HEADROOM = 64, 2, 1.2
_MEMORY_SAMPLES = 10**9 // _BYTES
_STEPS = "steps sleep as long as they would compute"


def measure(run: Run) -> list[Row]:
    """Start afresh for each repeat."""
    firsts, idle, memory = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        root = Path(folder)
        sparse_images(root / "large", _SAMPLES, _SHAPE)
        seconds = 3 if run.quick else 15
        sparse_images(root / "paced", round(seconds * _RATE / _HEADROOM / _BYTES), _SHAPE)
        sparse_images(root / "held", _MEMORY_SAMPLES // (10 if run.quick else 1), _SHAPE)
        for repeat in range(run.repeats):
            firsts.append(_first(root))
            idle.append(100 * _idle(root, f"{repeat} {time.time()}"))
            memory.append(_memory(root, f"{repeat} {time.time()}"))
            run.say(f"first batch {firsts[-1]:.2f} s, waiting {idle[-1]:.1f} %, memory {memory[-1]:.2f}")
    return list(_rows(firsts, idle, memory))


def _rows(firsts: list[float], idle: list[float], memory: list[float]) -> Iterator[Row]:
    emulation = f"{EMULATION} of 1 Gbit/s; {_STEPS}"
    about = (
        f"seconds from the call of stream() to the end of the first step, batch {_BATCH}, of a set of 10 GB"
    )
    yield summary("first_batch_s", about, firsts, "s", emulation=emulation)
    about = (
        f"time that {_WORKERS} workers wait for data, of all, where the link carries 1.2 x what they consume"
    )
    yield summary("idle_share", about, idle, "%", emulation=emulation)
    about = (
        f"peak memory of {_WORKERS} workers and the service, over that of workers with a set of 1 GB in each"
    )
    yield summary("stream_ram", about, memory, "x", peer="the set in each worker's memory")


def _first(root: Path) -> float:
    """Return the seconds until the first step of a service that was just started has ended."""
    spec = {"name": "large", "batch": _BATCH, "step": 0.0, "each": 1e-5, "steps": 1}
    with serving(root, _RATE) as service:
        return float(found(service.start("consume", spec))["cells"][0]["first"])


def _idle(root: Path, name: str) -> float:
    """Return the share of time that workers waited, their first batch included."""
    each = _WORKERS * _BYTES * _HEADROOM / _RATE
    spec = {"name": "paced", "batch": _BATCH, "step": 0.0, "each": each, "run": name, "paced": True}
    with serving(root, _RATE) as service:
        before = service.received()
        cells = _both(service, spec)
        if service.received() - before < sum(cell["samples"] for cell in cells) * _BYTES:
            raise RuntimeError("the link did not carry the samples")
    return sum(cell["waited"] for cell in cells) / sum(cell["seconds"] for cell in cells)


def _both(service: ShapedService, spec: dict[str, object]) -> list[dict[str, float]]:
    return [
        each["cells"][0] for each in map(found, [service.start("consume", spec) for _ in range(_WORKERS)])
    ]


def _memory(root: Path, name: str) -> float:
    """Return the peak of workers that stream, and of the service, over that of workers that hold the set."""
    spec = {"name": "held", "folder": str(root / "held"), "batch": _BATCH, "step": 0.0, "each": 0.0}
    with serving(root, 8 * _RATE) as service:
        workers = [service.start("consume", spec | {"run": name}) for _ in range(_WORKERS)]
        streamed = sum(found(each)["peak"] for each in workers) + _peak(service.pid)
        holding = [service.start("consume", spec | {"in_memory": True}) for _ in range(_WORKERS)]
        return float(streamed / sum(found(each)["peak"] for each in holding))


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

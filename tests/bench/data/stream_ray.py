# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): a training job with two workers on a stream, beside Ray Train with Ray Data."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.data.service import served
from bench.experiment import Run
from bench.installed import installed
from bench.rows import Row, summary

TITLE = "a job beside Ray Train and Ray Data"
_RAY = "ray[train,data]==2.60.0"
_JOB = Path(__file__).with_name("ray_job.py")
_SAMPLES, _EPOCHS, _BATCH, _RANKS = 10_000, 3, 64, 2
_MOST = 3


def measure(run: Run) -> list[Row]:
    """Alternate jobs, on this machine."""
    whole = "seconds of a job with two workers on {} images of 32 px, start included, ours over Ray's"
    names = {"stream_time_over_ray": whole, "stream_loop_over_ray": "seconds of its training loop alone"}
    python = installed("ray", "torch==2.13.0", _RAY, figures=names)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        root = Path(folder) / "set"
        root.mkdir()
        pixels = np.random.default_rng(0).integers(0, 256, (_SAMPLES, 3, 32, 32), np.uint8)
        np.save(root / "images.npy", pixels)
        np.save(root / "labels.npy", np.arange(_SAMPLES) % 10)
        for _ in range(min(run.repeats, _MOST)):
            theirs, ours = _theirs(python, root), _ours(root.parent)
            run.say("ours {:.1f} s, its loop {:.1f} s; Ray's {:.1f} s, {:.1f} s".format(*ours, *theirs))
            for values, own, other in zip(ratios.values(), ours, theirs, strict=True):
                values.append(own / other)
    return [
        summary(name, about.format(_SAMPLES), ratios[name], "x", peer=_RAY) for name, about in names.items()
    ]


def _told(output: bytes) -> float:
    return float(json.loads(output.splitlines()[-1])["seconds"])


def _theirs(python: str, root: Path) -> tuple[float, float]:
    """Return the seconds of the job and of its loop."""
    began = time.monotonic()
    argv = [python, str(_JOB), "ray", str(root), str(_EPOCHS), str(_BATCH)]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        argv, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    return time.monotonic() - began, _told(done.stdout)


def _ours(folder: Path) -> tuple[float, float]:
    began = time.monotonic()
    with served(folder) as where:
        loops = _ranks([sys.executable, str(_JOB), "ours", where, str(_EPOCHS), str(_BATCH)])
    return time.monotonic() - began, loops[0]


def _ranks(argv: Sequence[str]) -> list[float]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    workers = [
        subprocess.Popen(argv, stdout=subprocess.PIPE, env=common | {"RANK": str(rank)})
        for rank in range(_RANKS)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a rank of ours has failed")
    return [_told(output) for output in outputs]

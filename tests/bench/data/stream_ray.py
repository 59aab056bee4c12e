# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): a training job with two workers on a stream, beside Ray Train with Ray Data."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from bench.data.jobs import RAY, JobSpec, installed_ray, run_job
from bench.experiment import Run
from bench.rows import Row, summary

TITLE = "a job beside Ray Train and Ray Data"
_SAMPLES, _TESTED = 10_000, 256
_MOST = 3


def measure(run: Run) -> list[Row]:
    """Alternate jobs, on this machine."""
    whole = "seconds of a job with two workers on {} images of 32 px, start included, ours over Ray's"
    names = {"stream_time_over_ray": whole, "stream_loop_over_ray": "seconds of its training loop alone"}
    python = installed_ray(names)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        random_images(Path(folder), _SAMPLES, _TESTED)
        spec = JobSpec(Path(folder), "models.mnist_cnn", {"side": 32, "channels": 3}, epochs=3, batch=64)
        for _ in range(min(run.repeats, _MOST)):
            theirs, ours = run_job("ray", spec, python), run_job("stream", spec)
            run.say(f"ours {ours.seconds:.1f} s, its loop {ours.loop_seconds:.1f} s")
            run.say(f"Ray's {theirs.seconds:.1f} s, {theirs.loop_seconds:.1f} s")
            ratios["stream_time_over_ray"].append(ours.seconds / theirs.seconds)
            ratios["stream_loop_over_ray"].append(ours.loop_seconds / theirs.loop_seconds)
    return [
        summary(name, about.format(_SAMPLES), ratios[name], "x", peer=RAY) for name, about in names.items()
    ]


def random_images(folder: Path, samples: int, tested: int) -> None:
    """Write the sets ``train`` and ``test`` of noise, RGB with 32 px."""
    random = np.random.default_rng(0)
    for name, number in (("train", samples), ("test", tested)):
        (folder / name).mkdir()
        np.save(folder / name / "images.npy", random.integers(0, 256, (number, 3, 32, 32), np.uint8))
        np.save(folder / name / "labels.npy", np.arange(number) % 10)

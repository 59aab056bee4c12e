# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): Ember's tables 2 and 4: jobs on a stream beside Ray, in alternation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from bench.data.jobs import JobResult, JobSpec, Kind, interpreter_of, run_job
from bench.experiment import Run
from bench.papers.exhibit import Shown, Value, measured

DIGITS = (
    "the set is a stand-in: scikit-learn's digits (1,437 for training, 360 for the test), enlarged to {};"
    " both workers, the service and Ray share this machine's two cores, without a network between machines"
    " and without a GPU"
)
_TABLE_4 = (
    ("ResNet18", "residual.resnet18", ("98.6", "0.1523", "1:52:61"), ("98.8", "0.0623", "2:10:61")),
    ("MobileNetV2", "models.mobilenet_v2", ("97.93", "0.0975", "1:55:26"), ("98.12", "0.1175", "2:08:37")),
    (
        "EfficientNet",
        "models.efficientnet_b0",
        ("95.91", "0.1126", "2:03:11"),
        ("95.67", "0.2126", "2:13:09"),
    ),
)
"""Model, its factory, and accuracy, loss and time with Ember and with Ray, as printed."""
_EPOCHS, _EPOCHS_4 = 8, 2
_MOST_4 = 1


@dataclass(frozen=True, slots=True)
class Pair:
    """Jobs on a stream and with Ray, one of each a repeat."""

    ours: list[JobResult]
    theirs: list[JobResult]

    def rows(
        self, name: str, ours: tuple[str, str, str], theirs: tuple[str, str, str], ratio: float
    ) -> list[Value]:
        """Return rows of a model whose results the paper prints, as accuracy, loss and time."""
        rows = []
        for who, results, paper in (("Ember", self.ours, ours), ("Ray", self.theirs, theirs)):
            rows += [
                measured(f"{name}accuracy, {who}", "%", float(paper[0]), [each.accuracy for each in results]),
                measured(f"{name}loss, {who}", "", float(paper[1]), [each.loss for each in results]),
                measured(
                    f"{name}time, {who}", "s", f"{paper[2]} (h:mm:ss)", [each.seconds for each in results]
                ),
            ]
        whole = self._ratios(lambda result: result.seconds)
        loops = self._ratios(lambda result: result.loop_seconds)
        rows.append(measured(f"{name}time, Ember over Ray (paper: of these times)", "x", ratio, whole))
        return [*rows, measured(f"{name}time of the training loop, Ember over Ray", "x", None, loops)]

    def _ratios(self, of: Callable[[JobResult], float]) -> list[float]:
        return [of(own) / of(other) for own, other in zip(self.ours, self.theirs, strict=False)]


def alternated(run: Run, spec: JobSpec, repeats: int) -> Pair:
    """Train with both, in turn, each repeat from another seed; without Ray where it does not install."""
    pair = Pair([], [])
    kinds: tuple[tuple[Kind, list[JobResult]], ...] = (("stream", pair.ours), ("ray", pair.theirs))
    for seed in range(repeats):
        for kind, results in kinds:
            if python := interpreter_of(kind):
                results.append(found := run_job(kind, replace(spec, seed=seed), python))
                told = f"{found.seconds:.1f} s, its loop {found.loop_seconds:.1f} s, {found.accuracy:.1f} %"
                run.say(f"{spec.model}, {kind}: {told}")
    return pair


def table_2(run: Run) -> Shown:
    """Train the network of three convolutions."""
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        write_digits(Path(folder), 28, channels=1)
        epochs = 2 if run.quick else _EPOCHS
        spec = JobSpec(Path(folder), "models.mnist_cnn", epochs=epochs, batch=16)
        pair = alternated(run, spec, run.repeats)
    rows = pair.rows("", ("98.86", "0.1334", "0:58:05"), ("98.9", "0.1340", "1:06:54"), 0.868)
    difference = (
        "Jobs are of seconds here and of an hour there, so what Ray needs to start weighs more: compare the"
        " loop's ratio with the paper's; the paper's set is MNIST."
    )
    return Shown(tuple(rows), DIGITS.format("28x28"), difference)


def table_4(run: Run) -> Shown:
    """Train the three architectures, from scratch."""
    rows = list[Value]()
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        write_digits(Path(folder), 32, channels=3)
        epochs = 1 if run.quick else _EPOCHS_4
        for name, model, ours, theirs in _TABLE_4[: 1 if run.quick else None]:
            spec = JobSpec(Path(folder), model, {"classes": 10}, epochs=epochs, batch=16, rate=0.005)
            pair = alternated(run, spec, min(run.repeats, _MOST_4))
            ratio = round(_seconds(ours[2]) / _seconds(theirs[2]), 3)
            rows += pair.rows(f"{name}: ", ours, theirs, ratio)
    difference = (
        "The paper begins with pretrained weights and trains on 30,000 images of 224x224 and more for two"
        f" hours. Here training begins from scratch and ends after {epochs} epoch{'s' * (epochs > 1)}, so"
        " accuracies compare with each other and not with the paper's. Two of its times have 61 "
        "seconds; they are taken as printed."
    )
    return Shown(tuple(rows), DIGITS.format("32x32 in three equal channels"), difference)


def write_digits(folder: Path, side: int, channels: int) -> None:
    """Write the sets ``train`` and ``test`` of digits, enlarged to the largest multiple of 8 and padded."""
    digits = load_digits()
    large = np.kron((digits.images * 15.9375).astype(np.uint8), np.ones((1, side // 8, side // 8), np.uint8))
    edge = side - large.shape[-1]
    padded = np.pad(large, ((0, 0), (edge // 2, edge - edge // 2), (edge // 2, edge - edge // 2)))
    images = np.repeat(padded[:, None], channels, axis=1)
    order = np.random.default_rng(0).permutation(len(images))
    for name, chosen in (("test", order[:360]), ("train", order[360:])):
        (folder / name).mkdir()
        np.save(folder / name / "images.npy", images[chosen])
        np.save(folder / name / "labels.npy", digits.target[chosen])


def _seconds(printed: str) -> int:
    hours, minutes, seconds = map(int, printed.split(":"))
    return 3600 * hours + 60 * minutes + seconds

# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, the clock): measures what an exchange of a task of one's own takes over the built-in one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.experiment import Run
from bench.rows import Row, summary
from millpond.train.data import labelled_images
from millpond.train.determinism import generators
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.selection import SampleFolders
from millpond.train.protocol import Folder, Work
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.task import SampleSet, Task
from millpond.train.zoo.models import digits_cnn

BATCHES = (32, 256)
KINDS = ("gradients", "local")
TITLE = "An exchange of a task of one's own, over one of the built-in images"
_SAMPLES = 1024  # of an exchange of local training
_PEER = "the built-in data set and loss of labelled images: uint8 in memory, cross-entropy"
_TASKS = {
    "": "a data set with __getitems__ that gives whole batches, own loss and metrics",
    ".list": "a data set of single samples, uint8 divided by 255 each, with torch's default_collate",
}
_WORK = WorkSpec(
    "bench", ModelSpec("none:none"), optimizer=OptimizerSpec("SGD", 0.05, {"momentum": 0.9}), total=1
)


class _Whole:
    """Whole batches, as a user would write them."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index].float() / 255, self._labels[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self._images[chosen].float() / 255, self._labels[chosen]


class _Single:
    """Single samples; everything else is torch's."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index].float() / 255, self._labels[index]


class _BuiltIn:
    def model(self) -> nn.Module:
        return digits_cnn()


class _Own(_BuiltIn):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        images, labels = batch
        return cross_entropy(model(images), labels, reduction="sum"), len(labels)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[float, float]]:
        images, labels = batch
        return {"accuracy": (float((model(images).argmax(1) == labels).sum()), len(labels))}


def measure(run: Run) -> list[Row]:
    """Row ``task_overhead``, and one for each task, kind of exchange and batch."""
    generators.be_deterministic(1)
    bunch = load_digits()
    images = (bunch.images[:, None] * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    tensors = torch.from_numpy(images), torch.from_numpy(labels)
    found: dict[tuple[str, str, int], list[float]] = {}
    for _ in range(run.repeats):
        for kind in KINDS:
            for batch in BATCHES:
                exchanges = [
                    _exchange(_BuiltIn(), labelled_images.of_arrays(images, labels), kind, batch),
                    _exchange(_Own(), _Whole(*tensors), kind, batch),
                    _exchange(_BuiltIn(), _Single(*tensors), kind, batch),
                ]
                built_in, *own = _taken(exchanges, _times(kind, batch, quick=run.quick))
                told = f"{kind}, batch {batch}: {1000 * median(built_in):.2f} ms"
                for name, seconds in zip(_TASKS, own, strict=True):
                    # A pair of exchanges is under the same load.
                    ratio = median(mine / other for mine, other in zip(seconds, built_in, strict=True))
                    found.setdefault((name, kind, batch), []).append(ratio)
                    told += f", {name.removeprefix('.') or 'own'} {ratio:.3f} x"
                run.say(told)
    return list(_rows(found))


def _times(kind: str, batch: int, *, quick: bool) -> int:
    whole = 24 if kind == "local" else 6 * _SAMPLES // batch
    return max(5, whole // 8) if quick else whole


def _exchange(user: object, samples: SampleSet, kind: str, batch: int) -> Callable[[], object]:
    """Return a function that makes one exchange."""
    work = replace(_WORK, passes=1, batch=batch) if kind == "local" else _WORK
    task = Task(user)
    generators.plant(1)
    parameters = FlatParameters(task.model())
    folders = SampleFolders(task, 0, [Folder("private/digits", "csd0")], [samples])
    trainer, state = LocalTrainer(parameters, task, folders, work), parameters.state.copy()
    request = Work(1, 1, 1, (((0, _SAMPLES if kind == "local" else batch),),))
    return lambda: trainer.run(request, state)


def _taken(exchanges: Sequence[Callable[[], object]], times: int) -> list[list[float]]:
    """Return the seconds of each exchange, again and again; they take turns, and another begins each time."""
    taken: list[list[float]] = [[] for _ in exchanges]
    for turn in range(-2, times):  # the first ones warm up
        for number in range(len(exchanges)):
            chosen = (number + turn) % len(exchanges)
            began = time.perf_counter()
            exchanges[chosen]()
            if turn >= 0:
                taken[chosen].append(time.perf_counter() - began)
    return taken


def _rows(found: dict[tuple[str, str, int], list[float]]) -> list[Row]:
    own: dict[Any, list[float]] = {key: values for key, values in found.items() if not key[0]}
    worst = max(own, key=lambda key: median(own[key]))
    rows = [_row("task_overhead", worst, found[worst])]
    return rows + [
        _row(f"task_overhead{key[0]}.{key[1]}.{key[2]}", key, values) for key, values in found.items()
    ]


def _row(figure: str, key: tuple[str, str, int], values: list[float]) -> Row:
    name, kind, batch = key
    done = (
        f"local training on {_SAMPLES} samples in batches of {batch}"
        if kind == "local"
        else f"gradients of {batch} samples"
    )
    what = f"LocalTrainer.run, {done}, the demo's CNN, one thread; {_TASKS[name]}; median pair"
    return summary(figure, what, values, "x", peer=_PEER)

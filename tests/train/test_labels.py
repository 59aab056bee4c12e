# SPDX-License-Identifier: Apache-2.0
"""Labels and folders that cannot be trained on: one line each, which names the folder also where it leaves a
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image
from torch import nn

from millpond.agent.policy.error_reports import rebuilt
from millpond.base.errors import LocalError
from millpond.linux import memory
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import BatchPart, Folder, PrepareWorker, Ready
from millpond.train.state import flat, layout
from millpond.train.worker import error_reports, roles, user_code

FOLDER = "private/digits"
CODE = "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))\n"
Write = Callable[[Path], None]


def images(*labels: int) -> Write:
    def write(folder: Path) -> None:
        np.save(folder / "images.npy", np.zeros((len(labels), 4, 4), np.uint8))
        np.save(folder / "labels.npy", np.array(labels, np.int64))

    return write


def pictures(*classes: str) -> Write:
    def write(folder: Path) -> None:
        for name in classes:
            (folder / name).mkdir()
            Image.new("L", (4, 4)).save(folder / name / "patient-4711.png")

    return write


def prepare(root: Path, kind: str, classes: tuple[str, ...], total: int = 1) -> Ready:
    model = ModelSpec("labels_net:build")
    work = WorkSpec("labels", model, format=kind, classes=classes, total=total)  # type: ignore[arg-type]
    (root / "labels_net.py").write_text(CODE)
    tensors = flat.describe(user_code.build(work, root)[1])
    shared = roles.Descriptors(memory.make("states"), memory.make("values"))
    memory.map_first(shared.values, 4 * layout.size(tensors))
    request = PrepareWorker(work, "csd0", (Folder(FOLDER, "csd0"),), {}, tensors)
    ready = roles.TrainingRole(request, root, root, shared).ready()
    assert isinstance(ready, Ready)
    return ready


@pytest.fixture
def complaint(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Write a folder, and return what the host is told of the worker that was to read it."""

    def found(write: Write, kind: str = "npy", classes: tuple[str, ...] = ()) -> str:
        (tmp_path / FOLDER).mkdir(parents=True)
        write(tmp_path / FOLDER)
        with pytest.raises(LocalError) as caught:
            prepare(tmp_path, kind, classes)
        ours = caught.tb.tb_next.tb_next  # without the frames of this file: a worker has none
        error = caught.value.with_traceback(ours)
        report = error_reports.failure(error, tmp_path / "code", "m:build", full=False)
        told = rebuilt(report, [FOLDER, "csd0"], {})
        assert told.code == "data"
        assert "\n" not in told.text
        return told.text

    yield found
    user_code.forget(tmp_path)


CASES: dict[str, tuple[Any, ...]] = {
    "no file": (lambda _: None, f"missing data: {FOLDER} has no images.npy"),
    "no sample": (images(), f"missing data: {FOLDER}/images.npy holds no samples"),
    "beyond the model": (
        images(0, 3),
        f"{FOLDER} holds a label beyond the model's 3 classes",
    ),
    "negative": (images(0, -1), f"{FOLDER}/images.npy: a label is negative"),
    "no class": (pictures(), f"missing data: {FOLDER} has no sub-folder per class", "images"),
    "another class": (
        pictures("cat", "dog"),
        f"{FOLDER}: a file of the samples is not one of the job's classes",
        "images",
        ("cat", "cow"),
    ),
    "too many classes": (
        pictures("a", "b", "c", "d"),
        f"{FOLDER} holds a label beyond the model's 3 classes",
        "images",
        ("a", "b", "c", "d"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_folder_is_named_in_one_line(complaint: Callable[..., str], case: str) -> None:
    write, expected, *kind = CASES[case]
    assert complaint(write, *kind) == expected


@pytest.mark.parametrize(
    ("total", "told"),
    [(0, (BatchPart("[0]", "float32", (1, 4, 4)), BatchPart("[1]", "int64", ()))), (1, ())],
)
def test_a_worker_without_rounds_tells_the_parts_of_a_batch(
    tmp_path: Path, total: int, told: tuple[BatchPart, ...]
) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    images(0, 2)(tmp_path / FOLDER)
    try:
        assert prepare(tmp_path, "npy", (), total) == Ready((2,), (0,), batch=told)
    finally:
        user_code.forget(tmp_path)


def test_devices_that_lack_classes_give_the_others_the_same_labels(tmp_path: Path) -> None:
    task = user_code.Task(SimpleNamespace(model=lambda: nn.Linear(1, 1)), "images", ("cat", "cow", "dog"))
    labels = []
    for name, classes in (("a", ("dog",)), ("b", ("cat", "dog"))):
        (tmp_path / name).mkdir()
        pictures(*classes)(tmp_path / name)
        labels.append(cast(Any, task.dataset(tmp_path, name, "train")).labels.tolist())
    assert labels == [[2], [0, 2]]

# SPDX-License-Identifier: Apache-2.0
"""Constants of a model that float32 cannot carry are compared, and in the model's file as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from millpond.base.errors import LocalError
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.state import checkpoint, flat, layout
from millpond.train.state.checkpoint import Checkpoint
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.strategies.fedavg import FedAvg
from millpond.train.task.task import Task
from millpond.train.worker.trial import try_out

WORK = WorkSpec("constants", ModelSpec("none:none"), optimizer=OptimizerSpec("sgd", 0.1), total=2)
VALUES = {
    "turns": torch.polar(torch.ones(3), torch.arange(3.0)),
    "odd": torch.tensor([1, 2, 3], dtype=torch.uint16),
    "scale": torch.tensor([[1 / 3]], dtype=torch.float64),
    "hash": torch.tensor([2654435761, -1]),
    "small": torch.tensor([1 << 24]),
}


class Net(nn.Linear):
    """Has constants of each kind, and may change one of them."""

    def __init__(self, changes: str = "") -> None:
        super().__init__(8, 2)
        self.changes = changes
        self.frozen = nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float64), requires_grad=False)
        for name, value in VALUES.items():
            self.register_buffer(name, value.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        if self.changes:
            getattr(self, self.changes).mul_(3)
        return super().forward(inputs) * self.scale.float() + self.frozen.float()


class Points:
    """A task of two classes of points."""

    def __init__(self, changes: str = "") -> None:
        self.changes = changes

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return Net(self.changes)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def samples() -> list[Any]:
    return [(row, int(row[0] > 0)) for row in torch.randn(16, 8)]


def test_they_are_not_exchanged_and_what_float32_carries_is() -> None:
    model = Net()
    assert [tensor.name for tensor in flat.describe(model)] == ["weight", "bias", "small"]
    unsent = {tensor.name: tensor.dtype for tensor in flat.describe_unsent(model)}
    assert unsent == {
        "frozen": "raw float64",
        "turns": "raw complex64",
        "odd": "raw uint16",
        "scale": "raw float64",
        "hash": "raw int64",
    }
    assert len(FlatParameters(model).state) == 16 + 2 + 1


def test_they_survive_the_way_to_a_file_and_back(tmp_path: Path) -> None:
    model = Net()
    tensors = flat.describe_unsent(model)
    values = np.empty(layout.size(tensors), np.float32)
    flat.read(model, values, tensors)
    checkpoint.save(tmp_path / "m.safetensors", Checkpoint(values, tensors, "job", 1))
    found, own = load_file(tmp_path / "m.safetensors"), model.state_dict()
    assert all(torch.equal(found[name], own[name]) and found[name].dtype == own[name].dtype for name in found)
    other = Net()
    for buffer in (other.frozen.data, *other.buffers()):
        buffer.zero_()
    flat.write(other, values, tensors)
    assert all(torch.equal(own[tensor.name], other.state_dict()[tensor.name]) for tensor in tensors)


def test_they_are_compared_bit_by_bit() -> None:
    model = Net()
    before = flat.checksum(model)
    for name in ("turns", "scale", "hash", "frozen"):
        with torch.no_grad():
            value = model.state_dict()[name].view(torch.uint8)
            value[0 if value.ndim == 1 else (0, 0)] ^= 1
            assert flat.checksum(model) != before
            value[0 if value.ndim == 1 else (0, 0)] ^= 1
    assert flat.checksum(model) == before


@pytest.mark.parametrize("passes", [0, 1])
def test_a_model_with_constants_is_tried_and_trained(passes: int) -> None:
    task = Task(Points())
    work = WorkSpec("constants", ModelSpec("none:none"), optimizer=OptimizerSpec("sgd", 0.1), passes=passes)
    try_out(task, task.model(), work, FedAvg(), samples())


@pytest.mark.parametrize("name", ["turns", "scale", "hash"])
def test_one_that_changes_is_refused(name: str) -> None:
    task = Task(Points(name))
    with pytest.raises(
        LocalError, match=f"the model changes its buffer '{name}', which is of a type or a size"
    ):
        try_out(task, task.model(), WORK, FedAvg(), samples())


def test_what_no_file_holds_is_refused() -> None:
    model = Net()
    model.register_buffer("wide", torch.ones(1, dtype=torch.complex128))
    with pytest.raises(
        LocalError, match="'wide' is complex128, which float32 cannot carry; set persistent=False"
    ):
        flat.describe(model)

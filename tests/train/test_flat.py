# SPDX-License-Identifier: Apache-2.0
"""A model's state: as one flat vector and back, constants that float32 cannot carry, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.state import checkpoint, flat, layout
from millpond.train.state.checkpoint import Checkpoint
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.layout import Tensor
from millpond.train.strategies.fedavg import FedAvg
from millpond.train.task.task import Task
from millpond.train.worker.trial import try_out


class Net(nn.Module):
    """Every dtype that is carried."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.fp16 = nn.Parameter(torch.randn(5).half())
        self.bf16 = nn.Parameter(torch.randn(5).bfloat16())
        self.norm = nn.BatchNorm1d(2)
        self.mask = nn.Buffer(torch.tensor([True, False]))
        self.bytes = nn.Buffer(torch.tensor([0, 255], dtype=torch.uint8))


def read(model: nn.Module) -> NDArray[np.float32]:
    vector = np.empty(layout.size(flat.describe(model)), np.float32)
    flat.read(model, vector)
    return vector


def test_the_layout_is_the_state_in_order() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    tensors = flat.describe(model)
    assert tensors[0] == Tensor("0.weight", (2, 3), "float32")
    assert tensors[-1] == Tensor("1.num_batches_tracked", (), "int64")
    assert layout.size(tensors) == 6 + 2 + 4 * 2 + 1
    assert [layout.name_at(tensors, i) for i in (0, 5, 6, 16)] == [
        "0.weight",
        "0.weight",
        "0.bias",
        "1.num_batches_tracked",
    ]


def test_all_dtypes_come_back_bit_by_bit() -> None:
    model, other = Net(), Net()
    assert model.norm.num_batches_tracked is not None
    model.norm.num_batches_tracked.fill_(1 << 24)
    vector = read(model)
    vector.flags.writeable = False
    FlatParameters(other).load(vector)
    expected, got = model.state_dict(), other.state_dict()
    assert all(got[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_whole_numbers_are_rounded_to_the_nearest() -> None:
    model = nn.BatchNorm1d(1)
    vector = read(model)
    vector[-1] = 6.6
    FlatParameters(model).load(vector)
    assert model.state_dict()["num_batches_tracked"].item() == 7


def test_writing_keeps_the_parameters_of_an_optimizer() -> None:
    model = nn.Linear(2, 1)
    before = [id(parameter) for parameter in model.parameters()]
    FlatParameters(model).load(np.ones(3, np.float32))
    assert [id(parameter) for parameter in model.parameters()] == before
    assert model.weight.tolist() == [[1, 1]]
    assert model.weight.requires_grad


def test_float64_is_refused() -> None:
    with pytest.raises(LocalError, match=r"'0.weight' is float64, .*; call .float\(\) on the model"):
        flat.describe(nn.Sequential(nn.Linear(2, 1).double()))


def test_complex_is_refused() -> None:
    with pytest.raises(LocalError, match="'weight' is complex64"):
        flat.describe(nn.Linear(2, 1, dtype=torch.complex64))


def test_whole_numbers_that_become_large_are_refused() -> None:
    model = nn.BatchNorm1d(1)
    assert model.num_batches_tracked is not None
    tensors = flat.describe(model)
    model.num_batches_tracked.fill_((1 << 24) + 1)
    with pytest.raises(LocalError, match="'num_batches_tracked' holds numbers over 16777216"):
        flat.read(model, np.empty(layout.size(tensors), np.float32), tensors)


def test_frozen_parameters_are_not_exchanged_but_compared() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).bfloat16())
    every, none = flat.describe(model), flat.checksum(model)
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    frozen = flat.describe_unsent(model)
    assert [tensor.name for tensor in frozen] == ["0.weight", "0.bias", "2.weight"]
    assert flat.describe(model) == tuple(tensor for tensor in every if tensor not in frozen)
    found = flat.checksum(model)
    assert none == 0 != found == flat.checksum(model)
    model[1].weight.data.add_(1)
    assert flat.checksum(model) == found
    model[2].weight.data[0, 0] += 1
    assert flat.checksum(model) != found


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(LocalError, match=r"^the model has no parameter that may be trained$"):
        flat.describe(nn.ReLU())


@pytest.mark.parametrize("vector", [np.zeros(4, np.float32), np.zeros(3), np.zeros((3, 1), np.float32)])
def test_a_vector_of_another_size_is_refused(vector: NDArray[np.float32]) -> None:
    with pytest.raises(LocalError, match="the model's state is 3 float32 values"):
        flat.read(nn.Linear(2, 1), vector)


def test_a_counter_that_is_not_a_number_is_refused() -> None:
    model = nn.BatchNorm1d(1)
    vector = read(model)
    vector[-1] = np.nan
    with pytest.raises(LocalError, match="'num_batches_tracked' should be whole numbers"):
        FlatParameters(model).load(vector)


WORK = WorkSpec("constants", ModelSpec("none:none"), optimizer=OptimizerSpec("sgd", 0.1), total=2)
VALUES = {
    "turns": torch.polar(torch.ones(3), torch.arange(3.0)),
    "odd": torch.tensor([1, 2, 3], dtype=torch.uint16),
    "scale": torch.tensor([[1 / 3]], dtype=torch.float64),
    "hash": torch.tensor([2654435761, -1]),
    "small": torch.tensor([1 << 24]),
}


class Constant(nn.Linear):
    """Has constants of each kind, and may change one of them."""

    def __init__(self, changes: str = "") -> None:
        super().__init__(8, 2)
        self.changes = changes
        self.frozen = nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float64), requires_grad=False)
        for name, value in VALUES.items():
            self.register_buffer(name, value.clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.changes:
            getattr(self, self.changes).mul_(3)
        return super().forward(inputs) * self.scale.float() + self.frozen.float()


class Points:
    """A task of two classes of points."""

    def __init__(self, changes: str = "") -> None:
        self.changes = changes

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return Constant(self.changes)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def samples() -> list[Any]:
    return [(row, int(row[0] > 0)) for row in torch.randn(16, 8)]


def test_they_are_not_exchanged_and_what_float32_carries_is() -> None:
    model = Constant()
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
    model = Constant()
    tensors = flat.describe_unsent(model)
    values = np.empty(layout.size(tensors), np.float32)
    flat.read(model, values, tensors)
    checkpoint.save(tmp_path / "m.safetensors", Checkpoint(values, tensors, "job", 1))
    found, own = load_file(tmp_path / "m.safetensors"), model.state_dict()
    assert all(torch.equal(found[name], own[name]) and found[name].dtype == own[name].dtype for name in found)
    other = Constant()
    for buffer in (other.frozen.data, *other.buffers()):
        buffer.zero_()
    flat.write(other, values, tensors)
    assert all(torch.equal(own[tensor.name], other.state_dict()[tensor.name]) for tensor in tensors)


def test_they_are_compared_bit_by_bit() -> None:
    model = Constant()
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
    model = Constant()
    model.register_buffer("wide", torch.ones(1, dtype=torch.complex128))
    with pytest.raises(
        LocalError, match="'wide' is complex128, which float32 cannot carry; set persistent=False"
    ):
        flat.describe(model)


class Mixed(nn.Module):
    """A state of every dtype, in an order that is not that of their widths."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Buffer(torch.tensor([True, False, True]))
        self.fp16 = nn.Parameter(torch.randn(3).half())
        self.bf16 = nn.Parameter(torch.randn(5).bfloat16())
        self.norm = nn.BatchNorm2d(3)
        self.small = nn.Buffer(torch.tensor([-3], dtype=torch.int8))
        self.full = nn.Parameter(torch.randn(2, 3))


def state(model: nn.Module) -> Checkpoint:
    tensors = flat.describe(model)
    vector = np.empty(layout.size(tensors), np.float32)
    flat.read(model, vector)
    return Checkpoint(vector, tensors, "digits", 3)


def test_any_library_reads_what_the_model_had(tmp_path: Path) -> None:
    model = Mixed()
    checkpoint.save(tmp_path / "model.safetensors", state(model))
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    expected = model.state_dict()
    assert {name: value.dtype for name, value in loaded.items()} == {n: v.dtype for n, v in expected.items()}
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_load_gives_back_what_was_saved_in_order(tmp_path: Path) -> None:
    saved = state(Mixed())
    checkpoint.save(tmp_path / "model.safetensors", saved)
    loaded = checkpoint.load(tmp_path / "model.safetensors")
    assert (loaded.tensors, loaded.job, loaded.round) == (saved.tensors, "digits", 3)
    assert loaded.vector.tobytes() == saved.vector.tobytes()


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    saved = state(Mixed())
    for name in ("a", "b"):
        checkpoint.save(tmp_path / name, saved)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_bfloat16_is_rounded_as_torch_does(tmp_path: Path) -> None:
    vector = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    checkpoint.save(tmp_path / "m", Checkpoint(vector, (Tensor("w", (1000,), "bfloat16"),), "j", 0))
    assert torch.equal(safetensors.torch.load_file(tmp_path / "m")["w"], torch.from_numpy(vector).bfloat16())


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(LocalError, match="m is not a checkpoint of millpond, or is damaged"):
        checkpoint.load(tmp_path / "m")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="No such file"):
        checkpoint.load(tmp_path / "m")


def test_a_vector_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="5 values do not fit"):
        checkpoint.save(
            tmp_path / "m", Checkpoint(np.ones(5, np.float32), (Tensor("w", (4,), "float32"),), "j", 0)
        )

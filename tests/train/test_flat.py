# SPDX-License-Identifier: Apache-2.0
"""A model's state as one flat vector, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.state import flat, layout
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.layout import Tensor


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

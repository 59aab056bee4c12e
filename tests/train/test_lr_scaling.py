# SPDX-License-Identifier: Apache-2.0
"""The learning rate follows the global batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from millpond.train.server.lr_scaling import LearningRate


def test_firecaffes_rates() -> None:
    assert LearningRate("linear", 256).at(0, 1024, 0.01) == pytest.approx(0.04)
    assert LearningRate("linear", 32).at(0, 1024, 0.01) == pytest.approx(0.32)
    assert LearningRate("sqrt", 32).at(0, 1024, 0.01) == pytest.approx(0.0566, abs=1e-4)
    assert LearningRate("none", 32).at(0, 1024, 0.01) == 0.01


@given(some.sampled_from(["linear", "sqrt", "none"]), some.integers(0, 50), some.floats(1e-6, 10))
def test_the_base_batch_has_the_rate_as_given(scaling: str, step: int, base: float) -> None:
    assert LearningRate(scaling, 64, warmup=20).at(step, 64, base) == base  # type: ignore[arg-type]
    assert LearningRate(scaling, warmup=20).at(step, 999, base) == base  # type: ignore[arg-type]


def test_warm_up_rises_evenly_from_the_rate_as_given() -> None:
    rate = LearningRate("linear", 32, warmup=10)
    rates = [rate.at(step, 128, 0.1) for step in range(13)]
    assert rates[0] == 0.1 and rates[5] == pytest.approx(0.25)
    assert rates[10:] == [0.4, 0.4, 0.4]
    rises = [after - before for before, after in pairwise(rates[:11])]
    assert rises == pytest.approx([0.03] * 10)


def test_a_small_batch_never_has_more_than_its_own_rate() -> None:
    rate = LearningRate("linear", 32, warmup=10)
    assert [rate.at(step, 8, 0.1) for step in (0, 5, 10)] == [0.025] * 3


@given(some.integers(1, 1 << 16), some.integers(1, 1 << 16), some.integers(0, 30))
def test_more_samples_never_have_a_lower_rate(few: int, more: int, step: int) -> None:
    few, more = sorted((few, more))
    for scaling in ("linear", "sqrt"):
        rate = LearningRate(scaling, 100, warmup=20)  # type: ignore[arg-type]
        assert rate.at(step, few, 0.1) <= rate.at(step, more, 0.1)


def test_momentum_of_torch_holds_gradients_and_not_rates() -> None:
    """A new rate applies at once to the gradients of before, whatever batch they came from."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    for rate in (0.1, 0.4):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.ones(1)
        optimizer.step()
    assert weight.item() == pytest.approx(-(0.1 + 0.4 * 1.5))

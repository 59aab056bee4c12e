# SPDX-License-Identifier: Apache-2.0
"""The exact weighted sum of models: its bits, bounds and refusals."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from millpond.base.errors import LocalError, RemoteError
from millpond.train.reduce.exact import BOUND, ExactSum, RefusedUpdate, scale_bits, within
from millpond.train.state.layout import Tensor

TENSORS = (
    Tensor("conv.weight", (4, 3), "float32"),
    Tensor("bn.num_batches_tracked", (), "int64"),
    Tensor("empty", (0,), "float32"),
    Tensor("head.bias", (7,), "float16"),
)
SIZE = 20
COUNTER = 12
MOST = 1 << 20

Update = tuple[NDArray[np.float32], int]


@st.composite
def updates(draw: st.DrawFn) -> list[Update]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 8))
    exponents = draw(st.sampled_from([(-40, 15), (-6, 0), (10, 15)]))
    made = []
    for _ in range(count):
        vector = (rng.uniform(-1, 1, SIZE) * 2.0 ** rng.integers(*exponents, SIZE)).astype(np.float32)
        vector[COUNTER] = rng.integers(0, 1 << 24)
        made.append((vector, int(rng.integers(1, MOST // count))))
    return made


def summed(parts: list[Update], names: list[int]) -> ExactSum:
    total = ExactSum(TENSORS, MOST)
    for (vector, samples), name in zip(parts, names, strict=True):
        total.add(vector, samples, f"csd{name}")
    return total


def tree(sums: list[ExactSum], draw: st.DataObject) -> ExactSum:
    while len(sums) > 1:
        left = sums.pop(draw.draw(st.integers(0, len(sums) - 1)))
        right = sums.pop(draw.draw(st.integers(0, len(sums) - 1)))
        left.merge(right)
        sums.append(left)
    return sums[0]


@given(updates(), st.data())
def test_any_order_gives_the_same_bits(parts: list[Update], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(parts))))
    straight = summed(parts, list(range(len(parts)))).average()
    shuffled = summed([parts[i] for i in order], list(order)).average()
    assert straight.tobytes() == shuffled.tobytes()


@given(updates(), st.data())
def test_any_tree_gives_the_same_bits(parts: list[Update], data: st.DataObject) -> None:
    straight = summed(parts, list(range(len(parts)))).average()
    leaves = [summed([part], [i]) for i, part in enumerate(parts)]
    assert straight.tobytes() == tree([*leaves, ExactSum(TENSORS, MOST)], data).average().tobytes()


@given(updates())
def test_it_is_the_average_within_the_derived_bound(parts: list[Update]) -> None:
    total = summed(parts, list(range(len(parts))))
    weights = np.array([samples for _, samples in parts], np.float64)
    exact = np.average(np.stack([v for v, _ in parts]).astype(np.float64), axis=0, weights=weights)
    exact[COUNTER] = np.rint(exact[COUNTER])
    rounding = np.abs(exact) * 2.0**-24 + 2.0**-149
    assert (np.abs(total.average() - exact) <= 1.01 * (2.0 ** -(total.scale_bits + 1) + rounding)).all()


@given(st.integers(1, 1 << 30), st.floats(2.0**-10, 1024.0))
def test_the_largest_sums_do_not_overflow(most: int, bound: float) -> None:
    tensors = (Tensor("w", (2,), "float32"), Tensor("n", (1,), "int64"))
    edge = np.float32(bound)
    if edge > bound:
        edge = np.nextafter(edge, np.float32(0))
    total = ExactSum(tensors, most, bound=bound)
    total.add(np.array([edge, -edge, 1 << 24], np.float32), most, "csd0")
    average = total.average()
    assert average[2] == 1 << 24
    assert np.abs(average[:2] - [edge, -edge]).max() <= 2.0 ** -(total.scale_bits + 1) + edge * 2.0**-24


@given(
    st.lists(st.floats(-2e5, 2e5, width=32), min_size=1, max_size=50),
    st.sampled_from([1e-3, 1.0, 65536.0, 1e5, math.inf]),
)
def test_within_is_told_value_by_value(values: list[float], bound: float) -> None:
    expected = all(abs(value) <= np.float32(bound) for value in values)
    assert within(np.array(values, np.float32), bound) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_within_no_bound(bad: float) -> None:
    values = np.ones(100, np.float32)
    assert within(values, math.inf)
    values[17] = bad
    assert not within(values, math.inf) and not within(values, 65536.0)


def test_squares_may_overflow_and_the_bound_still_holds() -> None:
    values = np.array([1e30, -3e30], np.float32)
    assert within(values, math.inf) and within(values, 3.1e30) and not within(values, 2e30)


def test_resolution_is_the_documented_one() -> None:
    assert scale_bits(1440) == 35
    assert scale_bits(1_000_000) == 26
    with pytest.raises(LocalError, match="too many"):
        scale_bits(1 << 40)
    with pytest.raises(LocalError, match="no sums of 0"):
        scale_bits(0)


def test_one_update_comes_back() -> None:
    vector = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    vector[COUNTER] = 12345
    small = ExactSum(TENSORS, 1440)
    small.add(vector, 1440, "csd0")
    np.testing.assert_allclose(small.average(), vector, rtol=1e-7, atol=2e-11)


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (3, np.nan, "csd1: update refused: a value of 'conv.weight' is nan"),
        (3, -np.inf, "csd1: update refused: a value of 'conv.weight' is -inf"),
        (SIZE - 1, BOUND * 2, "csd1: update refused: a value of 'head.bias' is beyond 65536: 131072"),
        (COUNTER, 2.0**25, "csd1: update refused: a value of 'bn.num_batches_tracked' is beyond"),
    ],
)
def test_a_bad_value_refuses_the_whole_update(index: int, value: float, text: str) -> None:
    good, bad = np.ones(SIZE, np.float32), np.full(SIZE, 5, np.float32)
    bad[index] = value
    total = summed([(good, 10)], [0])
    with pytest.raises(RefusedUpdate) as caught:
        total.add(bad, 10, "csd1")
    assert str(caught.value).startswith(text)
    assert caught.value.worker == "csd1"
    assert isinstance(caught.value, RemoteError)
    assert (total.samples, sorted(total.workers)) == (10, ["csd0"])
    assert (total.average() == 1).all()


@pytest.mark.parametrize(
    ("vector", "samples", "worker", "text"),
    [
        (np.ones(SIZE - 1, np.float32), 1, "csd1", "float32 .* belongs"),
        (np.ones(SIZE, np.float64), 1, "csd1", "float64"),
        (np.ones(SIZE, np.float32), 0, "csd1", "claims 0 samples"),
        (np.ones(SIZE, np.float32), -5, "csd1", "claims -5 samples"),
        (np.ones(SIZE, np.float32), MOST, "csd1", f"there are {MOST + 10}, not {MOST}"),
        (np.ones(SIZE, np.float32), 1, "csd0", "csd0 was counted before"),
    ],
)
def test_a_bad_claim_refuses_the_update(
    vector: NDArray[np.float32], samples: int, worker: str, text: str
) -> None:
    total = summed([(np.ones(SIZE, np.float32), 10)], [0])
    with pytest.raises(RefusedUpdate, match=text):
        total.add(vector, samples, worker)
    assert total.samples == 10


def test_merging_checks_before_it_adds() -> None:
    total = summed([(np.ones(SIZE, np.float32), 10)], [0])
    with pytest.raises(RefusedUpdate, match="csd0 was counted before"):
        total.merge(summed([(np.ones(SIZE, np.float32), 10)], [0]))
    with pytest.raises(LocalError, match="different models or bounds"):
        total.merge(ExactSum(TENSORS, MOST, bound=1.0))
    assert total.samples == 10


def test_nothing_to_average() -> None:
    with pytest.raises(LocalError, match="no update"):
        ExactSum(TENSORS, MOST).average()


def test_memory_is_a_few_models_for_any_number_of_workers() -> None:
    size = 1_000_000
    vector = np.random.default_rng(0).normal(size=size).astype(np.float32)
    tracemalloc.start()
    total = ExactSum((Tensor("w", (size,), "float32"),), 1000)
    for worker in range(20):
        total.add(vector, 10, f"csd{worker}")
    total.average()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3.6 * vector.nbytes

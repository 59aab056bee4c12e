# SPDX-License-Identifier: Apache-2.0
"""The exact sum of vectors: the same bits in any order and grouping, and its derived error."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from millpond.aggregate.exact import ExactSum, OutOfBounds, all_finite, scale_of
from millpond.aggregate.kernels import LIBRARY, Kernels, NativeKernels, NumpyKernels

SIZE = 20
Vectors = list[NDArray[np.float32]]
IS_BUILT = pytest.mark.skipif(not LIBRARY.exists(), reason="no C compiler built it")
KINDS = [NumpyKernels, pytest.param(NativeKernels, marks=IS_BUILT)]


@st.composite
def vectors(draw: st.DrawFn) -> Vectors:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    exponents = draw(st.sampled_from([(-40, 15), (-6, 0), (10, 15), (-126, -120), (100, 126)]))
    return [
        (rng.uniform(-1, 1, SIZE) * 2.0 ** rng.integers(*exponents, SIZE)).astype(np.float32)
        for _ in range(draw(st.integers(1, 8)))
    ]


def largest(parts: Vectors) -> float:
    return max(float(np.abs(part).max()) for part in parts)


def summed(parts: Vectors, scale: float, divisor: float = 1.0) -> NDArray[np.float32]:
    total, out = ExactSum(SIZE), np.empty(SIZE, np.float32)
    total.begin(scale)
    for part in parts:
        total.add(part)
    total.divide(divisor, out)
    return out


@given(vectors(), st.data())
def test_any_order_gives_the_same_bits(parts: Vectors, data: st.DataObject) -> None:
    scale = scale_of(largest(parts), len(parts))
    shuffled = data.draw(st.permutations(parts))
    assert summed(parts, scale, 7.0).tobytes() == summed(list(shuffled), scale, 7.0).tobytes()


@given(vectors(), st.data())
def test_any_grouping_gives_the_same_sums(parts: Vectors, data: st.DataObject) -> None:
    """A tree whose inner nodes add what their leaves have rounded, as float64, has the same sums."""
    scale = scale_of(largest(parts), len(parts))
    cut = data.draw(st.integers(0, len(parts)))
    whole = [np.rint(part.astype(np.float64) * scale) for part in parts]
    first, second = sum(whole[:cut], np.zeros(SIZE)), sum(whole[cut:], np.zeros(SIZE))
    assert np.abs(first + second).max() <= 2.0**53
    assert ((first + second) / scale).astype(np.float32).tobytes() == summed(parts, scale).tobytes()


@given(vectors(), st.integers(1, 10**12))
def test_the_error_is_within_its_bound_whatever_the_number_of_samples(parts: Vectors, samples: int) -> None:
    scale = scale_of(largest(parts), len(parts))
    found = summed(parts, scale, samples).astype(np.float64)
    expected = np.sum([part.astype(np.float64) for part in parts], axis=0) / samples
    rounding = np.abs(expected) * 2.0**-24 + 2.0**-149
    assert (np.abs(found - expected) <= 1.01 * (len(parts) / scale / 2 / samples + rounding)).all()
    assert len(parts) / scale <= 2.0**-50 * len(parts) ** 2 * max(largest(parts), 2.0**-149)


@given(st.floats(2.0**-149, 3e38), st.integers(1, 1 << 20))
def test_the_largest_sums_stay_whole_numbers(bound: float, terms: int) -> None:
    scale = scale_of(bound, terms)
    assert math.frexp(scale)[0] == 0.5
    assert 2.0**50 <= terms * bound * scale <= 2.0**51


def test_a_factor_scales_a_vector_and_zeros_are_zeros() -> None:
    total, out = ExactSum(3), np.empty(2, np.float32)
    total.begin(scale_of(0.0, 3))
    total.add(np.zeros(2, np.float32))
    total.divide(3.0, out)
    assert out.tolist() == [0.0, 0.0]
    total.begin(scale_of(8.0, 2))
    total.add(np.array([8.0, 4.0], np.float32), 0.5)
    total.add(np.array([1.0, 2.0], np.float32))
    total.divide(2.0, out)
    assert out.tolist() == [2.5, 2.0]


def fits(values: NDArray[np.float32], bound: float, using: Kernels | None = None) -> bool:
    """Return whether a sum takes the values at this bound."""
    total = ExactSum(len(values), using)
    total.begin(1.0)
    try:
        total.add(values, bound=bound)
    except OutOfBounds:
        return False
    return True


@pytest.mark.parametrize("kernels", KINDS)
@given(
    values=st.one_of(
        st.lists(st.floats(-2e5, 2e5, width=32), min_size=1, max_size=50),
        st.lists(st.floats(-(2.0**-60), 2.0**-60, width=32), min_size=1, max_size=50),
    ),
    bound=st.one_of(st.sampled_from([1e-3, 1.0, 65536.0, 1e5, math.inf]), st.floats(0, 2e-15)),
)
def test_a_bound_is_kept_value_by_value(
    kernels: Callable[[], Kernels], values: list[float], bound: float
) -> None:
    expected = all(abs(value) <= np.float32(bound) for value in values)
    assert fits(np.array(values, np.float32), bound, kernels()) == expected


@pytest.mark.parametrize("bound", [0.0, -0.0, 1e-44, 1e-30, 1e-19, 1e-15, 1.0])
def test_a_value_just_beyond_a_bound_is_seen(bound: float) -> None:
    values = np.zeros(100, np.float32)
    values[3] = bound
    assert fits(values, bound)
    values[3] = -np.nextafter(np.float32(bound), np.float32(1e30))
    assert not fits(values, bound)


@pytest.mark.parametrize("largest", [5e-324, 1e-300, 1e-200])
def test_a_bound_below_all_values_has_a_scale(largest: float) -> None:
    """A source that announces it must send zeros, and cannot keep the others from a sum."""
    assert not fits(np.full(SIZE, 1e-45, np.float32), largest)
    zeros = [np.zeros(SIZE, np.float32)]
    assert not summed(zeros, scale_of(largest, 1 << 20), 1e12).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 99])
@pytest.mark.parametrize("kernels", KINDS)
def test_a_value_that_is_not_finite_is_within_no_bound(
    kernels: Callable[[], Kernels], place: int, bad: float
) -> None:
    values = np.ones(100, np.float32)
    assert fits(values, math.inf, kernels()) and all_finite(values)
    values[place] = bad
    assert not fits(values, math.inf, kernels()) and not fits(values, 65536.0, kernels())
    assert not all_finite(values)


@IS_BUILT
@given(
    st.integers(0, 70).flatmap(lambda n: st.lists(st.floats(-9, 9, width=32), min_size=n, max_size=n)),
    st.sampled_from([1.0, 0.3, 1e-3]),
)
def test_both_kinds_of_loops_give_the_same_bits(values: list[float], factor: float) -> None:
    vector, found = np.array([*values, 1.5] * 3, np.float32), []
    for using in (NativeKernels(), NumpyKernels()):
        total, mean = ExactSum(len(vector), using), np.empty(len(vector), np.float32)
        total.begin(scale_of(9.0, 3))
        total.add(vector, factor)
        total.add(vector[::-1].copy())
        squares = using.squares(vector)
        total.merge(total.totals(len(vector)).copy())
        total.divide(7.0, mean)
        found.append((squares, total.totals(len(vector)).tobytes(), mean.tobytes()))
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(float((vector.astype(np.float64) ** 2).sum()))


@pytest.mark.parametrize("kernels", KINDS)
@given(parts=vectors(), data=st.data())
def test_totals_of_a_group_are_merged_to_the_same_bits(
    kernels: Callable[[], Kernels], parts: Vectors, data: st.DataObject
) -> None:
    scale = scale_of(largest(parts), len(parts))
    cut = data.draw(st.integers(0, len(parts)))
    sums = [ExactSum(SIZE, kernels()) for _ in range(2)]
    for total, group in zip(sums, (parts[:cut], parts[cut:]), strict=True):
        total.begin(scale)
        for part in group:
            total.add(part)
    sums[0].merge(sums[1].totals(SIZE))
    mean = np.empty(SIZE, np.float32)
    sums[0].divide(7.0, mean)
    assert mean.tobytes() == summed(parts, scale, 7.0).tobytes()


@pytest.mark.parametrize("kernels", KINDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 0.5, 2.0**52])
def test_totals_that_can_be_none_are_refused(kernels: Callable[[], Kernels], wrong: float) -> None:
    total = ExactSum(9, kernels())
    total.begin(1.0)
    total.merge(np.full(9, -(2.0**51)))
    others = np.ones(9)
    others[8] = wrong
    with pytest.raises(OutOfBounds):
        total.merge(others)

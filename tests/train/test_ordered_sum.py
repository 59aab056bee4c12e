# SPDX-License-Identifier: Apache-2.0
"""A step's sum has the same bits in any order of arrival, and counts only the replies that came."""

from __future__ import annotations

import itertools

import numpy as np

from millpond.train.reduce.ordered import OrderedSum


def vectors(count: int) -> list[np.ndarray]:
    """Of values so unlike that their sum depends on its order."""
    rng = np.random.default_rng(1)
    return [(rng.normal(size=1000) * 10.0 ** rng.integers(-6, 6)).astype(np.float32) for _ in range(count)]


def mean(total: OrderedSum, arrivals: list[int], given: list[np.ndarray]) -> bytes:
    for key in range(len(given)):
        total.announce(key)
    for key in arrivals:
        total.add(key, given[key], key + 1)
    total.divide()
    return total.total.tobytes()


def test_any_order_of_arrival_gives_the_same_bits() -> None:
    total, given = OrderedSum(np.full(1000, np.nan, np.float32)), vectors(5)
    found = {mean(total, list(order), given) for order in itertools.permutations(range(5))}
    assert len(found) == 1
    exact = sum(vector.astype(np.float64) for vector in given) / 15
    assert np.allclose(np.frombuffer(found.pop(), np.float32), exact, rtol=1e-4, atol=1e-3)


def test_the_order_matters_without_it() -> None:
    given = vectors(5)
    assert len({sum(order[1:], order[0]).tobytes() for order in itertools.permutations(given)}) > 1


def test_what_does_not_come_is_left_out_and_the_next_step_begins_anew() -> None:
    total, given = OrderedSum(np.full(1000, np.nan, np.float32)), vectors(4)
    for _ in range(2):
        found = mean(total, [3, 1], given)
        assert np.array_equal(np.frombuffer(found, np.float32), (given[1] + given[3]) / np.float32(6))
        assert total.samples == 0

# SPDX-License-Identifier: Apache-2.0
"""Exact noise: its distribution, with float64 deciding and with rational arithmetic deciding."""

import math
import os
import random
from fractions import Fraction

import numpy as np
import pytest

from millpond.privacy import discrete_gaussian as module
from millpond.privacy.accounting import MOST_SIGMA
from millpond.privacy.discrete_gaussian import discrete_gaussian


def of_seed(seed: int) -> module.Random:
    """Return bytes that are the same in each run."""
    return random.Random(seed).randbytes


@pytest.mark.parametrize(("sigma", "bits", "size"), [(1, 52, 200_000), (7, 52, 200_000), (2, 3, 4_000)])
def test_samples_have_the_distribution(sigma: int, bits: int, size: int) -> None:
    found = discrete_gaussian(sigma, size, of_seed(3), bits)
    reach = np.arange(-3 * sigma, 3 * sigma + 1)
    weights = np.exp(-(np.arange(-40 * sigma, 40 * sigma + 1.0) ** 2) / (2 * sigma**2))
    expected = size * np.exp(-(reach**2) / (2 * sigma**2)) / weights.sum()
    counts = np.array([np.count_nonzero(found == each) for each in reach])
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < len(reach) + 5 * math.sqrt(2 * len(reach))


@pytest.mark.parametrize("sigma", [1 << 24, MOST_SIGMA])
def test_a_large_sigma(sigma: int) -> None:
    found = discrete_gaussian(sigma, 100_000, os.urandom) / sigma
    assert abs(found.mean()) < 6 / math.sqrt(100_000)
    assert abs(found.std() - 1) < 0.02
    assert 3.5 < np.abs(found).max() < 8


def test_a_sigma_out_of_range() -> None:
    for sigma in (0, MOST_SIGMA + 1):
        with pytest.raises(ValueError, match="sigma"):
            discrete_gaussian(sigma, 1, os.urandom)


def test_the_bounds_of_exp_hold_it() -> None:
    """A shorter prefix's bounds hold those of a longer one, and e**-1 by its series."""
    series = sum(Fraction((-1) ** k, math.factorial(k)) for k in range(80))
    for bits in (1, 52, 116):
        low, high = module._bounds(Fraction(1), bits)
        assert low < series * 2**bits < high
        assert high - low < 1


def test_few_bits_are_decided_as_many_are() -> None:
    """A coin whose first bits leave it open falls with its probability."""
    prefix = int(2**8 * math.exp(-0.5))  # exp(-.5) lies in this unit: 0.6065 * 256 = 155.27
    heads = sum(module._is_below(prefix, 8, Fraction(1, 2), os.urandom) for _ in range(4_000))
    share = 256 * math.exp(-0.5) - prefix
    assert abs(heads / 4_000 - share) < 6 * math.sqrt(share * (1 - share) / 4_000)

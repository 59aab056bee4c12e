# SPDX-License-Identifier: Apache-2.0
"""Pure: what noise costs, in zero-concentrated differential privacy (Bun and Steinke 2016, arXiv:1605.02658).

An answer costs ``rho``; answers about the same samples add up. Two sets of samples are neighbours if one has
what the other has of a unit, a device or a group of samples, and zeros in its place (Kairouz et al. 2021,
arXiv:2102.06387): the numbers of samples are the same, and no secret. Nothing is amplified by sampling, as
the host chooses what is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MOST_SIGMA = 1 << 54
"""The largest standard deviation of noise that can be drawn: a sample fits into 64 bits."""
_ROUNDING = 1 + 2.0**-20
"""What is added to each cost, so that no rounding makes it less than it is."""
_GOLDEN = (math.sqrt(5) - 1) / 2


def epsilon_of(rho: float, delta: float) -> float:
    """Return an ``epsilon`` for which what costs ``rho`` is (epsilon, delta)-private: the least over all
    orders of ``order * rho + log(1 - 1 / order) - log(delta * order) / (order - 1)`` (Canonne, Kamath and
    Steinke 2020, proposition 12). Each order has one that holds, so that no search can find too little.
    """
    if not (rho >= 0 and 0 < delta < 1):
        raise ValueError(f"rho is {rho}, and delta {delta}, not in 0 to 1")
    if rho == 0:
        return 0.0

    def of_order(place: float) -> float:
        above = math.exp(place)  # the order less 1
        return (1 + above) * rho - math.log1p(1 / above) - (math.log(delta) + math.log1p(above)) / above

    return max(0.0, _least(of_order, -20.0, 60.0)) * _ROUNDING


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the least value of a function that falls and then rises, by golden sections."""
    one, two = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_one, at_two = function(one), function(two)
    for _ in range(100):
        if at_one < at_two:
            high, two, at_two = two, one, at_one
            one = high - _GOLDEN * (high - low)
            at_one = function(one)
        else:
            low, one, at_one = one, two, at_two
            two = low + _GOLDEN * (high - low)
            at_two = function(two)
    return min(at_one, at_two)


def rho_of(epsilon: float, delta: float) -> float:
    """Return the most that may be spent if all together is to be (epsilon, delta)-private."""
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}, not above 0")
    low, high = 0.0, 1.0
    while epsilon_of(high, delta) <= epsilon:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(middle, delta) <= epsilon else (low, middle)
    return low


def rho_of_sum(sensitivity: float, sigma: float, terms: int = 1, size: int = 1) -> float:
    """Return what a sum costs with the noise of ``terms`` discrete Gaussians of ``sigma`` each, which is not
    quite one (Kairouz et al. 2021, proposition 14), if no unit changes the ``size`` integers of the sum by
    more than a vector of the L2 norm ``sensitivity``. Raises ValueError for a sigma below 0.5.
    """
    if not (sigma >= 0.5 and terms >= 1):
        raise ValueError(f"sigma is {sigma}, not 0.5 or more, or there are no terms")
    far = 10 * sum(math.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)) for k in range(1, terms))
    near = sensitivity / (math.sqrt(terms) * sigma)
    return min(near**2 / 2 + far * size, (near + far * math.sqrt(size)) ** 2 / 2) * _ROUNDING


def sigma_of_sum(rho: float, sensitivity: float, terms: int = 1, size: int = 1) -> int:
    """Return the least ``sigma`` of each of ``terms`` discrete Gaussians with which their sum costs ``rho``
    at most. It is an integer: in units in which it is 16 or more, neither this nor the number of terms costs
    much. Raises ValueError if it is beyond what ``discrete_gaussian`` can draw.
    """
    if not (rho > 0 and sensitivity >= 0):
        raise ValueError(f"rho is {rho}, not above 0, or the sensitivity {sensitivity} below 0")
    low = max(1, math.floor(sensitivity / math.sqrt(2 * rho * terms)))
    high = low
    while rho_of_sum(sensitivity, high, terms, size) > rho:
        low, high = high, 2 * high
        if high > 2 * MOST_SIGMA:
            break
    while low < high:
        middle = (low + high) // 2
        if rho_of_sum(sensitivity, middle, terms, size) > rho:
            low = middle + 1
        else:
            high = middle
    if low > MOST_SIGMA:
        raise ValueError(f"sigma is {low}, and {MOST_SIGMA} at most")
    return low

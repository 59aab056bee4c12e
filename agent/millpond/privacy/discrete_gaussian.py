# SPDX-License-Identifier: Apache-2.0
"""Pure: exact samples of the discrete Gaussian (Canonne, Kamath and Steinke 2020, arXiv:2004.00010).

Noise of floating-point numbers tells the values below it by its lowest bits (Mironov 2012); integers do not.
The sampler is algorithm 3 of the paper, for arrays: it draws from the discrete Laplace distribution and
accepts with probability ``exp(-g)`` for a rational ``g``. The first bits of a uniform number decide where
float64 is sure of ``exp(-g)``; where it is not, rational arithmetic decides with as many bits as it needs. So
no sample depends on how a processor rounds.

The noise is Gaussian, not Skellam: it has lighter tails, so fewer bits of a masked word; its zCDP has a
closed form; and Poisson numbers of a mean of 10**12 have no sampler that is exact and as fast.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from millpond.privacy.accounting import MOST_SIGMA

Random = Callable[[int], bytes]
"""Returns so many bytes that nobody can guess, such as ``os.urandom``."""
Integers = NDArray[np.int64]
BITS = 52
_ERROR = 2.0**-46  # of exp(-g) in float64: far more than a few units in the last place of g and exp
_BLOCK = 1 << 16
_Exponents = Callable[[int], Fraction]


def discrete_gaussian(sigma: int, size: int, random: Random, bits: int = BITS) -> Integers:
    """Return ``size`` samples, each ``x`` with a probability that is proportional to
    ``exp(-x**2 / (2 * sigma**2))``, of the bytes of ``random``. Fewer ``bits`` of a first draw give the same
    distribution more slowly. Raises ValueError for a ``sigma`` that is not in 1 to MOST_SIGMA.
    """
    if not 1 <= sigma <= MOST_SIGMA:
        raise ValueError(f"sigma is {sigma}, not 1 to {MOST_SIGMA}")
    found, filled = np.empty(size, np.int64), 0
    while filled < size:
        block = _candidates(sigma, min(_BLOCK, 3 * (size - filled) + 8), random, bits)[: size - filled]
        found[filled : filled + len(block)] = block
        filled += len(block)
    return found


def _candidates(sigma: int, count: int, random: Random, bits: int) -> Integers:
    """Return the samples that are accepted of ``count`` draws."""
    laplace = _discrete_laplace(sigma, count, random, bits)
    distance = np.abs(laplace) - sigma
    exponents = np.square(distance / sigma) / 2

    def exact(index: int) -> Fraction:
        return Fraction(int(distance[index]) ** 2, 2 * sigma**2)

    return laplace[_coins(exponents, exact, random, bits)]


def _discrete_laplace(scale: int, count: int, random: Random, bits: int) -> Integers:
    """Return those that are accepted of ``count`` draws of integers ``x`` with a probability that is
    proportional to ``exp(-abs(x) / scale)`` (algorithm 2).
    """
    words = np.frombuffer(random(8 * count), np.uint64)
    limit = (1 << 63) // scale * scale  # beyond it some remainders would be more frequent
    negative, words = (words >> np.uint64(63)).astype(bool), words & np.uint64((1 << 63) - 1)
    negative, words = negative[words < limit], words[words < limit]
    below = (words % np.uint64(scale)).astype(np.int64)
    accepted = _coins(below / scale, lambda index: Fraction(int(below[index]), scale), random, bits)
    negative, below = negative[accepted], below[accepted]
    found = below + scale * _geometric(len(below), random, bits)
    kept = ~(negative & (found == 0))  # zero has one sign
    signed: Integers = np.where(negative, -found, found)[kept]
    return signed


def _geometric(count: int, random: Random, bits: int) -> Integers:
    """Return how often a coin of probability ``exp(-1)`` shows heads before it shows tails, ``count``
    times.
    """
    found, going = np.zeros(count, np.int64), np.arange(count)
    while len(going):
        going = going[_coins(np.ones(len(going)), lambda _index: Fraction(1), random, bits)]
        found[going] += 1
    return found


def _coins(exponents: NDArray[np.float64], exact: _Exponents, random: Random, bits: int) -> NDArray[np.bool_]:
    """Return for each of the ``exponents``, whose ``exact`` values come by index, True with the probability
    ``exp(-exponent)``.
    """
    drawn = np.frombuffer(random(8 * len(exponents)), np.uint64) >> np.uint64(64 - bits)
    probability, unit = np.exp(-exponents), 2.0**-bits
    lowest = drawn.astype(np.float64) * unit
    heads = lowest + unit <= probability - _ERROR
    unsure = ~heads & (lowest < probability + _ERROR)
    for index in np.flatnonzero(unsure):
        heads[index] = _is_below(int(drawn[index]), bits, exact(int(index)), random)
    return heads


def _is_below(prefix: int, bits: int, exponent: Fraction, random: Random) -> bool:
    """Return whether a uniform number of [0, 1) that begins with the ``bits`` of ``prefix``, and goes on as
    ``random`` says, is below ``exp(-exponent)``.
    """
    if not exponent:
        return True
    while True:
        low, high = _bounds(exponent, bits)
        if prefix + 1 <= low:
            return True
        if prefix >= high:
            return False
        prefix, bits = prefix << 64 | int.from_bytes(random(8)), bits + 64


def _bounds(exponent: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Return a lower and an upper bound of ``2**bits * exp(-exponent)``, nearer than 1 to each other."""
    digits = bits // 3 + len(str(int(exponent))) + 20
    with decimal.localcontext(prec=digits, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX):
        found = (-Decimal(exponent.numerator) / exponent.denominator).exp()  # exp is rounded correctly
    error = Fraction(found) * (exponent + 2) / 10 ** (digits - 1)
    return (Fraction(found) - error) * 2**bits, (Fraction(found) + error) * 2**bits

# SPDX-License-Identifier: Apache-2.0
"""Pure: how well an attack does: samples that it rebuilds, members that it tells from others, intervals."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_PSNR, LEAST_SSIM = 20.0, 0.9
"""From both on a sample counts as rebuilt. A picture of the class's mean has about 14 dB."""
_NORMAL = 1.96
"""Standard deviations of a 95 % interval."""


def psnr(one: Floats, other: Floats) -> Floats:
    """Return the peak signal-to-noise ratio in dB of each of ``one`` [n, d] with each of ``other`` [m, d],
    values within 0 and 1: [n, m].
    """
    squares = ((one[:, None] - other[None]) ** 2).mean(2)
    found: Floats = -10 * np.log10(np.maximum(squares, 1e-10))
    return found


def ssim(one: Floats, other: Floats) -> Floats:
    """Return the structural similarity of each of ``one`` [n, d] with each of ``other`` [m, d], [n, m], with
    the whole picture as the one window (Wang et al. 2004, equation 13): ours are of 8x8 pixels.
    """
    mean_1, mean_2 = one.mean(1)[:, None], other.mean(1)[None]
    spread_1, spread_2 = one.var(1)[:, None], other.var(1)[None]
    common = one @ other.T / one.shape[1] - mean_1 * mean_2
    c_1, c_2 = 0.01**2, 0.03**2
    above = (2 * mean_1 * mean_2 + c_1) * (2 * common + c_2)
    below = (mean_1**2 + mean_2**2 + c_1) * (spread_1 + spread_2 + c_2)
    found: Floats = above / below
    return found


def rebuilt(guesses: Floats, samples: Floats) -> int:
    """Return how many ``samples`` [n, d] are rebuilt by ``guesses`` [m, d], each guess for one sample: the
    nearest pairs come first.
    """
    guesses = np.clip(guesses, 0.0, 1.0)
    ratios, like = psnr(guesses, samples), ssim(guesses, samples)
    near = np.argwhere((ratios >= LEAST_PSNR) & (like >= LEAST_SSIM))
    used, found = set[int](), set[int]()
    for guess, sample in near[np.argsort(-ratios[near[:, 0], near[:, 1]])].tolist():
        if guess not in used and sample not in found:
            used.add(guess)
            found.add(sample)
    return len(found)


def auc(members: Floats, others: Floats) -> float:
    """Return the probability that a member has a larger score than another one, ties count half."""
    ordered = np.sort(others)
    below, to = (np.searchsorted(ordered, members, side) for side in ("left", "right"))
    return float((below + to).mean() / 2 / len(others))


def caught(members: Floats, others: Floats, wrong: float = 0.01) -> int:
    """Return how many members have a score above that of all but a share ``wrong`` of the others."""
    allowed = math.floor(wrong * len(others))
    threshold = np.sort(others)[len(others) - 1 - allowed]
    return int((members > threshold).sum())


def interval(found: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of which ``found`` were seen (Wilson 1927)."""
    squares = _NORMAL**2 / of
    middle = (found / of + squares / 2) / (1 + squares)
    half = _NORMAL / (1 + squares) * math.sqrt(found / of * (1 - found / of) / of + squares / 4 / of)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def told(found: int, of: int) -> str:
    """Return a count with its interval, for the words of a row."""
    low, high = interval(found, of)
    return f"{found} of {of}, 95 % interval {100 * low:.1f} to {100 * high:.1f} %"

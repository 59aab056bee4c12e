# SPDX-License-Identifier: Apache-2.0
"""Pure: ranges of positions in an order of samples. An agent at rest imports this, so it needs no numpy."""

from __future__ import annotations

Ranges = tuple[tuple[int, int], ...]
"""Positions in an order of samples: (start, stop) of each range."""


def count(ranges: Ranges) -> int:
    """Return the number of positions in the ranges."""
    return sum(stop - start for start, stop in ranges)


def split(ranges: Ranges, wanted: int) -> tuple[Ranges, Ranges]:
    """Divide ranges into the first ``wanted`` positions (or all) and the rest."""
    first: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(ranges):
        if stop - start > wanted:
            cut = ((start, start + wanted),) if wanted else ()
            return (*first, *cut), ((start + wanted, stop), *ranges[number + 1 :])
        first.append((start, stop))
        wanted -= stop - start
    return tuple(first), ()

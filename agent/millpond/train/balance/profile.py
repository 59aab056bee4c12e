# SPDX-License-Identifier: Apache-2.0
"""Pure: the profile of a worker, as messages have it; without numpy, as commands import it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One batch: the median of its seconds, and the memory's high-water mark in bytes."""

    batch: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """The measurements of a worker of some kind; points ascend by batch."""

    worker: str
    kind: str
    points: tuple[Point, ...]

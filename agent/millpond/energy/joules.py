# SPDX-License-Identifier: Apache-2.0
"""Pure: energy from counters, power sensors or declared watts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from millpond.base.errors import ConfigError
from millpond.base.keys import Key

Source = Literal["rapl", "hwmon", "declared", "unknown"]
"""The source of a figure: counters in the processors (RAPL), sensors of the board (hwmon), declared watts, or
none.
"""


@dataclass(frozen=True, slots=True)
class Watts:
    """A machine's declared power in watts."""

    idle: Annotated[float, Key("with all processors idle, 0 or more")]
    busy: Annotated[float, Key("with all processors busy, not less than `idle`")]


_MOST = 1e6


def check(watts: Watts, where: str) -> Watts:
    """Return the same watts if they make sense. Raises ConfigError naming ``where`` and the key."""
    for key, value, least in (("idle", watts.idle, 0.0), ("busy", watts.busy, watts.idle)):
        if not least <= value <= _MOST:
            raise ConfigError(f"{where}: {key}: {value:g} is not between {least:g} and {_MOST:g}")
    return watts


@dataclass(frozen=True, slots=True)
class Joules:
    """An amount of energy in joules, and its source."""

    joules: float
    source: Source


def counted(before: int, now: int, largest: int | None) -> int:
    """Return the increase of a counter. After ``largest`` comes 0, at most once between two readings; without
    ``largest`` a counter that is behind was begun anew, from 0.
    """
    if now >= before:
        return now - before
    return now if largest is None else now + largest + 1 - before


def under(before: float, now: float, seconds: float) -> float:
    """Return the joules between two readings of a power in watts, as if it had changed evenly."""
    return (before + now) / 2 * seconds


def declared(watts: Watts, seconds: float, busy_seconds: float, processors: int) -> float:
    """Return the joules of a machine whose ``processors`` together worked for ``busy_seconds`` of the
    ``seconds``: power grows evenly with the share of processors that are busy.
    """
    share = min(busy_seconds / processors, seconds)
    return watts.idle * seconds + (watts.busy - watts.idle) * share

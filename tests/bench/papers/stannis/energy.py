# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): section V-B's energy per image, by declared watts."""

from __future__ import annotations

from bench.balance.csds import ALL, FULL, QUICK, Lengths, interrupt
from bench.balance.paper import HOST_SPEED, MOBILENET, SPEEDS_36
from bench.balance.team import emulation
from bench.experiment import Run
from bench.papers.exhibit import Exhibit, Shown, Value, computed, measured
from millpond.energy.joules import Watts, declared

ALONE, TOGETHER = 1.32, 0.54
"""Joules per image, of the host alone and of host and 36 CSDs."""
_SPEED = SPEEDS_36["host + 36 CSD"]
HOST_WATTS, ALL_WATTS = ALONE * HOST_SPEED, TOGETHER * _SPEED
"""Watts of the whole server that these imply."""


def per_image(watts: float, speed: float) -> float:
    """Return the joules per image of machines that are busy all the time, by their declared ``watts``."""
    return declared(Watts(watts, watts), 1.0, 1.0, 1) / speed


def measure(run: Run) -> Shown:
    """Take the speeds of the host alone, and with 36 virtual CSDs."""
    lengths = _short(QUICK if run.quick else FULL)
    found = interrupt(run, MOBILENET, [(0, "balance"), (ALL, "balance")], lengths)
    joules = [per_image(HOST_WATTS, one.normal) for one in found[0, "balance"]]
    with_all = [per_image(ALL_WATTS, one.normal) for one in found[ALL, "balance"]]
    gains = [before / after for before, after in zip(joules, with_all, strict=True)]
    rows = (
        measured("host alone", "J/img", ALONE, joules),
        measured(f"host + {ALL} CSDs", "J/img", TOGETHER, with_all),
        measured(f"host alone over host + {ALL} CSDs", "x", 2.45, gains),
        computed("the paper's 1.32 over its 0.54 J/img", "x", 2.45, ALONE / TOGETHER),
        computed(
            f"host + {ALL} CSDs at the paper's {_SPEED} img/s",
            "J/img",
            TOGETHER,
            per_image(ALL_WATTS, _SPEED),
        ),
        *_implied(),
    )
    return Shown(
        rows,
        "declared watts, those that the paper's joules and speeds imply: no power is measured; "
        + emulation(lengths.factor, lengths.planned),
        "Our speed with 36 CSDs has no exchange in it, and is the greater; with the paper's speed the "
        "declared watts give the paper's joules by construction.",
    )


def _implied() -> list[Value]:
    each = (ALL_WATTS - HOST_WATTS) / ALL
    return [
        computed("power of the paper's server, host alone: 1.32 J/img x 33.4 img/s", "W", None, HOST_WATTS),
        computed(
            f"power of the paper's server, host + {ALL} CSDs: 0.54 J/img x {_SPEED} img/s",
            "W",
            None,
            ALL_WATTS,
        ),
        computed("power that a CSD of the paper adds when it works, by these two", "W", None, each),
    ]


def _short(lengths: Lengths) -> Lengths:
    """Return the same without the steps after an interruption."""
    return Lengths(lengths.repeats, lengths.begin, lengths.normal, 1, 1, lengths.planned, lengths.counts)


EXHIBIT = Exhibit("energy", "Section V-B: Energy per image", measure)

# SPDX-License-Identifier: Apache-2.0
"""Pure: the plan of a run: its measurements, their length and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.tunnel.figures import HEADLINES, RELAYS, Headline, resolve

ENGINES = ("c", "python")
GROUPS = (
    ("loopback", "veth", "relay", "relay_threads", "c", "python", "ssh", "ssh_w", "socat"),
    ("relay_1500", "c_1500", "python_1500"),
    ("relay_1500_plain", "c_1500_plain", "python_1500_plain", "ssh_w_1500", "socat_1500"),
)
"""The routes in the order of the table: large packets, 1500 bytes with GSO, 1500 bytes without. Those that
are compared stand together, so that they are measured together.
"""

ROUTES = tuple(route for group in GROUPS for route in group)
FLOODED = ("veth", "relay", "relay_threads", "c", "python", "socat")
"""The routes whose packet rate is measured: those of each kind that do best."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Repeats and seconds of one measurement of each kind; ``limit`` is the whole run's."""

    repeats: int
    tcp: float
    rtt: float
    pps: float
    idle_repeats: int
    idle: float
    crowd: int
    crowd_repeats: int
    crowd_seconds: float
    limit: float


FULL = Durations(7, 0.6, 0.2, 0.4, 3, 10.0, 36, 3, 4.0, 3600)
QUICK = Durations(1, 0.4, 0.1, 0.3, 1, 2.0, 4, 1, 1.0, 300)


def crowd_key(engine: str) -> str:
    """What the tunnels of an engine that run at once are called when they cannot."""
    return f"crowd_{engine}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The phases and routes of a run; ``engines`` are those whose crowd is measured."""

    durations: Durations
    phases: frozenset[str]
    routes: tuple[str, ...]
    engines: tuple[str, ...] = ENGINES

    def order(self, repeat: int, routes: Sequence[str]) -> list[str]:
        """The routes for this repeat: each begins elsewhere, and then goes back the way it came.

        So every route has the same middle in time, and a slow change of the machine's load cancels out.
        """
        shift = repeat * 3 % max(1, len(routes))
        there = [*routes[shift:], *routes[:shift]]
        return [*there, *reversed(there)]


def plan(*, quick: bool, only: Sequence[str]) -> Plan:
    """All, or what the headlines named ``only`` need. Raises ValueError for a name that is none."""
    durations = QUICK if quick else FULL
    chosen = [_headline(name) for name in only]
    if not chosen:
        return Plan(durations, frozenset({"tcp", "rtt", "pps", "idle", "crowd"}), ROUTES)
    phases = frozenset(line.phase for line in chosen)
    named = {name for line in chosen if line.phase != "crowd" for name in (line.route, line.peer) if name}
    named |= set(RELAYS) if "relay" in named else set()
    resolved = {resolve(name, engine) for name in named for engine in ENGINES}
    return Plan(durations, phases, tuple(route for route in ROUTES if route in resolved))


def _headline(name: str) -> Headline:
    for line in HEADLINES:
        if line.figure == name:
            return line
    raise ValueError(
        f"no figure is called {name!r}: it is one of {', '.join(line.figure for line in HEADLINES)}"
    )

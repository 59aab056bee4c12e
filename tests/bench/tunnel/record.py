# SPDX-License-Identifier: Apache-2.0
"""Pure: the record of all measurements, by quantity and route, one value per repeat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class Record:
    """Values in the order of the repeats; a route that failed has fewer, and a reason."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.missing: dict[str, str] = {}
        """Why a route has no values, or no more of them, by its key."""
        self.failed: set[str] = set()
        """Those of them that could have had."""

    def add(self, route: str, **values: float) -> None:
        """One repeat's values, by quantity."""
        for quantity, value in values.items():
            self._values[quantity, route].append(value)

    def values(self, quantity: str, route: str) -> Sequence[float]:
        """What was measured; empty if nothing was."""
        return self._values.get((quantity, route), ())

    def default_engine(self) -> str:
        """What a tunnel runs if nobody chooses: C where it is built, and so was measured."""
        return "c" if any(route == "c" for _, route in self._values) else "python"

    def ratios(self, quantity: str, route: str, peer: str) -> list[float]:
        """Route over peer, repeat by repeat."""
        pairs = zip(self.values(quantity, route), self.values(quantity, peer), strict=False)
        return [ours / theirs for ours, theirs in pairs if theirs]

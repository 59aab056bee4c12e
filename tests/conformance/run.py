# SPDX-License-Identifier: Apache-2.0
"""Edge: one run: its parts, one after the other, and its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.harness import LimitReachedError, limited
from conformance import between, cuts, outcomes, posix, results
from conformance.context import Context, Update
from conformance.results import Entry
from millpond.base.errors import MillpondError

_SECONDS = 2 * 3600
"""For one part."""


@dataclass(frozen=True, slots=True)
class Part:
    """One: the figures it has, with their unit, and how it is run."""

    figures: Sequence[str]
    unit: str
    run: Callable[[Context, Update], None]


PARTS: Mapping[str, Part] = {
    "posix": Part(posix.FIGURES, "", posix.run),
    "cuts": Part(outcomes.FIGURES, "records", cuts.run),
    "sqlite": Part(("sqlite",), "failures", between.run),
}


class Run:
    """One run, in mounts of its own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._entries: dict[str, Entry] = {}
        for part in PARTS.values():
            self._add(_missing(part, part.figures, "not asked for"))

    def all(self) -> bool:
        """All parts that are wanted, one after the other. Whether none of them broke."""
        wanted = self._context.arguments.part or PARTS
        broken = [name for name in wanted if not self._do(PARTS[name])]
        return not broken

    def _do(self, part: Part) -> bool:
        given = set[str]()

        def update(entries: Sequence[Entry]) -> None:
            given.update(entry["figure"] for entry in entries)
            self._add(entries)
            self._write()

        try:
            with limited(_SECONDS):
                part.run(self._context, update)
        except (MillpondError, OSError, LimitReachedError) as error:  # of a mount, mostly
            self._context.say(f"it broke: {error}")
            figures = [figure for figure in part.figures if figure not in given]
            update(_missing(part, figures, f"it broke: {error}"))
            return False
        return True

    def _add(self, entries: Sequence[Entry]) -> None:
        self._entries.update({entry["figure"]: entry for entry in entries})

    def _write(self) -> None:
        path = self._context.arguments.output / "conformance.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(list(self._entries.values()), indent=2) + "\n")
        fresh.rename(path)

    def report(self) -> None:
        """What was found, for who reads it at the end."""
        print("", *results.lines(list(self._entries.values())), "", sep="\n")
        self._context.say(f"written: {self._context.arguments.output}/conformance.json")


def _missing(part: Part, figures: Sequence[str], why: str) -> Sequence[Entry]:
    return [results.missing_entry(figure, part.unit, why) for figure in figures]

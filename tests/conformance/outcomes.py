# SPDX-License-Identifier: Apache-2.0
"""Pure: the outcomes of power cuts and of kills under load, as rows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.rows import Row
from conformance.readback import CLASSES, Fate, Findings
from conformance.records import Record
from conformance.results import Entry

FIGURES = ("power_cuts_lost", "power_cuts_garbled", "power_cuts_torn", "kills_lost")
_SHOWN = 20
_HOW = "ext4 on a loop file stopped by FS_IOC_SHUTDOWN; what the drive was sent is not forgotten"


@dataclass(slots=True)
class Outcome:
    """One blow: how many records each side had been promised, what was read back in each place, and why it
    does not count, if it does not.
    """

    name: str
    power: bool
    acknowledged: Mapping[str, int] = field(default_factory=dict)
    findings: Mapping[str, Findings] = field(default_factory=dict)
    complaint: str = ""

    @property
    def lost(self) -> list[str]:
        """The acknowledged records that one of the places does not hold, each once."""
        found = dict[Record, str]()
        for place, findings in self.findings.items():
            for record, seen in findings.lost.items():
                found.setdefault(record, f"{self.name}: {seen} ({place})")
        return list(found.values())

    @property
    def garbled(self) -> list[str]:
        """What is in one of the places, and nobody wrote."""
        return [
            f"{self.name}: {seen} ({place})"
            for place, findings in self.findings.items()
            for seen in findings.garbled
        ]

    @property
    def fates(self) -> Counter[tuple[Fate, str]]:
        """Of what was not acknowledged, where it was read back first."""
        return next(iter(self.findings.values())).fates if self.findings else Counter()

    def brief(self) -> str:
        """In one line."""
        if self.complaint:
            return f"{self.name}: does not count: {self.complaint}"
        promised = ", ".join(f"{count} by {side}" for side, count in self.acknowledged.items())
        return f"{self.name}: acknowledged {promised}; lost {len(self.lost)}, garbled {len(self.garbled)}"


def entries(outcomes: Sequence[Outcome], wanted: int, seed: int) -> list[Entry]:
    """The rows of all blows, of which so many of each kind are wanted."""
    cuts = [outcome for outcome in outcomes if outcome.power]
    kills = [outcome for outcome in outcomes if not outcome.power]
    bad_kills = _all_lost(kills) + _all_garbled(kills)
    return [
        _loss("power_cuts_lost", "power cuts", cuts, wanted, _all_lost(cuts)) | {"seed": seed},
        _loss("power_cuts_garbled", "power cuts", cuts, wanted, _all_garbled(cuts)),
        _torn(cuts),
        _loss("kills_lost", "kills of a mount or the server", kills, wanted, bad_kills),
    ]


def _all_lost(outcomes: Sequence[Outcome]) -> list[str]:
    return [line for outcome in outcomes for line in outcome.lost]


def _all_garbled(outcomes: Sequence[Outcome]) -> list[str]:
    return [line for outcome in outcomes for line in outcome.garbled]


def _loss(figure: str, kind: str, outcomes: Sequence[Outcome], wanted: int, found: Sequence[str]) -> Entry:
    """A row that says 0 only if all the blows that were wanted count."""
    good = [outcome for outcome in outcomes if not outcome.complaint]
    value = len(found) if found or len(good) >= wanted else None
    subject = "places that hold what nobody wrote" if "garbled" in figure else "acknowledged records lost"
    what = f"{subject} in {len(good)} {kind} under load, of {wanted}: {_load(good)}"
    complaints = [outcome.brief() for outcome in outcomes if outcome.complaint]
    row = dataclasses.asdict(_row(figure, what, value, len(good)))
    return {**row, "found": list(found[:_SHOWN]), "do_not_count": complaints}


def _load(good: Sequence[Outcome]) -> str:
    sides = sorted({side for outcome in good for side in outcome.acknowledged})
    counts = {side: [outcome.acknowledged.get(side, 0) for outcome in good] for side in sides}
    said = (f"{sum(found)} by {side} (each time {min(found)} or more)" for side, found in counts.items())
    return f"acknowledged {', '.join(said)}" if good else "none counts"


def _torn(cuts: Sequence[Outcome]) -> Entry:
    fates = sum((cut.fates for cut in cuts if not cut.complaint), Counter[tuple[Fate, str]]())
    by_size = {size: {fate.value: fates[fate, size] for fate in Fate} for size in CLASSES}
    torn = {size: f"{found['torn']} of {sum(found.values())} {size}" for size, found in by_size.items()}
    what = f"records not synced that were there in part: {', '.join(torn.values())}"
    count = sum(found["torn"] for found in by_size.values())
    good = sum(not cut.complaint for cut in cuts)
    row = _row("power_cuts_torn", what, count if good else None, good)
    return {**dataclasses.asdict(row), "by_size": by_size}


def _row(figure: str, what: str, value: int | None, repeats: int) -> Row:
    return Row(figure, what, value, value, value, "records", None, repeats, _HOW if repeats else None)

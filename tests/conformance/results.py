# SPDX-License-Identifier: Apache-2.0
"""Pure: the results for each mount of a volume, as rows."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.rows import Row
from conformance.tap import Outcome, Outcomes

Entry = dict[str, Any]
_SAID = 8  # of one file; the others' reasons are mostly the same
_WIDTH = 118
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Survived:
    """How many random operations went well, and how they were done or what was said when one did not."""

    operations: int
    note: str


@dataclass(slots=True)
class Kept:
    """How it went with a database: what was committed, how often it was looked at meanwhile, how often
    somebody gave up since it was locked (SQLITE_BUSY), and what was wrong.
    """

    wanted: int
    committed: int = 0
    looks: int = 0
    busy: int = 0
    failures: list[str] = field(default_factory=list)

    def brief(self) -> str:
        """In one line."""
        done = f"{self.committed} of {self.wanted} transactions committed, {self.looks} looks meanwhile"
        return f"{done}, {self.busy} times locked, {len(self.failures)} failures"


def missing_entry(figure: str, unit: str, why: str) -> Entry:
    """The row of what was not run."""
    return dataclasses.asdict(Row(figure, f"not run: {why}", None, None, None, unit, None, 0, None))


def backing_entry(outcomes: Outcomes, kind: str) -> Entry:
    """The row of the file system below."""
    tests = sum(outcome.tests for outcome in outcomes.values())
    passed = sum(len(outcome.passed) for outcome in outcomes.values())
    what = f"pjdfstest on {kind} itself, which lies below: tests that pass"
    return _entry("pjdfstest_backing_percent", what, passed, tests, None, outcomes, outcomes)


def mount_entry(figure: str, title: str, outcomes: Outcomes, backing: Outcomes, kind: str) -> Entry:
    """The row of a mount: of the tests that pass on the file system below, those that pass on it."""
    wanted = {(name, number) for name, outcome in backing.items() for number in outcome.passed}
    kept = sum(number in outcomes[name].passed for name, number in wanted)
    what = f"pjdfstest on {title}: of the tests that pass on {kind}, those that pass"
    return _entry(figure, what, kept, len(wanted), f"{kind} itself", outcomes, backing)


def _entry(
    figure: str, what: str, kept: int, of: int, peer: str | None, outcomes: Outcomes, backing: Outcomes
) -> Entry:
    percent = round(100 * kept / of, 3) if of else None
    row = Row(figure, what, percent, percent, percent, "%", peer, 1, None)
    counts = {
        "tests": sum(outcome.tests for outcome in outcomes.values()),
        "failed": sum(len(outcome.failed) for outcome in outcomes.values()),
    }
    failures = {name: _failure(outcome) for name, outcome in outcomes.items() if outcome.failed}
    below = {name: sorted(backing[name].failed) for name in failures if backing[name].failed}
    return {**dataclasses.asdict(row), **counts, "failures": failures, "failed_below": below}


def _failure(outcome: Outcome) -> Entry:
    said = [f"{number}: {textwrap.shorten(text, _WIDTH)}" for number, text in outcome.failed.items()]
    return {"failed": sorted(outcome.failed), "said": said[:_SAID]}


def survival_entry(figure: str, of: int, survived: Mapping[str, Survived], missing: str) -> Entry:
    """The row of a program that does random operations: how many the worst mount survived."""
    worst = min((found.operations for found in survived.values()), default=None)
    notes = "; ".join(f"{mount}: {found.operations} ({found.note})" for mount, found in survived.items())
    what = f"operations survived of {of} on the worst mount: {notes}" if survived else f"not run: {missing}"
    row = Row(figure, what, worst, worst, worst, "operations", None, int(bool(survived)), None)
    return dataclasses.asdict(row)


def database_entry(kept: Mapping[str, Kept]) -> Entry:
    """The row of a database that one mount writes and the other reads, by which does which."""
    failures = [f"{way}: {failure}" for way, found in kept.items() for failure in found.failures]
    said = "; ".join(f"{way}: {found.brief()}" for way, found in kept.items())
    count = len(failures)
    row = Row(
        "sqlite", f"failures of a SQLite database: {said}", count, count, count, "failures", None, 1, None
    )
    return {**dataclasses.asdict(row), "found": failures[:_SHOWN]}


def brief(entry: Entry) -> str:
    """One row in a few words."""
    value = "-" if entry["value"] is None else f"{entry['value']:g} {entry['unit']}"
    count = f" ({entry['failed']} of {entry['tests']} tests fail)" if "tests" in entry else ""
    return f"{entry['figure']}: {value}{count}"


def lines(entries: Sequence[Entry]) -> list[str]:
    """What a person reads: each row, and below it the tests that fail, by file."""
    out = []
    for entry in entries:
        text = f"{brief(entry)}; {entry['what']}"
        out += textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        for name, failure in entry.get("failures", {}).items():
            numbers = ", ".join(map(str, failure["failed"][:12]))
            more = ", ..." if len(failure["failed"]) > 12 else ""
            out.append(f"        {name}: {numbers}{more}")
        for said in (*entry.get("found", ()), *entry.get("do_not_count", ())):
            out.append(f"        {textwrap.shorten(said, _WIDTH)}")
    return out

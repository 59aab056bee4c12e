# SPDX-License-Identifier: Apache-2.0
"""Pure: parses TAP, the Test Anything Protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_PLAN = re.compile(r"1\.\.(\d+)")
_TEST = re.compile(r"(not )?ok(?: (\d+))?(?: |$)(.*)")
_EXPECTED = re.compile(r"# ?(TODO|SKIP)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of the tests that passed, and of those that did not with what was said of each."""

    passed: frozenset[int]
    failed: Mapping[int, str]

    @property
    def tests(self) -> int:
        """How many there are."""
        return len(self.passed) + len(self.failed)


Outcomes = Mapping[str, Outcome]
"""By the name of the program."""


def parse(text: str, ending: str = "") -> Outcome:
    """What ``text`` reports. A test that was announced and did not run has failed: ``ending`` says why.

    A failure that is marked TODO passes: its author expects it.
    """
    planned, passed, failed = 0, set[int](), dict[int, str]()
    for line in text.splitlines():
        if plan := _PLAN.fullmatch(line.strip()):
            planned = int(plan[1])
        elif test := _TEST.match(line):
            number = int(test[2] or len(passed) + len(failed) + 1)
            if test[1] and not _EXPECTED.search(test[3]):
                failed[number] = test[3].removeprefix("- ")
            else:
                passed.add(number)
    for number in range(1, max(planned, 1) + 1):
        if number not in passed:
            failed.setdefault(number, ending or "it did not run")
    return Outcome(frozenset(passed - failed.keys()), dict(sorted(failed.items())))

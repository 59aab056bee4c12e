# SPDX-License-Identifier: Apache-2.0
"""Pure: diagnoses, and their text for a person and for a bug report.

A bug report leaves the machine, so it holds the words of checks and numbers alone: what a device, the kernel
or a configuration has said, and commands with names or paths in them, are fields of their own, which it
leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from textwrap import wrap


class Verdict(StrEnum):
    """The state of what was looked at."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    UNKNOWN = "unknown"


_INDENT, _LEAST = 24, 40
_ORDER = (Verdict.OK, Verdict.UNKNOWN, Verdict.WARNING, Verdict.WRONG)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check.

    ``name`` is a short stable word, ``what`` is in the check's own words and has no private values. ``said``
    is the text of another: a device, the kernel, a path. ``mend`` is the command that mends it, "" where
    there is none. ``device`` is the name of the device that it is about, "" for the host.
    """

    name: str
    verdict: Verdict
    what: str
    said: str = ""
    mend: str = ""
    device: str = ""

    @property
    def text(self) -> str:
        """``what`` with what another has said."""
        return f"{self.what}: {self.said}" if self.said else self.what


def ok(name: str, what: str, *, said: str = "", device: str = "") -> Diagnosis:
    """Return the diagnosis that all is well."""
    return Diagnosis(name, Verdict.OK, what, said, device=device)


def warning(name: str, what: str, *, said: str = "", mend: str = "", device: str = "") -> Diagnosis:
    """Return the diagnosis of what works, but not as it could, or not for long."""
    return Diagnosis(name, Verdict.WARNING, what, said, mend, device)


def wrong(name: str, what: str, *, said: str = "", mend: str = "", device: str = "") -> Diagnosis:
    """Return the diagnosis of what does not work."""
    return Diagnosis(name, Verdict.WRONG, what, said, mend, device)


def unknown(name: str, what: str, *, said: str = "", mend: str = "", device: str = "") -> Diagnosis:
    """Return the diagnosis of what could not be looked at."""
    return Diagnosis(name, Verdict.UNKNOWN, what, said, mend, device)


def is_wrong(found: Iterable[Diagnosis]) -> bool:
    """Return whether something does not work."""
    return any(each.verdict is Verdict.WRONG for each in found)


def folded(found: Iterable[Diagnosis]) -> list[tuple[str, list[Diagnosis]]]:
    """Return the texts of diagnoses, those that are equal for several devices as one, with the devices' names
    before it.
    """
    groups: dict[Diagnosis, list[Diagnosis]] = {}
    for each in found:
        groups.setdefault(replace(each, device="", mend=""), []).append(each)
    lines = []
    for kind, members in groups.items():
        devices = ", ".join(each.device for each in members if each.device)
        lines.append((f"{devices}: {kind.text}" if devices else kind.text, members))
    return lines


def listed(found: Sequence[Diagnosis], width: int = 0) -> list[str]:
    """Return lines for a person: what is well, then what is not, with the commands below it. Texts go on
    below themselves on a terminal of so many columns; 0: lines may have any length.
    """
    lines = []
    for about, members in sorted(folded(found), key=lambda line: _ORDER.index(line[1][0].verdict)):
        first, *more = wrap(about, max(width - _INDENT, _LEAST)) if width else [about]
        lines.append(f"{members[0].verdict:8} {members[0].name:14} {first}")
        lines += [f"{'':{_INDENT}}{line}" for line in more]
        lines += [
            f"{'':{_INDENT}}mend: {mend}" for mend in dict.fromkeys(each.mend for each in members) if mend
        ]
    counts = [(sum(each.verdict is verdict for each in found), verdict) for verdict in Verdict]
    return [*lines, ", ".join(f"{count} {verdict}" for count, verdict in counts if count)]


def reported(found: Sequence[Diagnosis]) -> str:
    """Return a bug report: a line for each diagnosis, in which devices have numbers in place of names."""
    numbers: dict[str, int] = {}
    lines = ["# millpond doctor", ""]
    for each in found:
        number = numbers.setdefault(each.device, len(numbers) + 1) if each.device else 0
        about = f"device {number}: {each.what}" if number else each.what
        left_out = f" (a text of {len(each.said)} characters is left out)" if each.said else ""
        lines.append(f"{each.verdict:8} {each.name:14} {about}{left_out}")
    return "\n".join(lines) + "\n"

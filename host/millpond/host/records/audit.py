# SPDX-License-Identifier: Apache-2.0
"""Pure: a device's audit log as an owner of data reads it: a row for each job, launch and service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from millpond.wire.audit_log import (
    Answered,
    Cut,
    Dropped,
    Entry,
    Event,
    InForce,
    LogHead,
    Refusals,
    Started,
)


@dataclass(frozen=True, slots=True)
class AuditRow:
    """The ``answers`` of one session, added up, between its ``first`` and ``last`` entry (s since 1970)."""

    first: float
    last: float
    answers: Answered


@dataclass(frozen=True, slots=True)
class PolicyInForce:
    """The ``rules`` of a policy by its ``digest``, and when a log has it first (s since 1970)."""

    digest: str
    since: float
    rules: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AuditSummary:
    """The entries of a log, added up. ``notes`` tell what else happened, each with its time. ``unlogged`` are
    bytes by kind that the device's privacy ledger counted and no entry has: the agent was killed before it
    wrote them.
    """

    rows: tuple[AuditRow, ...] = ()
    notes: tuple[tuple[float, str], ...] = ()
    policies: tuple[PolicyInForce, ...] = ()
    unlogged: dict[str, int] = field(default_factory=dict)


def summary(entries: Iterable[Entry], job: str = "") -> AuditSummary:
    """Add up entries, only those of a ``job`` by its name or its number if there is one."""
    found, notes = dict[tuple[object, ...], AuditRow](), list[tuple[float, str]]()
    policies, unlogged = dict[str, PolicyInForce](), _Unlogged()
    for entry in entries:
        event = entry.event
        unlogged.take(event)
        if isinstance(event, InForce):
            policies.setdefault(event.policy, PolicyInForce(event.policy, entry.time, event.rules))
        elif not isinstance(event, Answered):
            notes += [(entry.time, text)] if (text := _note(event)) else []
        elif not job or is_of(event, job):
            key = event.role, event.name, event.run, event.session, event.policy
            found[key] = _added(found.get(key), entry.time, event)
    rows = sorted(found.values(), key=lambda row: row.first)
    return AuditSummary(tuple(rows), tuple(notes), tuple(policies.values()), unlogged.found)


def is_of(event: Event, job: str) -> bool:
    """Return whether an event is of the job with that name or number."""
    return isinstance(event, Answered) and job in (event.name, event.run.partition(" ")[0])


def _added(row: AuditRow | None, time: float, new: Answered) -> AuditRow:
    if row is None:
        return AuditRow(time, time, new)
    old = row.answers
    total = replace(
        new,
        exchanges=old.exchanges + new.exchanges,
        refused=old.refused + new.refused,
        samples=_sum(old.samples, new.samples),
        sent=_sum(old.sent, new.sent),
    )
    return AuditRow(row.first, time, total)


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in sorted({*one, *other})}


def _note(event: object) -> str:
    if isinstance(event, Refusals):
        return f"requests that the policy refused: {event.count} ({'; '.join(event.reasons)})"
    if isinstance(event, Cut):
        return f"the agent found {event.size} bytes of an entry that was never finished, and cut them"
    if isinstance(event, Dropped):
        return f"the entries up to {event.last} were dropped, as the log had its full length"
    return ""


class _Unlogged:
    """Compares the ledger's totals at each start of the agent with those at the start before, and the entries
    between.
    """

    def __init__(self) -> None:
        self.found = dict[str, int]()
        self._ledger: Mapping[str, int] | None = None
        self._logged = Counter[str]()

    def take(self, event: object) -> None:
        """Take the next event."""
        if isinstance(event, Answered):
            self._logged.update(event.sent)
        elif isinstance(event, Started):
            if self._ledger is not None:
                self._compare(self._ledger, event.ledger)
            self._ledger = event.ledger
            self._logged.clear()

    def _compare(self, before: Mapping[str, int], now: Mapping[str, int]) -> None:
        for kind, count in now.items():
            lost = count - before.get(kind, 0) - self._logged[kind]
            if lost > 0:
                self.found[kind] = self.found.get(kind, 0) + lost


@dataclass(frozen=True, slots=True)
class KeptHead:
    """The head of a device's log that this host has verified last, and the time of that."""

    number: int
    digest: str
    time: float


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """The verified parts of a log: its ``entries`` up to ``number``, the ``signatures`` of as many
    certificates, and the head that this host had ``kept``, None where it verifies the log for the first time.
    The device signed the head with a ``nonce``; a copy was ``saved`` at that time (s since 1970).
    """

    entries: int
    number: int
    digest: str
    certificate: str
    signatures: int
    kept: KeptHead | None
    nonce: str = ""
    saved: float | None = None


def append_fault(kept: KeptHead | None, oldest: int, digests: Mapping[int, str], head: LogHead) -> str:
    """Return why a log, with the ``digests`` of its entries by number, cannot be what was ``kept`` and
    entries behind it; "" if it is.
    """
    if kept is None:
        return ""
    if kept.number > head.number:
        return (
            f"its last entry is {head.number}, and this host has seen entry {kept.number}: the log was "
            "rolled back, or cut at its end"
        )
    if kept.number < oldest:
        return (
            f"it begins with entry {oldest}, and this host has seen the entries up to {kept.number} alone: "
            "what lies between is gone, so that nothing shows that it is the same log"
        )
    if digests.get(kept.number) != kept.digest:
        return f"entry {kept.number} is another one than this host has seen: the log was rewritten"
    return ""

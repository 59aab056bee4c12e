# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): the audit log of a device as a table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.text import Text

from millpond.host.records.audit import AuditRow, AuditSummary, AuditVerdict
from millpond.host.terminal import tables
from millpond.host.terminal.fitted_table import fitted
from millpond.host.terminal.printing import size

_DIGEST = 12
"""The digits of a digest that are shown; ``--format json`` has them all."""
_LESS_NEEDED = ("to", "peer", "control", "metrics", "policy", "code", "exchanges", "volume")
"""Columns that go first on a narrow terminal, the first of them first."""
_LONGEST = 40


def show(found: AuditSummary, verdict: str, width: int = tables.WIDE) -> Group:
    """Return the table of ``millpond audit`` in so many characters, what else the log tells, and what was
    verified.
    """
    kinds = sorted({kind for row in found.rows for kind in row.answers.sent})
    headings = ["from", "to", "answered", "peer", "code", "policy", "exchanges", "samples", *kinds]
    rows = [_cells(row, kinds) for row in found.rows]
    table = fitted(headings, rows, width, dropped=_LESS_NEEDED, wrapped=("answered", "samples"))
    shown = table if rows else Text("the log has no entry to show")
    return Group(shown, *map(Text, _lines(found)), Text(verdict))


def entry_line(entry: Mapping[str, Any]) -> str:
    """Return a described entry as one line for a person: number, time, event, and what it tells."""
    told = " ".join(f"{key}={_short(value)}" for key, value in entry["about"].items() if value)
    return f"{entry['number']} {_time(entry['time'])} {entry['event']} {told}".rstrip()


def _short(value: object) -> str:
    text = json.dumps(value)
    return f"{text[:_LONGEST]}..." if isinstance(value, str) and len(text) > _LONGEST else text


def verdict_line(verdict: AuditVerdict | None) -> str:
    """Return what was verified of a log."""
    if verdict is None:
        return "signatures are not verified: add --verify"
    kept = verdict.kept
    if verdict.saved is not None:
        since = f"was saved at {_time(verdict.saved)}, by that host's clock, with the nonce {verdict.nonce}"
    elif kept:
        since = f"has grown since entry {kept.number}, of {_time(kept.time)}"
    else:
        since = "is seen for the first time"
    return (
        f"verified: {verdict.entries} entries up to {verdict.number} are one chain, signed by the device "
        f"(certificate {verdict.certificate[:_DIGEST]}); the log {since}"
    )


def _cells(row: AuditRow, kinds: list[str]) -> list[str]:
    one = row.answers
    code = one.code[:_DIGEST] + (" signed" if one.signer else "")
    samples = ", ".join(f"{folder} {count}" for folder, count in one.samples.items())
    sent = (size(one.sent.get(kind, 0)) for kind in kinds)
    exchanges = f"{one.exchanges}" + (f", {one.refused} refused" if one.refused else "")
    name = f"{one.role} {one.name}".strip() + (f" ({one.run.partition(' ')[0][:_DIGEST]})" if one.run else "")
    peer = one.peer.partition(" ")[0]
    cells = [_time(row.first), _time(row.last), name, peer, code or "-", one.policy[:_DIGEST]]
    return [*cells, exchanges, samples or "-", *sent]


def _lines(found: AuditSummary) -> Iterator[str]:
    for policy in found.policies:
        yield f"policy {policy.digest[:_DIGEST]} is in force since {_time(policy.since)}"
    for at, text in found.notes:
        yield f"{_time(at)}: {text}"
    if found.unlogged:
        told = ", ".join(f"{kind} {size(count)}" for kind, count in sorted(found.unlogged.items()))
        yield f"in no entry, as the agent was killed before it wrote them: {told}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

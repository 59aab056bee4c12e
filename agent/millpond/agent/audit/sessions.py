# SPDX-License-Identifier: Apache-2.0
"""Edge (shared memory): the account of one job, launch or service, between two entries of the audit log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from millpond.agent.gate import KINDS, LedgerCounters
from millpond.wire.audit_log import Answered

_MOST_FOLDERS, _LONGEST_NAME = 32, 200
_OTHERS = "(others)"
_MOST_SAMPLES = 1 << 40
"""Of one exchange: numbers and names are the host's, and an entry must stay one that readers take."""


class AuditSession:
    """The answers to ``about``. The agent's gates count their bytes in ``counters``, those of other processes
    in what ``elsewhere`` returns.
    """

    def __init__(self, about: Answered, counters: LedgerCounters | None = None) -> None:
        self.about = replace(
            about, name=_clipped(about.name), peer=_clipped(about.peer), run=_clipped(about.run)
        )
        self.counters = counters or LedgerCounters.in_memory(shared=False)
        self._elsewhere: LedgerCounters | None = None
        self.ended = self.told_end = False
        self._lock = threading.Lock()
        self._told = self._now()
        self._exchanges, self._refused, self._samples = 0, 0, Counter[str]()

    def elsewhere(self) -> LedgerCounters:
        """Return the counters of processes that the agent starts for this session."""
        with self._lock:
            self._elsewhere = self._elsewhere or LedgerCounters.in_memory()
            return self._elsewhere

    def exchange(self, samples: Mapping[str, int]) -> None:
        """Note an answer that covers so many ``samples`` by folder."""
        with self._lock:
            self._exchanges += 1
            for folder, count in samples.items():
                known = _clipped(folder) in self._samples or len(self._samples) < _MOST_FOLDERS
                self._samples[_clipped(folder) if known else _OTHERS] += min(max(count, 0), _MOST_SAMPLES)

    def refuse(self) -> None:
        """Note an exchange that was refused."""
        with self._lock:
            self._refused += 1

    def taken(self) -> Answered:
        """Return what is new since the last call."""
        with self._lock:
            now, before = self._now(), self._told
            sent = {str(kind): new - old for kind, new, old in zip(KINDS, now, before, strict=True)}
            found = replace(
                self.about,
                state="ends" if self.ended else "goes on",
                exchanges=self._exchanges,
                refused=self._refused,
                samples=dict(self._samples),
                sent={kind: count for kind, count in sent.items() if count},
            )
            self._told, self._exchanges, self._refused = now, 0, 0
            self._samples.clear()
        return found

    @property
    def untold(self) -> int:
        """The bytes that are new since the last entry."""
        return sum(self._now()) - sum(self._told)

    def put_back(self, untold: Answered) -> None:
        """Take back what could not be written, for the next entry."""
        with self._lock:
            before = zip(KINDS, self._told, strict=True)
            self._told = tuple(count - untold.sent.get(str(kind), 0) for kind, count in before)
            self._exchanges += untold.exchanges
            self._refused += untold.refused
            self._samples.update(untold.samples)

    def _now(self) -> tuple[int, ...]:
        used = [self.counters, *([self._elsewhere] if self._elsewhere else [])]
        return tuple(sum(counters[number] for counters in used) for number in range(len(KINDS)))


def is_empty(found: Answered) -> bool:
    """Return whether an entry would tell of nothing."""
    return not (found.exchanges or found.refused or found.sent)


def _clipped(text: str) -> str:
    return text[:_LONGEST_NAME]

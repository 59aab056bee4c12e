# SPDX-License-Identifier: Apache-2.0
"""Pure: finished rounds as they are stored, and the faults of stored rows that this version cannot read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from millpond.base import schema
from millpond.base.errors import LocalError
from millpond.host.records.jobs import Round

T = TypeVar("T")


class UnreadableRow(LocalError):
    """A row that this version cannot read; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class StoredRound:
    """The number of a finished round, and its ``text``: a Round as JSON."""

    round: int
    text: str

    def read(self, job: int) -> Round:
        """Return the round, one of ``job``. Raises UnreadableRow."""
        return read_row(f"round {self.round} of job {job}", lambda: _round(self.text))


def read_rounds(job: int, rounds: Iterable[StoredRound]) -> tuple[Round, ...]:
    """Return rounds of a job. Raises UnreadableRow."""
    return tuple(each.read(job) for each in rounds)


def read_row(what: str, load: Callable[[], T]) -> T:
    """Return what ``load`` makes of a row, which is ``what`` to a person. Raises UnreadableRow."""
    try:
        return load()
    except RecursionError:
        why = "it is nested too deeply"
    except (LocalError, ValueError, TypeError, AttributeError, LookupError) as error:
        why = " ".join(str(error).split())
    raise UnreadableRow(f"{what} cannot be read: {why}") from None


@lru_cache(maxsize=32)
def _round(text: str) -> Round:
    """Return a round. The last ones of a job that is looked at are read again at each new one."""
    return schema.load(Round, json.loads(text), "round", strict=False)

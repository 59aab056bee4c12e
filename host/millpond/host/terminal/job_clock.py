# SPDX-License-Identifier: Apache-2.0
"""Pure: how far a job is, in words, and how long it will take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millpond.base.text import duration
from millpond.host.api.daemon import JobInfo
from millpond.host.records.jobs import Round, seconds_left

_LEAST_PART = 0.02
"""The part of a round from which its time is told, where there is no round before it."""


class JobClock:
    """Tells how far a job is. Before its second round the time of the present one counts since it was seen to
    begin.
    """

    def __init__(self) -> None:
        self._round, self._begun = -1, 0.0

    def told(self, info: JobInfo, rounds: Sequence[Round], now: float) -> str:
        """Return a line about a job with its last ``rounds`` at a time of the steady clock (s), "" for one
        that does not run.
        """
        if info.stage == "preparing":
            return f"job {info.id}: preparing the workers: {info.done:.0%} are ready"
        if info.stage == "waiting for an order":
            return f"job {info.id}: {info.stage} after {info.unit} {info.round}"
        if info.stage not in ("training", "scoring") or info.round >= info.rounds:
            return ""
        if self._round != info.round:
            self._round, self._begun = info.round, now
        text = f"{info.unit} {info.round + 1} of {info.rounds}"
        if info.stage == "scoring":
            return f"{text}: scoring"
        left = self._left(info, rounds, now)
        return f"{text}: {info.done:.0%}" + ("" if math.isnan(left) else f", about {duration(left)} left")

    def _left(self, info: JobInfo, rounds: Sequence[Round], now: float) -> float:
        """Return the seconds until the end of the job, NaN while nothing tells them."""
        if (found := seconds_left(info.rounds_left, rounds)) is not None:
            return found
        return info.rounds_left * (now - self._begun) / info.done if info.done >= _LEAST_PART else math.nan

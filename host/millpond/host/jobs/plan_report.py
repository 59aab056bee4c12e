# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): the log of a job's plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millpond.host.jobs.training.planner import Planner
    from millpond.host.jobs.training.round_planner import RoundPlanner

REPORT_SECONDS, MOST_REPORT_SECONDS = 2.0, 60.0


class PlanReport:
    """Logs new plans, at growing intervals: short steps make more plans than a log should hold."""

    def __init__(self, note: Callable[[str, str, str], None], log: logging.Logger) -> None:
        self._note, self._log = note, log
        self._reported_at, self._pause, self._unreported = 0.0, REPORT_SECONDS, False

    def report(self, step: int, planner: Planner | RoundPlanner, *, new: bool) -> None:
        """Log the plan of ``step`` if it is ``new``, or one before it that was not told is."""
        self._unreported = self._unreported or new
        due = time.monotonic() - self._reported_at > self._pause
        if self._unreported and due and planner.plan.batches.any():
            text = f"step {step}: new plan: {planner.description}"
            self._note("plan", "", text)
            self._log.info("%s", text)
            self._unreported, self._reported_at = False, time.monotonic()
            self._pause = min(1.5 * self._pause, MOST_REPORT_SECONDS)  # a log of days must not fill the disk

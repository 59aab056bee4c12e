# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): the stage of a job that runs, and when those that follow it are to look again."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

PERIOD_SECONDS = 2.0


class JobStage(StrEnum):
    """A stage of a job that runs."""

    PREPARING = "preparing"
    WAITING = "waiting for an order"
    TRAINING = "training"
    SCORING = "scoring"


class StageWatch:
    """The present ``stage`` of a job, and the part of it that was ``done`` at the last look, 0 to 1.
    ``changed`` is called where that has changed by a percent, every PERIOD_SECONDS at most. ``clock`` is a
    steady one (s).
    """

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._changed, self._clock = changed, clock
        self.set(JobStage.PREPARING)

    def set(self, stage: JobStage) -> None:
        """Note a stage, none of which is done yet."""
        self.stage, self.done, self._due = stage, 0.0, self._clock() + PERIOD_SECONDS

    def enter(self, stage: JobStage) -> None:
        """Note a stage, and tell those that follow the job."""
        self.set(stage)
        self._changed()

    def reach(self, stage: JobStage) -> None:
        """Enter a stage, unless it is the present one."""
        if self.stage is not stage:
            self.enter(stage)

    def look(self, done: Callable[[], float]) -> None:
        """Look how much of the stage is ``done``, 0 to 1, if that is due."""
        if (now := self._clock()) < self._due:
            return
        self._due = now + PERIOD_SECONDS
        before, self.done = self.done, done()
        if int(100 * before) != int(100 * self.done):
            self._changed()

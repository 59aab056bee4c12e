# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): pass a point in time down, instead of a time-out in every callee."""

from __future__ import annotations

import time
from dataclasses import dataclass

from millpond.base.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock, in seconds; None never comes."""

    at: float | None = None

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        """Return the moment ``seconds`` from now; None for never."""
        return Deadline(None if seconds is None else time.monotonic() + seconds)

    def remaining(self) -> float | None:
        """Return the seconds left, None if there is no end. Raises DeadlineExceeded when the moment has
        passed.
        """
        if self.at is None:
            return None
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the deadline has passed")
        return left

    @property
    def passed(self) -> bool:
        """Whether the moment has passed."""
        return self.at is not None and time.monotonic() >= self.at

    def earlier(self, seconds: float) -> Deadline:
        """Return this deadline or ``seconds`` from now, whichever comes first."""
        other = time.monotonic() + seconds
        return Deadline(other if self.at is None else min(self.at, other))


NEVER = Deadline()

# SPDX-License-Identifier: Apache-2.0
"""Pure: the attempts of a job: how often its parameter server, or its state, may be lost in a row."""

from __future__ import annotations

TRIES = 5
"""Losses in a row, without progress between them, after which a job fails."""
RETRY_SECONDS = 0.5


class Attempts:
    """The losses in a row of one job. A step that an earlier attempt had reached is no progress: a server
    that dies whenever it scores would train the last round anew for ever.
    """

    def __init__(self) -> None:
        self._lost, self._furthest = 0, 0

    def reached(self, step: int) -> None:
        """Note that the model is at ``step``."""
        if step > self._furthest:
            self._furthest, self._lost = step, 0

    def lose(self) -> float | None:
        """Note a loss. Returns the seconds until the next attempt, None if there is to be none."""
        self._lost += 1
        return None if self._lost == TRIES else RETRY_SECONDS * 2.0**self._lost

# SPDX-License-Identifier: Apache-2.0
"""Edge: whether a worker has ended, or failed, for want of memory or processes."""

from __future__ import annotations

from dataclasses import replace

from millpond.linux.limits.process_limits import REFUSED, Shortage
from millpond.linux.zygote.client import Child
from millpond.train.worker.error_reports import PROCESSES
from millpond.wire.messages import Failure

DEATH_SECONDS = 2.0


class WorkerShortages:
    """Explains the end and the errors of ``worker``."""

    def __init__(self, worker: Child) -> None:
        self._worker, self._refusals = worker, 0

    def begin(self) -> None:
        """Note that a request begins: errors in it are no consequence of what was refused before."""
        self._refusals = self._worker.refusals

    def of_death(self, text: str) -> Failure:
        """Return the report of a worker whose channel has ended: its shortage of memory, or else ``text``.
        Waits for its end at most DEATH_SECONDS.
        """
        return self._of_memory(DEATH_SECONDS) or self.hinted(Failure("worker", text))

    def of_error(self, failure: Failure) -> Failure | None:
        """Return the shortage of which a worker's own report is a consequence, None if it is none: a
        descendant was killed for memory, or in this request a process was refused, as the report says.
        """
        if failure.code == PROCESSES and self._worker.refusals > self._refusals:
            return Failure(PROCESSES, Shortage.PROCESSES.text)
        return self._of_memory()

    def hinted(self, failure: Failure) -> Failure:
        """Return a report with the hint that the worker was refused processes before, if it was."""
        return replace(failure, text=f"{failure.text}; {REFUSED}") if self._worker.refusals else failure

    def _of_memory(self, patience: float = 0.0) -> Failure | None:
        shortage = self._worker.shortage(patience)
        return Failure(shortage.value, shortage.text) if shortage else None

# SPDX-License-Identifier: Apache-2.0
"""Edge: the supervisor of one worker of a job: prepares it in the background, and again after a loss."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError, Refused
from millpond.host.records.failures import FOR_GOOD, OUT_OF_MEMORY, reason_of
from millpond.host.workers.worker import Worker
from millpond.train.protocol import Ready

log = logging.getLogger(__name__)

PREPARE_SECONDS = 300.0
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.5, 30.0


class WorkerSupervisor:
    """Keeps one worker prepared, in a thread of its own.

    ``new_worker`` returns an unprepared worker, or None while its device is absent; ``admit`` returns the
    reason for refusing a prepared worker, or "". A worker is out of the job, with ``failure`` as the reason,
    if the job itself keeps it from preparing (missing data, a model that raises, a device's policy), or if it
    reaches its own limit of memory twice in a row. One that is lost while it prepares is prepared again,
    after a pause that doubles.
    """

    def __init__(
        self,
        name: str,
        new_worker: Callable[[], Worker | None],
        admit: Callable[[Ready], str] = lambda _ready: "",
    ) -> None:
        self.name, self._new_worker, self._admit = name, new_worker, admit
        self.failure = ""
        self.ready: Ready | None = None
        self._worker: Worker | None = None
        self._prepared = False
        self._lost = ""
        self._losses, self._at_limit = 0, False
        self._not_before = 0.0
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._keep_prepared, name=f"worker {name}", daemon=True)

    def start(self) -> None:
        """Begin to prepare the worker."""
        self._thread.start()

    def wait_settled(self, deadline: Deadline) -> bool:
        """Wait until the worker is prepared, or out of the job, or was lost while it prepared; False if the
        deadline passes first.
        """
        with self._changed:
            while not self._prepared and not self.failure and not self._losses and not self._stopped:
                if deadline.passed:
                    return False
                self._changed.wait(0.2)
            return True

    @property
    def worker(self) -> Worker | None:
        """The prepared worker, None while there is none."""
        with self._changed:
            return self._worker if self._prepared else None

    @property
    def reason(self) -> str:
        """The reason for having no prepared worker."""
        with self._changed:
            return self.failure or self._lost or "not ready"

    def lose(self, worker: Worker, reason: str, pause: float = 0.0) -> None:
        """Close ``worker``, which was lost, and prepare another after ``pause`` seconds."""
        with self._changed:
            if self._worker is worker:
                self._not_before = time.monotonic() + pause
                self._worker, self._prepared, self._lost, self.ready = None, False, reason, None
                self._changed.notify_all()
        worker.close()

    def ban(self, worker: Worker, reason: str) -> None:
        """Close ``worker`` and prepare no other: its answers are of no use to the job."""
        with self._changed:
            self.failure = self.failure or reason
        self.lose(worker, reason)

    def stop(self) -> None:
        """Leave the job, also while the worker prepares."""
        with self._changed:
            self._stopped = True
            worker, self._worker, self._prepared = self._worker, None, False
            self._changed.notify_all()
        if worker:
            worker.close()

    def _keep_prepared(self) -> None:
        """Prepare a worker whenever there is none, until the end of the job."""
        while self._wait_until_needed():
            if not self._prepare():
                with self._changed:
                    pause = RETRY_SECONDS * 2.0 ** min(max(self._losses - 1, 0), 10)
                    self._not_before = time.monotonic() + min(pause, LONGEST_RETRY_SECONDS)

    def _wait_until_needed(self) -> bool:
        with self._changed:
            while not self._stopped:
                pause = self._not_before - time.monotonic()
                if self._worker or self.failure:
                    self._changed.wait()
                elif pause > 0:
                    self._changed.wait(pause)
                else:
                    return True
            return False

    def _prepare(self) -> bool:
        worker = None
        try:
            worker = self._new_worker()
            if worker is None or not self._adopt(worker):
                return False
            ready = worker.prepare(Deadline.after(PREPARE_SECONDS))
            if refusal := self._admit(ready):
                raise Refused("", "data", refusal)
        except Exception as error:
            if not isinstance(error, (MillpondError, OSError)):
                log.exception("worker %s: internal error", self.name)
            self._give_up(worker, error)
            return False
        with self._changed:
            if self._worker is worker:
                self.ready, self._prepared, self._lost = ready, True, ""
                self._losses, self._at_limit = 0, False
                self._changed.notify_all()
                return True
        worker.close()
        return False

    def _adopt(self, worker: Worker) -> bool:
        """Make ``worker`` the current one, unless the supervisor was stopped meanwhile."""
        with self._changed:
            if not self._stopped:
                self._worker = worker
                return True
        worker.close()
        return False

    def _give_up(self, worker: Worker | None, error: Exception) -> None:
        with self._changed:
            self._lost = reason_of(error, self.name)
            self._losses += not self._stopped
            code = error.code if isinstance(error, Refused) else ""
            before, self._at_limit = self._at_limit, code == OUT_OF_MEMORY
            if code in FOR_GOOD and (before or not self._at_limit):
                self.failure = self._lost
            log.info("worker %s could not be prepared: %s", self.name, self._lost)
            if self._worker is worker:
                self._worker = None
            self._changed.notify_all()
        if worker:
            worker.close()

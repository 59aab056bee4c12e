# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the jobs of the daemon: queued, started, followed, stopped, and resumed after it died."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from millpond.base.errors import LocalError, MillpondError, Refused
from millpond.base.text import printable
from millpond.host.api.connection import ENDED
from millpond.host.api.daemon import (
    LARGEST_NUMBER,
    MOST_LISTED,
    Curves,
    JobInfo,
    NewLog,
    PreparedWorkers,
    PrunedJobs,
    PruneJobs,
)
from millpond.host.api.progress import StoredJob, StoredProgress
from millpond.host.jobs import artifacts, job_log, queue
from millpond.host.jobs.context import JobContext, limited
from millpond.host.jobs.following import JobAnswer, JobFollowing
from millpond.host.jobs.job_folder import BEST, LOG
from millpond.host.jobs.job_log import IS_LAST, JobLog
from millpond.host.jobs.outer.mailbox import OuterMailboxes
from millpond.host.jobs.pruning import JobPruner
from millpond.host.jobs.shortages import is_lack
from millpond.host.jobs.training.scores import ScoreBoard
from millpond.host.jobs.training.trainer import Trainer
from millpond.host.records.data_costs import RECENT, shares, total
from millpond.host.records.failures import advised
from millpond.host.records.jobs import ACTIVE, UNREADABLE, JobRow, JobState, UnreadableJob
from millpond.host.records.stored_rounds import StoredRound
from millpond.host.store.store import Store
from millpond.train.job import signed_code
from millpond.train.job.files import JobFile
from millpond.train.job.overrides import longer
from millpond.train.job.spec import Job
from millpond.wire.control_messages import LogPosition

log = logging.getLogger(__name__)

KEPT_LOGS = 20
KEPT_SUMMARIES = 500
PART_SIZE = 1 << 20
"""Characters of the stored rounds that are told at once: a round of many workers has tens of thousands."""
STORE_RETRY_SECONDS = 5.0


class JobNotStarted(LocalError):
    """A job is stored as failed, because it could not be started."""


class _Running:
    def __init__(self, row: JobRow, context: JobContext, log_path: Path) -> None:
        self.stop = threading.Event()
        self.log = JobLog(log_path, context.changed)
        self._context = context
        self.begin(row)
        self.thread: threading.Thread | None = None
        self.closing = threading.Event()
        self.devices = frozenset(context.devices)

    def begin(self, row: JobRow) -> None:
        """Make the trainer that begins, or goes on, where the job's last checkpoint is."""
        self.waits = ""
        self.runner = Trainer(row, self._context, self.stop)
        self.runner.log.addHandler(self.log)
        self.runner.log.addFilter(lambda _record: not self.stop.is_set())  # all is lost on purpose then


class JobService:
    """All jobs. A job waits in the queue until no job before it needs one of its devices, see ``queue``.

    ``make_context`` builds a job's context from a callback that the job calls when its progress
    changes.
    """

    def __init__(self, store: Store, make_context: Callable[[Callable[[], None]], JobContext]) -> None:
        self._store = store
        self._following = JobFollowing(self._progress, self._new_lines, store.drops)
        self._context = make_context(self._following.changed)
        self._lock = threading.Lock()
        self._running: dict[int, _Running] = {}
        self.outer = OuterMailboxes(self.row)
        self._logs: dict[int, JobLog] = {}  # of jobs that have ended
        self._summaries: dict[int, tuple[int, int, dict[str, float]]] = {}
        self._queue = threading.RLock()  # held while a queued job begins or is stopped
        self._waits: dict[int, tuple[int, ...]] = {}
        self._pruner = JobPruner(store, self._context.fleet, self._queue_held)
        self._closing = False
        self._retry: threading.Timer | None = None

    def resume(self) -> None:
        """Resume the jobs that were running when the daemon ended, and begin queued ones."""
        with contextlib.suppress(LocalError):  # which the store has logged
            self._pruner.remove_left()
        self._begin_queued()

    def _go_on(self) -> None:
        """Start the jobs that were running when the last daemon ended. Raises LocalError."""
        for row in self._store.active():
            if row.state is not JobState.RUNNING or row.id in self._running:
                continue
            # a job of this daemon that has just ended is stored so before it is among the running no more
            if self.row(row.id).state is JobState.RUNNING:
                log.info("job %d (%s) goes on", row.id, row.job.name)
                with contextlib.suppress(JobNotStarted):
                    self._start(row)

    def submit(self, job: Job, files: dict[str, JobFile], owner: int | None = None) -> int:
        """Queue a job of the user with the uid ``owner``, and return its number. Raises Refused for an
        unknown device, LocalError for a job that cannot be started.
        """
        self._check_devices(job)
        number = self._store.add_job(job, files, owner)
        self._begin_queued()
        if (row := self.row(number)).state is JobState.FAILED:
            raise LocalError(row.error)
        return number

    def _check_devices(self, job: Job) -> None:
        for name in job.devices:
            if name not in self._context.devices:
                known = ", ".join(self._context.devices) or "none"
                raise Refused("", "unknown", f"there is no device '{name}'; the fleet has {known}")

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Begin no job inside the context. Raises Refused while a job runs with a device, or waits for one
        that it names.
        """
        with self._queue:
            queue.check_unused(name, self._store.active())
            yield

    def _begin_queued(self) -> None:
        """Begin the queued jobs that wait for no other. What cannot be stored is tried again."""
        with self._queue:
            try:
                if not self._closing:
                    self._go_on()
                while not self._closing and (begin := self._decide().begin):
                    for number in begin:
                        with contextlib.suppress(JobNotStarted):
                            self._start(self.row(number))
            except MillpondError as error:  # a full disk, most likely
                log.error("queued jobs cannot begin: %s", error)
                self._begin_later()
        self._following.changed()

    def _begin_later(self) -> None:
        if not self._closing and not self._store.fault:
            self._retry = threading.Timer(STORE_RETRY_SECONDS, self._begin_queued)
            self._retry.daemon = True
            self._retry.start()

    def _decide(self) -> queue.QueueDecision:
        queued = [
            queue.QueuedJob(row.id, row.job.priority, frozenset(self._names(row.job)))
            for row in self._store.active()
            if row.state is JobState.QUEUED
        ]
        running = {number: job.devices for number, job in list(self._running.items())}
        decision = queue.decide(running, queued)
        self._waits = decision.waits
        return decision

    def _names(self, job: Job) -> list[str]:
        """Return the names of the devices with which a job takes part."""
        return [name for name in self._context.devices if not job.devices or name in job.devices]

    def _start(self, row: JobRow) -> None:
        """Start a job's thread. Raises JobNotStarted, and stores the job as failed, if that is not possible;
        LocalError if it is not possible yet.
        """
        changed = functools.partial(self._following.changed, row.id)
        context = replace(limited(self._context, self._names(row.job)), changed=changed)
        context = replace(context, outer=self.outer.begun(row))
        try:
            running = _Running(row, context, context.fleet.job_directory(row.id) / LOG)
        except (LocalError, OSError) as error:
            if is_lack(error):
                raise LocalError(f"job {row.id} cannot begin yet: {error}") from error
            text = f"the job cannot be started: {error}"
            log.error("job %d: %s", row.id, text)
            self._store.end_job(row.id, JobState.FAILED, error=text)
            raise JobNotStarted(text) from None
        running.thread = threading.Thread(
            target=self._run, args=(row.id, running), name=f"job {row.id}", daemon=True
        )
        with self._lock:
            self._running[row.id] = running
        try:
            self._store.begin_job(row.id)
            running.thread.start()
        except MillpondError:
            self._forget(row.id, running)
            raise
        except RuntimeError as error:  # no more threads: it is stored as running, and begins later
            self._forget(row.id, running)
            raise LocalError(f"job {row.id} cannot begin yet: {error}") from error

    def _forget(self, number: int, running: _Running) -> None:
        """Undo the start of a job whose thread has not begun."""
        with self._lock:
            del self._running[number]
        running.log.close()

    def _run(self, number: int, running: _Running) -> None:
        state, error, model = self._finish(number, running)
        while state is not None and not self._closing:
            try:
                self._store.end_job(number, state, error=error, model=model)
                break
            except (
                MillpondError
            ) as problem:  # a full disk, most likely: until its end is stored, the job runs
                log.error("job %d: its end cannot be recorded: %s", number, problem)
                running.closing.wait(STORE_RETRY_SECONDS)
        self.outer.end(number)
        running.log.close()
        with self._lock:
            del self._running[number]
            self._logs[number] = running.log
            while len(self._logs) > KEPT_LOGS:
                del self._logs[min(self._logs)]
        self._following.changed(number, ended=True)
        self._begin_queued()
        self._pruner.prune_beyond_limits(time.time(), number)

    @contextlib.contextmanager
    def _queue_held(self) -> Iterator[None]:
        """Begin and resume no job inside the context. Raises Refused when the daemon ends."""
        with self._queue:
            if self._closing:
                raise Refused("", "ended", ENDED)
            yield

    def _finish(self, number: int, running: _Running) -> tuple[JobState | None, str, str]:
        """Run the job, anew from its last checkpoint after a lack of something on the host. Returns its last
        state (None if the daemon's end interrupted it), error, model.
        """
        while True:
            try:
                if running.waits:
                    running.begin(self.row(number))
                return JobState.DONE, "", str(running.runner.run() or "")
            except Exception as error:
                lacking = not running.stop.is_set() and is_lack(error)
                if lacking:
                    self._wait_for_more(running, str(error))
                if self._closing:
                    return None, "", ""
                if running.stop.is_set():
                    last = {"msg": "stopped", "levelname": "INFO", IS_LAST: True}
                    running.log.handle(logging.makeLogRecord(last))
                    return JobState.STOPPED, "", ""
                if not lacking:
                    text, ours = _failure(number, running, error)
                    running.runner.log.error("%s", text, exc_info=not ours, extra={IS_LAST: True})
                    return JobState.FAILED, text, ""

    def _wait_for_more(self, running: _Running, lack: str) -> None:
        if running.waits != lack:
            running.runner.log.warning("the job waits, and goes on from its last checkpoint: %s", lack)
        running.waits = lack
        self._following.changed()
        running.stop.wait(STORE_RETRY_SECONDS)

    def stop(self, number: int) -> None:
        """Stop a running or a queued job. Raises Refused for a job that has ended."""
        with self._queue:  # no job begins meanwhile
            state, running = self.row(number).state, self._running.get(number)
            if waits := state in ACTIVE and running is None:
                self._store.end_job(number, JobState.STOPPED)
        if waits:
            self._begin_queued()  # those behind it
        elif running is not None:
            self._end(running)
        else:
            raise Refused("", "state", f"job {number} is not running")

    def restart(self, number: int, rounds: int | None) -> None:
        """Resume a job that was stopped or has failed, or continue one that is done, up to ``rounds`` rounds
        or epochs and without its target, if that is given. Raises Refused for a job that runs or has done
        more, and for one whose files or devices are gone.
        """
        with self._queue:  # of two resumptions at once the second finds the job queued
            row, last = self.row(number), self._store.last_rounds(number, 1)
            if row.state in ACTIVE:
                raise Refused("", "state", f"job {number} is {row.state}")
            if row.state is JobState.DONE and rounds is None:
                raise Refused("", "state", f"job {number} is done; say up to how many rounds it goes on")
            if rounds is not None and last and rounds < last[-1].round:
                raise Refused("", "state", f"job {number} has done {last[-1].round} already, not {rounds}")
            _check_kept(row)
            self._check_devices(row.job)
            self._store.restart_job(number, row.job if rounds is None else longer(row.job, rounds))
        self._begin_queued()

    def prune(self, request: PruneJobs) -> PrunedJobs:
        """Remove folders of ended jobs, or with ``dry_run`` name those that would go. Raises LocalError."""
        return self._pruner.requested(request, time.time())

    def close(self) -> None:
        """Interrupt all jobs. Their stored state stays "running", so the next daemon resumes them."""
        with self._queue:
            self._closing = True
            if self._retry:
                self._retry.cancel()
        self._following.close()
        self.outer.close()
        for running in list(self._running.values()):
            running.closing.set()
            self._end(running)

    def _end(self, running: _Running) -> None:
        running.stop.set()
        running.runner.abort()
        if running.thread:
            running.thread.join(timeout=30)

    def infos(self, most: int = MOST_LISTED, before: int = 0) -> tuple[JobInfo, ...]:
        """Return the newest ``most`` jobs with numbers below ``before`` (0: any), oldest first."""
        below = before if 0 < before <= LARGEST_NUMBER else LARGEST_NUMBER
        return tuple(map(self._described, self._store.newest(most, below)))

    def _described(self, row: JobRow | UnreadableJob) -> JobInfo:
        if isinstance(row, UnreadableJob):
            times = row.created, row.ended
            return JobInfo(
                row.id, row.name, UNREADABLE, row.reason, "", 0, 0, "round", "", None, None, 0, *times
            )
        try:
            return self._info(row)
        except LocalError as error:  # a round that cannot be read
            return replace(self._without_rounds(row), error=str(error))

    def record(self, number: int, after: int = 0) -> StoredJob:
        """Return a job with its definition and the first finished rounds behind ``after``. Raises Refused for
        an unknown one.
        """
        row = self.row(number)
        code = signed_code.digest(row.job.work, row.files)
        info, rounds = self._info(row), self._store.stored_rounds(number, after, PART_SIZE)
        return StoredJob(info, row.job, code, tuple(rounds), _is_more(info, rounds))

    def follow(self, number: int, has_left: Callable[[], bool]) -> Generator[JobAnswer, None, None]:
        """Yield the job's progress so far, then each change until the job has ended or the command
        ``has_left``. Raises Refused, for example when the daemon ends.
        """
        return self._following.follow(number, has_left)

    def _progress(self, number: int, after: int) -> StoredProgress:
        row = self.row(number)
        info, rounds = self._info(row), self._store.stored_rounds(number, after, PART_SIZE)
        return StoredProgress(info, tuple(rounds), more=_is_more(info, rounds))

    def _new_lines(self, number: int, seen: int) -> tuple[list[str], int]:
        with self._lock:
            running = self._running.get(number)
            found = running.log if running else self._logs.get(number)
        return found.since(seen) if found else ([], seen)

    def new_log(self, number: int, lines: int, after: int | None) -> NewLog:
        """Return lines of a job's log as ``job_log.read`` does. Raises Refused, LocalError."""
        row = _check_kept(self.row(number))  # before its log is read: a job that has ended writes no more
        path = self._context.fleet.job_directory(row.id) / LOG
        found, position, more = job_log.read(path, lines, after)
        return NewLog(found, LogPosition("", position), ended=row.state not in ACTIVE and not more)

    def model(self, number: int, *, best: bool = False) -> Path:
        """Return the path of a job's model, or of that of the best score so far. Raises Refused without
        one.
        """
        row = _check_kept(self.row(number))
        if best and (found := self._folder(number) / BEST).exists():
            return found
        if best or not row.model:
            which = "model of a best score" if best else "model"
            raise Refused("", "state", f"job {number} has no {which} yet: it is {row.state}")
        return Path(row.model)

    def curves(self, number: int) -> Curves:
        """Return the measured curves of a synchronous job's workers. Raises Refused without any."""
        curves = artifacts.read(self._folder(number), Curves)
        if curves is None:
            raise Refused("", "state", f"the workers of job {number} were not measured")
        return curves

    def prepared(self, number: int) -> PreparedWorkers:
        """Return the workers of a job without rounds. Raises Refused before they are prepared."""
        found = artifacts.read(self._folder(number), PreparedWorkers)
        if found is None:
            raise Refused("", "state", f"job {number} has rounds, or its workers were not prepared")
        return found

    def _folder(self, number: int) -> Path:
        return self._context.fleet.job_directory(_check_kept(self.row(number)).id)

    def row(self, number: int) -> JobRow:
        """Return a job as it is stored. Raises Refused for an unknown one."""
        row = self._store.job(number) if 0 < number <= LARGEST_NUMBER else None
        if row is None:
            raise Refused("", "unknown", f"there is no job {number}")
        return row

    def _info(self, row: JobRow) -> JobInfo:
        """Return a job as commands see it. Raises LocalError for a round that cannot be read."""
        standing, (last, waits) = row.standing, self._recent(row.id)
        if standing is None:
            board = ScoreBoard.of(row.job.scoring, row.job.total, self._store.scores(row.id))
            self._store.set_standing(row.id, standing := board.standing)
        return replace(
            self._without_rounds(row),
            round=last,
            metric=printable(standing.metric),
            score=standing.score,
            best=standing.best,
            best_round=standing.best_round,
            waits=waits,
        )

    def _recent(self, number: int) -> tuple[int, dict[str, float]]:
        """Return the last round of a job and the waiting in the RECENT last ones, read again once it has
        others.
        """
        version = self._store.version(number)
        known = self._summaries.get(number)
        if known is None or known[0] != version:
            recent = self._store.last_rounds(number, RECENT)
            waits = shares(total(each.data for each in recent))
            known = version, recent[-1].round if recent else 0, waits
            self._summaries[number] = known
            if len(self._summaries) > KEPT_SUMMARIES:
                self._summaries.pop(next(iter(self._summaries)))
        return known[1:]

    def _reason(self, row: JobRow) -> str:
        """Return what an active job waits for, "" for nothing."""
        if row.state is JobState.QUEUED:
            return queue.describe(self._waits.get(row.id, ()))
        running = self._running.get(row.id)
        return f"waits: {running.waits}" if running and running.waits else ""

    def _without_rounds(self, row: JobRow) -> JobInfo:
        running = self._running.get(row.id) if row.state is JobState.RUNNING else None
        stage, done = running.runner.stage if running else ("", 0.0)
        return JobInfo(
            id=row.id,
            name=row.job.name,
            state=str(row.state),
            error=printable(row.error, len(row.error), kept="\n\t"),  # it may quote the job
            model=row.model,
            round=0,
            rounds=row.job.total,
            unit="epoch" if row.job.synchronous else "round",
            metric="",
            score=None,
            best=None,
            best_round=0,
            created=row.created,
            ended=row.ended,
            devices=row.job.devices,
            priority=row.job.priority,
            reason=self._reason(row),
            pruned=row.pruned,
            owner=row.owner,
            stage=str(stage),
            done=done,
        )


def _failure(number: int, running: _Running, error: Exception) -> tuple[str, bool]:
    """Return the failure of a job as users read it, and whether it is no fault of this program."""
    ours = isinstance(error, (MillpondError, OSError))
    text = str(error) if ours else f"internal error: {error!r}"
    return advised(text, number, running.devices), ours


def _is_more(info: JobInfo, rounds: Sequence[StoredRound]) -> bool:
    return bool(rounds) and rounds[-1].round < info.round


def _check_kept(row: JobRow) -> JobRow:
    """Return ``row`` unchanged. Raises Refused for a job whose folder is gone."""
    if row.pruned is not None:
        raise Refused("", "state", f"job {row.id}: its files are pruned")
    return row

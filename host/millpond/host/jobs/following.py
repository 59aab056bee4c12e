# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): tells commands the progress of jobs, read and encoded once for all who follow a job."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Final

from millpond.base.deadline import Deadline
from millpond.base.errors import Refused
from millpond.host.api.connection import ENDED
from millpond.host.api.daemon import LARGEST_NUMBER
from millpond.host.api.progress import StoredProgress
from millpond.host.records.jobs import ACTIVE
from millpond.host.records.stored_rounds import StoredRound
from millpond.wire.framing import encode

PAUSE_SECONDS: Final = 0.25
"""The least time between two answers to one command, but for the job's end: changes are told together."""
FOLLOW_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 1.0
"""Time after which the daemon looks for a waiting command: one that has left gives its place back."""
KEPT_ROUNDS: Final = 64
"""The last rounds of a followed job that are kept in memory; a command that lacks more reads the store."""
KEPT_BYTES: Final = 32 << 20
"""Bytes of encoded parts of jobs' rounds that are kept for the next command that asks for them."""
Read = Callable[[int, int], StoredProgress]
NewLines = Callable[[int, int], tuple[list[str], int]]
_Key = tuple[int, int, int]  # the job, the round before the part, the drops


@dataclass(slots=True)
class JobAnswer:
    """An answer to all commands that have been told the same of a job: its ``progress``, and the number of
    lines of its log that they have seen with it. Where more rounds follow, ``progress`` has the last of its
    rounds alone, and all are in the ``frame``.
    """

    progress: StoredProgress
    seen: int
    _frame: bytes = b""

    @property
    def frame(self) -> bytes:
        """The message as it is sent, encoded once."""
        self._frame = self._frame or encode(self.progress)
        return self._frame


class StoredParts:
    """Reads jobs, and keeps those parts of their rounds that are followed by more, encoded: they were final
    until the number that ``drops`` returns for a job changes. Thread-safe.
    """

    def __init__(self, read: Read, drops: Callable[[int], int]) -> None:
        self._read, self._drops = read, drops
        self._lock, self._kept, self._size = threading.Lock(), OrderedDict[_Key, JobAnswer](), 0

    def answer(self, number: int, after: int, lines: NewLines, seen: int) -> JobAnswer:
        """Return a job with the first rounds behind ``after``, and its log's lines behind the first ``seen``
        unless more rounds follow.
        """
        key = number, after, self._drops(number)
        with self._lock:
            if kept := self._kept.get(key):
                self._kept.move_to_end(key)
                return JobAnswer(kept.progress, seen, kept.frame)
        found = self._read(number, after)
        if not found.more:
            told, seen = lines(number, seen)
            return JobAnswer(replace(found, lines=tuple(told)), seen)
        made = JobAnswer(replace(found, rounds=found.rounds[-1:]), seen, encode(found))
        self._keep(key, made)
        return made

    def _keep(self, key: _Key, made: JobAnswer) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._size += len(made.frame)
            while self._size > KEPT_BYTES:
                self._size -= len(self._kept.popitem(last=False)[1].frame)


class JobFollowing:
    """The commands that follow jobs. ``read`` returns a job by its number with the first rounds behind one,
    ``new_lines`` its log's lines behind the first ones of a number, and the number of all, ``drops`` how
    often rounds of a job were forgotten. Thread-safe.
    """

    def __init__(self, read: Read, new_lines: NewLines, drops: Callable[[int], int]) -> None:
        self._read, self._new_lines = read, new_lines
        self._parts = StoredParts(read, drops)
        self._lock = threading.Lock()
        self._jobs: dict[int, _FollowedJob] = {}
        self._closing = False

    def changed(self, number: int | None = None, *, ended: bool = False) -> None:
        """Tell the followers of a job, or of all jobs, that it has changed, or has ``ended``."""
        with self._lock:
            found = self._jobs.values() if number is None else filter(None, [self._jobs.get(number)])
            jobs = list(found)
        for job in jobs:
            job.changed(hurry=ended)

    def close(self) -> None:
        """End all following: the daemon ends."""
        self._closing = True
        self.changed(ended=True)

    def follow(self, number: int, has_left: Callable[[], bool]) -> Generator[JobAnswer, None, None]:
        """Yield the job's progress so far, then each change until the job has ended or the command
        ``has_left``. Raises Refused, for example when the daemon ends.
        """
        last, seen = 0, 0
        with self._followed(number) as job:
            while True:
                revision = job.revision
                if self._closing:
                    raise Refused("", "ended", ENDED)
                answer = job.since(last, seen)
                yield answer
                found, seen = answer.progress, answer.seen
                last = found.rounds[-1].round if found.rounds else last
                if not found.more:
                    if found.info.state not in ACTIVE:
                        return
                    job.wait(revision, has_left)
                    if has_left():
                        return

    @contextlib.contextmanager
    def _followed(self, number: int) -> Iterator[_FollowedJob]:
        with self._lock:
            made = _FollowedJob(number, self._read, self._new_lines, self._parts)
            job = self._jobs.setdefault(number, made)
            job.followers += 1
        try:
            yield job
        finally:
            with self._lock:
                job.followers -= 1
                if not job.followers:
                    del self._jobs[number]


class _FollowedJob:
    """A job with followers: its last answer, and its last rounds."""

    def __init__(self, number: int, read: Read, new_lines: NewLines, parts: StoredParts) -> None:
        self._number, self._read, self._new_lines, self._parts = number, read, new_lines, parts
        self.followers, self.revision = 0, 0
        self._condition, self._reading = threading.Condition(), threading.Lock()
        self._hurry = threading.Event()
        self._now: StoredProgress | None = None
        self._known = -1  # the revision of what follows
        self._answers: dict[tuple[int, int], JobAnswer] = {}  # by the last round and line
        self._rounds: list[StoredRound] = []
        self._before = 0  # the number of the round before those

    def changed(self, *, hurry: bool) -> None:
        """Have the followers look again, those in their pause at once if they are to ``hurry``."""
        with self._condition:
            self.revision += 1
            if hurry:
                self._hurry.set()
            self._condition.notify_all()

    def wait(self, revision: int, has_left: Callable[[], bool]) -> None:
        """Wait for a change since ``revision``, at least PAUSE_SECONDS unless there is a hurry, at most until
        the command ``has_left``.
        """
        self._hurry.wait(PAUSE_SECONDS)
        deadline = Deadline.after(FOLLOW_SECONDS)
        with self._condition:
            while self.revision == revision and not (deadline.passed or has_left()):
                self._condition.wait(LOOK_SECONDS)

    def since(self, last: int, seen: int) -> JobAnswer:
        """Return the job now, with its rounds behind ``last`` or the first of them, and its log's lines
        behind the first ``seen``.
        """
        with self._reading:
            revision = self.revision
            if self._now is None or self._known != revision:
                self._now, self._known = self._look(self._now is None), revision
                self._answers.clear()
            if last >= self._before:
                if (last, seen) not in self._answers:
                    rounds = tuple(each for each in self._rounds if each.round > last)
                    self._answers[last, seen] = self._told(replace(self._now, rounds=rounds), seen)
                return self._answers[last, seen]
        return self._parts.answer(self._number, last, self._new_lines, seen)

    def _told(self, found: StoredProgress, seen: int) -> JobAnswer:
        lines, seen = self._new_lines(self._number, seen)
        return JobAnswer(replace(found, lines=tuple(lines)), seen)

    def _look(self, is_first: bool) -> StoredProgress:
        """Read the job, and the rounds that are new."""
        self._hurry.clear()
        end = self._rounds[-1].round if self._rounds else self._before
        found = self._read(self._number, LARGEST_NUMBER if is_first else end)
        if is_first or found.more or found.info.round < end:  # it computes its last rounds again
            self._rounds, self._before = [], found.info.round
        else:
            self._rounds.extend(found.rounds)
        if len(self._rounds) > KEPT_ROUNDS:
            self._before = self._rounds[-KEPT_ROUNDS - 1].round
            del self._rounds[:-KEPT_ROUNDS]
        if found.info.state not in ACTIVE:
            self._hurry.set()
        return replace(found, rounds=(), more=False)

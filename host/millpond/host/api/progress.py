# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages that tell the rounds of a job, as they are stored, and what commands make of these."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.host.api.daemon import JobInfo
from millpond.host.records.jobs import Round
from millpond.host.records.stored_rounds import StoredRound, read_rounds
from millpond.train.job.spec import Job
from millpond.wire.messages import Message, message


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it was submitted, ``code`` as the digest of its files, and its finished rounds."""

    info: JobInfo
    job: Job
    code: str
    rounds: tuple[Round, ...]


@message("api.job")
@dataclass(frozen=True, slots=True)
class StoredJob(Message):
    """A job as it was submitted, ``code`` as the digest of its files, and finished rounds, or the first."""

    info: JobInfo
    job: Job
    code: str
    rounds: tuple[StoredRound, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The job now, and the rounds and log lines that are new since the last JobProgress; ``more`` rounds
    follow in the next one.
    """

    info: JobInfo
    rounds: tuple[Round, ...] = ()
    lines: tuple[str, ...] = ()
    more: bool = False


@message("api.progress")
@dataclass(frozen=True, slots=True)
class StoredProgress(Message):
    """The job now, and the rounds and log lines that are new since the last such message; ``more`` rounds
    follow in the next one.
    """

    info: JobInfo
    rounds: tuple[StoredRound, ...] = ()
    lines: tuple[str, ...] = field(default_factory=tuple)
    more: bool = False

    def read(self) -> JobProgress:
        """Return it with its rounds. Raises UnreadableRow."""
        return JobProgress(self.info, read_rounds(self.info.id, self.rounds), self.lines, self.more)

# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the folders of ended jobs, removed beyond a limit or by hand.

A job is stored as pruned before its folder is removed, so that no daemon offers a model that is half gone;
the next daemon removes what this one has not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from millpond.base.errors import MillpondError, Refused
from millpond.host.api.daemon import PrunedJob, PrunedJobs, PruneJobs
from millpond.host.fleet.directory import Fleet
from millpond.host.records.jobs import EndedJob
from millpond.host.store.store import Store

log = logging.getLogger(__name__)
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class PruneRule:
    """The jobs that are pruned: those beyond the newest ``keep``, or beyond ``mib`` MiB of newer ones and
    their own, without both all; of these, those that ended more than ``older_than`` seconds ago, if that is
    not 0. The last job that has ended is never beyond ``mib``. ``only`` is the one job that is meant, 0 for
    all.
    """

    keep: int | None = None
    mib: int | None = None
    older_than: float = 0.0
    only: int = 0


def chosen(jobs: Iterable[EndedJob], rule: PruneRule, now: float) -> list[EndedJob]:
    """Return the jobs that ``rule`` prunes at ``now`` (Unix seconds), the newest first."""
    found, taken = [], 0
    unlimited = rule.keep is None and rule.mib is None
    for place, job in enumerate(sorted(jobs, key=lambda job: (-job.ended_as, -job.id))):
        taken += job.bytes
        too_many = rule.keep is not None and place >= rule.keep
        too_large = rule.mib is not None and place > 0 and taken > rule.mib << 20
        old_enough = not rule.older_than or now - job.ended >= rule.older_than
        meant = rule.only in (0, job.id)
        if (unlimited or too_many or too_large) and old_enough and meant:
            found.append(job)
    return found


class JobPruner:
    """Prunes the jobs of ``store``. The context of ``queue_held`` is that of the queue, in which none of them
    is resumed; it raises Refused when the daemon ends.
    """

    def __init__(
        self, store: Store, fleet: Fleet, queue_held: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._store, self._fleet, self._queue_held = store, fleet, queue_held

    @property
    def limits(self) -> PruneRule:
        """The limits of the fleet's configuration."""
        config = self._fleet.config.jobs
        return PruneRule(config.keep or None, config.mib or None)

    def requested(self, request: PruneJobs, now: float) -> PrunedJobs:
        """Prune as a command asks for. Raises as ``prune``."""
        by_limits = request.keep is None and request.older_than is None and not request.only
        own = PruneRule(request.keep, None, request.older_than or 0.0, request.only)
        rule = self.limits if by_limits else own
        if by_limits and rule == PruneRule():
            return PrunedJobs(())
        found = self.prune(rule, now, dry_run=request.dry_run, forget=request.forget)
        return PrunedJobs(tuple(PrunedJob(job.id, job.name, job.bytes) for job in found))

    def prune(
        self, rule: PruneRule, now: float, *, dry_run: bool = False, forget: bool = False, spared: int = 0
    ) -> list[EndedJob]:
        """Prune jobs but the ``spared`` one, and return them, the newest first; ``forget`` removes their
        rows, too. Raises Refused when the daemon ends, and LocalError for what cannot be stored; jobs that
        were marked until then lose their folders all the same.
        """
        marked: list[int] = []
        try:
            with self._queue_held():
                found = [job for job in chosen(self._ended(forget), rule, now) if job.id != spared]
                for job in () if dry_run else found:
                    self._store.prune_job(job.id)
                    marked.append(job.id)
        finally:
            for number in marked:
                if self._remove(number) and forget:
                    self._store.forget_job(number)
        return found

    def prune_beyond_limits(self, now: float, spared: int) -> None:
        """Prune the jobs that are beyond the fleet's limits, but not the ``spared`` one, which has just
        ended; what cannot be done is logged.
        """
        if self.limits == PruneRule():
            return
        try:
            for job in self.prune(self.limits, now, spared=spared):
                log.info("job %d (%s) is pruned: %d bytes", job.id, job.name, job.bytes)
        except Refused:  # the next daemon prunes them at the end of a job
            pass
        except MillpondError as error:
            log.error("jobs beyond the limits cannot be pruned: %s", error)

    def remove_left(self) -> None:
        """Remove the folders of pruned jobs that a daemon has left when it ended. Raises LocalError."""
        for job in self._store.ended():
            if job.pruned:
                self._remove(job.id)

    def _ended(self, with_pruned: bool) -> list[EndedJob]:
        return [
            job if job.pruned else replace(job, bytes=self._size(job.id))
            for job in self._store.ended()
            if with_pruned or not job.pruned
        ]

    def _size(self, number: int) -> int:
        total = 0
        for folder, _, names in os.walk(self._fleet.job_directory(number)):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(f"{folder}/{name}").st_blocks * _BLOCK
        return total

    def _remove(self, number: int) -> bool:
        """Remove the folder of a job. Returns whether it is gone."""
        try:
            shutil.rmtree(self._fleet.job_directory(number))
        except FileNotFoundError:
            pass
        except OSError as error:  # the next daemon tries again
            log.warning("job %d: its folder cannot be removed: %s", number, error)
            return False
        return True

# SPDX-License-Identifier: Apache-2.0
"""Edge: admits prepared workers to a job, profiles them first where it balances, and lets go of lost ones."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import deque
from dataclasses import replace

import psutil

from millpond.base import schema
from millpond.base.errors import LocalError
from millpond.base.version import VERSION
from millpond.host.api.daemon import Curves
from millpond.host.jobs.context import JobContext
from millpond.host.jobs.training.membership import MemberState
from millpond.host.jobs.training.planner import Planner
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.round_planner import RoundPlanner
from millpond.host.jobs.training.shards import Shards
from millpond.host.jobs.training.worker_group import WorkerGroup
from millpond.host.records.jobs import HOST, JobEvent, JobRow
from millpond.host.workers.dispatcher import Dispatcher, WorkerLoss
from millpond.host.workers.worker import ModelState, Worker
from millpond.train.balance.equal_time import LEAST_BATCH
from millpond.train.balance.profiling import Probe, Profile, largest
from millpond.train.protocol import Ready
from millpond.train.update_bounds import UpdateBounds

MEASURE_SECONDS = 3.0
MEMORY_PART = 0.8
"""Part of a machine's free memory that a worker may use."""
MOST_BATCH = 1 << 16
"""Largest batch of one worker."""
TICK_SECONDS = 0.2
MOST_EVENTS = 1000
"""Events that are kept of one epoch: the last ones."""


class Admission:
    """Keeps the roster, the shards and the planner in agreement about the present workers."""

    def __init__(
        self,
        row: JobRow,
        context: JobContext,
        group: WorkerGroup,
        roster: JobRoster,
        shards: Shards,
        planner: Planner | RoundPlanner,
        log: logging.Logger,
    ) -> None:
        self._row, self._context, self._group = row, context, group
        self._roster, self._shards, self._planner, self._log = roster, shards, planner, log
        self._profiles: dict[int, Profile] = {}
        self._most = dict[int, int]()  # the largest batches of workers that ran out of memory with more
        self._begun = False
        self._events: deque[JobEvent] = deque(maxlen=MOST_EVENTS)
        self._looked = self._trust_after = time.monotonic()

    def begin(self) -> Curves:
        """Note that the first workers have joined: from now on each that joins is logged. Returns their
        curves and the first plan.
        """
        self._begun = True
        for dispatcher in list(self._roster.present.values()):
            if refusal := self._overweight(dispatcher.rank):
                self._refuse(dispatcher, refusal)
        if self._row.job.work.secure:
            self._log.info("%s", self._group.rosters)
        if privacy := self._row.job.privacy:
            self._log.info("%s", privacy.plan(self._row.job.total))
        if not isinstance(self._planner, Planner):
            return Curves((), {})
        self._log.info("plan: %s", self._planner.description)
        batches = dict(zip(self._group.names, self._planner.plan.batches.tolist(), strict=True))
        return Curves(tuple(self._profiles.values()), batches)

    def handle_profile(self) -> None:
        """Wait for an event of a worker that is being profiled, while no exchange runs; late answers that
        come meanwhile are kept for the next one. Raises JobStopped.
        """
        self.check_silence()
        if event := self._roster.wait(TICK_SECONDS):
            self._roster.keep(event)

    @property
    def profiling(self) -> bool:
        """Whether any worker is being profiled."""
        return bool(self._roster.profiler.dispatchers)

    def admit_new(self, state: ModelState) -> None:
        """Admit the workers that were prepared since the last call."""
        now = time.monotonic()
        for rank, _ in enumerate(self._group.names):
            supervisor = self._group.supervisor(rank)
            worker, ready = supervisor.worker, supervisor.ready
            if supervisor.failure and self._roster.state(rank, now) is not MemberState.OUT:
                self._roster.lose(rank, now, for_good=True)
            elif (
                worker is not None
                and ready is not None
                and rank not in self._roster.present
                and rank not in self._roster.profiler.ranks
            ):
                self._admit(rank, worker, ready, state)

    def lost(self, loss: WorkerLoss) -> None:
        """Let go of a lost worker: its supervisor prepares another, after a pause if it was lost often,
        unless its answer was such that no retry can mend it. One that ran out of memory is to have half the
        batch from then on; if it cannot, and its own limit was the reason, it is out the second time.
        """
        halved = loss.out_of_memory and self._halve_batch(loss)
        pause = self._roster.lose(
            loss.dispatcher.rank,
            time.monotonic(),
            for_good=loss.for_good and not loss.out_of_memory,
            at_limit=loss.for_good and loss.out_of_memory and not halved,
            scoring=loss.task.request.held_out,
        )
        self._let_go(loss.dispatcher, loss.reason, pause, scoring=loss.task.request.held_out)

    def _halve_batch(self, loss: WorkerLoss) -> bool:
        """Allow a worker at most half the batch of its lost task; return whether that can be."""
        rank, half = loss.dispatcher.rank, loss.task.samples // 2
        least = max(LEAST_BATCH, self._shards.largest_group(rank))
        if not isinstance(self._planner, Planner) or half < least:
            return False
        self._most[rank] = half
        return True

    def _let_go(self, dispatcher: Dispatcher, reason: str, pause: float, *, scoring: bool = False) -> None:
        """Close a worker that may come back in ``pause`` seconds."""
        rank, name = dispatcher.rank, dispatcher.worker.name
        if 0 < pause < math.inf:
            often = self._roster.losses(rank, scoring=scoring)
            reason += f", for the {often}{'rd' if often == 3 else 'th'} time in a row: banned for {pause:g} s"
        self._log.warning("it goes on without %s: %s", name, reason)
        self.note("lost", name, reason)
        self._planner.leave(rank)
        dispatcher.end()
        supervisor = self._group.supervisor(rank)
        if pause == math.inf:
            supervisor.ban(dispatcher.worker, reason)
        else:
            supervisor.lose(dispatcher.worker, reason, pause)

    def check_silence(self) -> None:
        """Close workers on devices that have been silent for half of the fleet's ``silence``, so that no
        exchange waits for them. Silence does not count while this process itself was late to listen. Raises
        JobStopped.
        """
        self._group.check_stop()
        now, longest = time.monotonic(), self._context.fleet.config.silence / 2
        if now - self._looked > TICK_SECONDS + longest / 2:
            self._trust_after = now + longest
        self._looked = now
        if now < self._trust_after:
            return
        under_way = [each for each in self._roster.present.values() if each.task]
        for dispatcher in (*under_way, *self._roster.profiler.dispatchers):
            device = self._context.devices.get(dispatcher.worker.name)
            if device is not None and device.silence > longest:
                dispatcher.abandon(f"its agent was silent for {longest:g} s")

    def note(self, kind: str, worker: str, text: str) -> None:
        """Note an event of the job."""
        self._events.append(JobEvent(time.time(), kind, worker, text))

    def take_events(self) -> tuple[JobEvent, ...]:
        """Return the events since the last call."""
        found = tuple(self._events)
        self._events.clear()
        return found

    def close(self) -> None:
        """End all dispatchers."""
        for dispatcher in (*self._roster.present.values(), *self._roster.profiler.dispatchers):
            dispatcher.end()

    def _admit(self, rank: int, worker: Worker, ready: Ready, state: ModelState) -> None:
        # A device that counts its public samples wrong must not keep the host out.
        partly = worker.name == HOST
        if refusal := self._shards.add(rank, self._group.shards_of(rank, ready), partly=partly):
            self._log.warning(
                "%s is out of the job%s: %s", worker.name, " in part" if partly else "", refusal
            )
            if not partly:
                self._group.supervisor(rank).ban(worker, refusal)
                return
        self._roster.needed = max(self._roster.needed, ready.least_devices)
        bounds = UpdateBounds.of(self._row.job, sum(ready.held), normalized=self._group.local.normalized)
        dispatcher = Dispatcher(rank, worker, self._roster.events, bounds)
        if not isinstance(self._planner, Planner):
            self._planner.join(rank, ready.samples)
            self._joined(dispatcher)
            return
        known = self._context.store.profile(worker.name, self._fingerprint(rank))
        if known is not None:
            self._join(dispatcher, known)
            return
        self._log.info("%s is measured", worker.name)
        most = min(ready.samples, self._most.get(rank, MOST_BATCH))
        probe = Probe(MEASURE_SECONDS, most, self._memory_limit(rank))
        kind = self._group.kind(rank)
        self._roster.profiler.begin(dispatcher, kind, probe, state, self._measured, self.lost)

    def _measured(self, dispatcher: Dispatcher, profile: Profile) -> None:
        if self._group.supervisor(dispatcher.rank).ready is None:  # the worker was lost meanwhile
            dispatcher.end()
            return
        try:
            self._context.store.set_profile(self._fingerprint(dispatcher.rank), profile)
        except LocalError as error:  # a full disk, most likely: the next job profiles the worker again
            self._log.warning("what was measured cannot be kept: %s", error)
        self._join(dispatcher, profile)

    def _join(self, dispatcher: Dispatcher, profile: Profile) -> None:
        assert isinstance(self._planner, Planner)
        rank = dispatcher.rank
        self._profiles[rank] = profile
        most = largest(profile.points, self._most.get(rank, MOST_BATCH), self._memory_limit(rank))
        if most < (least := self._shards.largest_group(rank)):
            reason = f"its answers cover {least} samples, and its memory takes {most}"
            pause = self._roster.lose(rank, time.monotonic())
            self._let_go(dispatcher, reason, pause)  # other work may leave it more, later
            return
        most = max(most >> self._roster.losses(rank), least)
        self._planner.join(rank, profile, most, self._shards.samples, least)
        self._joined(dispatcher)

    def _overweight(self, rank: int) -> str:
        """Return the reason for refusing a device that has too large a share of the samples, or ""."""
        ready, most = self._group.supervisor(rank).ready, self._row.job.limits.most_share
        private = self._row.job.data.private
        if self._group.names[rank] == HOST or ready is None or most >= 1.0 or not private:
            return ""
        share = ready.parts[0] / self._shards.samples  # its private ones
        return f"it has {share:.0%} of the samples; limits.most_share is {most:g}" if share > most else ""

    def _refuse(self, dispatcher: Dispatcher, refusal: str) -> None:
        name = dispatcher.worker.name
        self._log.warning("%s is out of the job: %s", name, refusal)
        self._roster.lose(dispatcher.rank, time.monotonic(), for_good=True)
        self._planner.leave(dispatcher.rank)
        dispatcher.end()
        self._group.supervisor(dispatcher.rank).ban(dispatcher.worker, refusal)

    def _joined(self, dispatcher: Dispatcher) -> None:
        self._roster.join(dispatcher.rank, dispatcher)
        if self._begun and (refusal := self._overweight(dispatcher.rank)):
            self._refuse(dispatcher, refusal)
        elif self._begun:
            self._log.info("%s joins; plan: %s", dispatcher.worker.name, self._planner.description)
            self.note("joined", dispatcher.worker.name, self._planner.description)

    def _fingerprint(self, rank: int) -> str:
        """Return a fingerprint of a worker's computation: model, code, data, threads, software."""
        job, device = self._row.job, self._context.devices.get(self._group.names[rank])
        welcome = device.status.welcome if device else None
        software = welcome.software if welcome else VERSION
        data = [job.data.private, job.data.public]
        work = replace(job.work, name="", seed=0, total=0)
        key = [schema.dump(work), schema.dump(self._row.files), data, software]
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def _memory_limit(self, rank: int) -> int | None:
        """Return the bytes that a worker may use, None where the free memory is unknown."""
        name = self._group.names[rank]
        if name == HOST:
            return int(MEMORY_PART * psutil.virtual_memory().available)
        status = self._context.devices[name].status
        if status.welcome is None or status.load is None:
            return None
        return int(MEMORY_PART * (status.welcome.memory - status.load.memory_used))

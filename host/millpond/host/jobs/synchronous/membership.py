"""Edge: who takes part in a synchronous job's steps: workers come, are measured, join, are lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import queue
import time
from collections import Counter
from collections.abc import Iterable

import psutil

from millpond.base import schema
from millpond.base.errors import LocalError
from millpond.base.version import VERSION
from millpond.host.api.daemon import Curves
from millpond.host.jobs.synchronous.planner import Planner
from millpond.host.jobs.synchronous.profiler import Profiler
from millpond.host.jobs.synchronous.shards import Shards
from millpond.host.jobs.synchronous.step_engine import StepEngine
from millpond.host.jobs.synchronous.worker_group import SynchronousGroup
from millpond.host.jobs.worker_group import JobContext
from millpond.host.model.jobs import HOST, JobRow
from millpond.host.workers.dispatcher import Dispatcher, WorkerLoss
from millpond.host.workers.worker import ModelState
from millpond.train.balance.profiling import Probe, Profile, largest

MEASURE_SECONDS = 3.0
MEMORY_PART = 0.8
"""Of what a machine has free, that a worker may grow into."""
MOST_BATCH = 1 << 16
"""Of one worker: the indices of its samples travel in the head of a message."""
SILENCE_SECONDS = 1.5
TICK_SECONDS = 0.2
LOSSES = 3


class Membership:
    """Keeps ``stepping``, ``holdings`` and ``pacing`` of one mind about who is there."""

    def __init__(
        self,
        row: JobRow,
        around: JobContext,
        crew: SynchronousGroup,
        stepping: StepEngine,
        holdings: Shards,
        pacing: Planner,
        log: logging.Logger,
    ) -> None:
        self._row, self._around, self._crew = row, around, crew
        self._stepping, self._holdings, self._pacing, self._log = stepping, holdings, pacing, log
        self._profiles: dict[int, Profile] = {}
        self._begun = False
        self._losses: Counter[int] = Counter()  # in a row, at work
        self._looked = self._trust_after = time.monotonic()
        self._measuring = stepping.measuring = Profiler(self._measured, self.lost)

    def begin(self, state: ModelState) -> Curves:
        """Take in all that are there, and measure those that are not known. Raises JobFailed, Stopped."""
        while not self._stepping.links:
            self._crew.wait_for_anyone()
            self.update(state)
            while self.measures:
                self.wait_for_measures()
        self._log.info("plan: %s", self._pacing.described)
        self._begun = True
        batches = dict(zip(self._crew.names, self._pacing.plan.batches.tolist(), strict=True))
        return Curves(tuple(self._profiles.values()), batches)

    def wait_for_measures(self) -> None:
        """Go on with measuring where there is nothing else to do. Raises Stopped."""
        self.look_around()
        with contextlib.suppress(queue.Empty):
            self._measuring.take(self._stepping.events.get(timeout=TICK_SECONDS))

    @property
    def measures(self) -> bool:
        """Whether anybody is being measured."""
        return bool(len(self._measuring))

    def update(self, state: ModelState) -> None:
        """Take in who has come since."""
        for rank, _ in enumerate(self._crew.names):
            if rank not in self._stepping.links and rank not in self._measuring.ranks:
                self._take_in(rank, state)

    def did(self, ranks: Iterable[int]) -> None:
        """What these were at was counted."""
        for rank in ranks:
            self._losses.pop(rank, None)

    def lost(self, loss: WorkerLoss) -> None:
        """A worker is lost; another is prepared, unless it is no good to the job, or always lost at work."""
        rank, participant = loss.link.rank, self._crew.participant(loss.link.rank)
        self._losses[rank] += 1
        often = self._losses[rank] >= LOSSES
        reason = f"{loss.reason}, for the {LOSSES}rd time in a row" if often else loss.reason
        self._log.warning("it goes on without %s: %s", loss.link.worker.name, reason)
        self._pacing.leave(rank)
        loss.link.end()
        out = loss.for_good or often
        (participant.expel if out else participant.lose)(loss.link.worker, reason)

    def look_around(self) -> None:
        """Nobody waits for a worker whose device has not been heard, unless it is this process that has not
        listened. Raises Stopped.
        """
        self._crew.check_stop()
        now = time.monotonic()
        if now - self._looked > TICK_SECONDS + SILENCE_SECONDS / 2:
            self._trust_after = now + SILENCE_SECONDS
        self._looked = now
        if now < self._trust_after:
            return
        for link in (*self._stepping.at_work(), *self._measuring.links):
            device = self._around.devices.get(link.worker.name)
            if device is not None and device.silence > SILENCE_SECONDS:
                link.worker.close()  # its link tells of the loss

    def close(self) -> None:
        """End all links."""
        for link in (*self._stepping.links.values(), *self._measuring.links):
            link.end()

    def _take_in(self, rank: int, state: ModelState) -> None:
        participant = self._crew.participant(rank)
        worker, ready = participant.worker, participant.ready
        if worker is None or ready is None:
            return
        if complaint := self._holdings.add(rank, self._crew.holdings_of(rank, ready)):
            self._log.warning("%s is out of the job: %s", worker.name, complaint)
            participant.expel(worker, f"{worker.name}: {complaint}")
            return
        link = Dispatcher(rank, worker, self._stepping.events)
        known = self._around.record.profile(worker.name, self._work(rank, ready.shape))
        if known is not None:
            self._join(link, known)
            return
        self._log.info("%s is measured", worker.name)
        probe = Probe(MEASURE_SECONDS, min(ready.samples, MOST_BATCH), self._memory(rank))
        self._measuring.begin(link, self._crew.kind(rank), probe, ready.parts, state)

    def _measured(self, link: Dispatcher, profile: Profile) -> None:
        ready = self._crew.participant(link.rank).ready
        if ready is None:  # it was lost meanwhile
            link.end()
            return
        try:
            self._around.record.set_profile(self._work(link.rank, ready.shape), profile)
        except LocalError as error:  # a full disk, most likely: it is measured again another time
            self._log.warning("what was measured cannot be kept: %s", error)
        self._join(link, profile)

    def _join(self, link: Dispatcher, profile: Profile) -> None:
        self._profiles[link.rank] = profile
        most = largest(profile.points, MOST_BATCH, self._memory(link.rank)) >> self._losses[link.rank]
        self._pacing.join(link.rank, profile, most, self._holdings.samples)
        self._stepping.links[link.rank] = link
        if self._begun:
            self._log.info("%s joins; plan: %s", link.worker.name, self._pacing.described)

    def _work(self, rank: int, shape: tuple[int, ...]) -> str:
        """A fingerprint of what a worker does in a step: model, code, shape of samples, threads, software."""
        job, device = self._row.job, self._around.devices.get(self._crew.names[rank])
        welcome = device.status.welcome if device else None
        software = welcome.software if welcome else VERSION
        key = [schema.dump(job.model), self._row.code, shape, job.train.threads, software]
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def _memory(self, rank: int) -> int | None:
        """Bytes that a worker may have."""
        name = self._crew.names[rank]
        if name == HOST:
            return int(MEMORY_PART * psutil.virtual_memory().available)
        status = self._around.devices[name].status
        if status.welcome is None or status.load is None:
            return None
        return int(MEMORY_PART * (status.welcome.memory - status.load.memory_used))

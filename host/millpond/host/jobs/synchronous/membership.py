# SPDX-License-Identifier: Apache-2.0
"""Edge: elastic membership of a synchronous job: workers are admitted, profiled, joined, lost, banned."""

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
"""Part of a machine's free memory that a worker may use."""
MOST_BATCH = 1 << 16
"""Largest batch of one worker: the indices of its samples travel in the head of a message."""
SILENCE_SECONDS = 1.5
TICK_SECONDS = 0.2
LOSSES = 3


class Membership:
    """Keeps the step engine, the shards and the planner in agreement about the present workers."""

    def __init__(
        self,
        row: JobRow,
        context: JobContext,
        group: SynchronousGroup,
        engine: StepEngine,
        shards: Shards,
        planner: Planner,
        log: logging.Logger,
    ) -> None:
        self._row, self._context, self._group = row, context, group
        self._engine, self._shards, self._planner, self._log = engine, shards, planner, log
        self._profiles: dict[int, Profile] = {}
        self._begun = False
        self._losses: Counter[int] = Counter()  # in a row, by rank, in steps
        self._looked = self._trust_after = time.monotonic()
        self._profiler = engine.profiler = Profiler(self._measured, self.lost)

    def begin(self, state: ModelState) -> Curves:
        """Admit all present workers and profile the unknown ones. Returns their curves and the first plan.
        Raises JobFailed, JobStopped.
        """
        while not self._engine.dispatchers:
            self._group.wait_for_worker()
            self.admit_new(state)
            while self.profiling:
                self.wait_for_profiles()
        self._log.info("plan: %s", self._planner.description)
        self._begun = True
        batches = dict(zip(self._group.names, self._planner.plan.batches.tolist(), strict=True))
        return Curves(tuple(self._profiles.values()), batches)

    def wait_for_profiles(self) -> None:
        """Wait for an event of a worker that is being profiled, while no worker takes part. Raises
        JobStopped.
        """
        self.check_silence()
        with contextlib.suppress(queue.Empty):
            self._profiler.handle(self._engine.events.get(timeout=TICK_SECONDS))

    @property
    def profiling(self) -> bool:
        """Whether any worker is being profiled."""
        return bool(len(self._profiler))

    def admit_new(self, state: ModelState) -> None:
        """Admit the workers that were prepared since the last call."""
        for rank, _ in enumerate(self._group.names):
            if rank not in self._engine.dispatchers and rank not in self._profiler.ranks:
                self._admit(rank, state)

    def reset_losses(self, ranks: Iterable[int]) -> None:
        """End the row of losses of workers whose gradients were counted."""
        for rank in ranks:
            self._losses.pop(rank, None)

    def lost(self, loss: WorkerLoss) -> None:
        """Handle the loss of a worker: its supervisor prepares another, or the worker is banned after LOSSES
        losses in a row or for an answer that no retry can mend.
        """
        rank, supervisor = loss.dispatcher.rank, self._group.supervisor(loss.dispatcher.rank)
        self._losses[rank] += 1
        often = self._losses[rank] >= LOSSES
        reason = f"{loss.reason}, for the {LOSSES}rd time in a row" if often else loss.reason
        self._log.warning("it goes on without %s: %s", loss.dispatcher.worker.name, reason)
        self._planner.leave(rank)
        loss.dispatcher.end()
        out = loss.for_good or often
        (supervisor.ban if out else supervisor.lose)(loss.dispatcher.worker, reason)

    def check_silence(self) -> None:
        """Close workers on devices that have been silent for SILENCE_SECONDS, so that no step waits for them.
        Silence does not count while this process itself was late to listen. Raises JobStopped.
        """
        self._group.check_stop()
        now = time.monotonic()
        if now - self._looked > TICK_SECONDS + SILENCE_SECONDS / 2:
            self._trust_after = now + SILENCE_SECONDS
        self._looked = now
        if now < self._trust_after:
            return
        for dispatcher in (*self._engine.outstanding(), *self._profiler.dispatchers):
            device = self._context.devices.get(dispatcher.worker.name)
            if device is not None and device.silence > SILENCE_SECONDS:
                dispatcher.abandon(f"its agent was silent for {SILENCE_SECONDS:g} s")

    def close(self) -> None:
        """End all dispatchers."""
        for dispatcher in (*self._engine.dispatchers.values(), *self._profiler.dispatchers):
            dispatcher.end()

    def _admit(self, rank: int, state: ModelState) -> None:
        supervisor = self._group.supervisor(rank)
        worker, ready = supervisor.worker, supervisor.ready
        if worker is None or ready is None:
            return
        if refusal := self._shards.add(rank, self._group.shards_of(rank, ready)):
            self._log.warning("%s is out of the job: %s", worker.name, refusal)
            supervisor.ban(worker, f"{worker.name}: {refusal}")
            return
        dispatcher = Dispatcher(rank, worker, self._engine.events)
        known = self._context.store.profile(worker.name, self._fingerprint(rank, ready.shape))
        if known is not None:
            self._join(dispatcher, known)
            return
        self._log.info("%s is measured", worker.name)
        probe = Probe(MEASURE_SECONDS, min(ready.samples, MOST_BATCH), self._memory_limit(rank))
        self._profiler.begin(dispatcher, self._group.kind(rank), probe, ready.parts, state)

    def _measured(self, dispatcher: Dispatcher, profile: Profile) -> None:
        ready = self._group.supervisor(dispatcher.rank).ready
        if ready is None:  # the worker was lost meanwhile
            dispatcher.end()
            return
        try:
            self._context.store.set_profile(self._fingerprint(dispatcher.rank, ready.shape), profile)
        except LocalError as error:  # a full disk, most likely: the next job profiles the worker again
            self._log.warning("what was measured cannot be kept: %s", error)
        self._join(dispatcher, profile)

    def _join(self, dispatcher: Dispatcher, profile: Profile) -> None:
        self._profiles[dispatcher.rank] = profile
        most = (
            largest(profile.points, MOST_BATCH, self._memory_limit(dispatcher.rank))
            >> self._losses[dispatcher.rank]
        )
        self._planner.join(dispatcher.rank, profile, most, self._shards.samples)
        self._engine.dispatchers[dispatcher.rank] = dispatcher
        if self._begun:
            self._log.info("%s joins; plan: %s", dispatcher.worker.name, self._planner.description)

    def _fingerprint(self, rank: int, shape: tuple[int, ...]) -> str:
        """Return a fingerprint of a worker's computation: model, code, sample shape, threads, software."""
        job, device = self._row.job, self._context.devices.get(self._group.names[rank])
        welcome = device.status.welcome if device else None
        software = welcome.software if welcome else VERSION
        key = [schema.dump(job.model), self._row.code, shape, job.train.threads, software]
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

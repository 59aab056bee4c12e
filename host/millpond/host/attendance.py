"""Edge: who takes part in a synchronous job's steps: workers come, are measured, join, are lost."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import queue

import psutil

from millpond.host.api import Curves
from millpond.host.crew import HOST, MOST_SAMPLES, Surroundings
from millpond.host.holdings import Holdings
from millpond.host.link import Link, Loss
from millpond.host.measuring import Measuring
from millpond.host.pacing import Pacing
from millpond.host.record import JobRow
from millpond.host.stepping import Stepping
from millpond.host.steps_crew import StepsCrew
from millpond.train.aggregate import Vector
from millpond.train.balance.probing import Probe, Profile, largest
from millpond.wire import schema

MEASURE_SECONDS = 3.0
MEMORY_PART = 0.8
"""Of what a machine has free, that a worker may grow into."""
SILENCE_SECONDS = 1.5


class Attendance:
    """Keeps ``stepping``, ``holdings`` and ``pacing`` of one mind about who is there."""

    def __init__(
        self,
        row: JobRow,
        around: Surroundings,
        crew: StepsCrew,
        stepping: Stepping,
        holdings: Holdings,
        pacing: Pacing,
        log: logging.Logger,
    ) -> None:
        self._row, self._around, self._crew = row, around, crew
        self._stepping, self._holdings, self._pacing, self._log = stepping, holdings, pacing, log
        self._profiles: dict[int, Profile] = {}
        self._begun = False
        self._measuring = stepping.measuring = Measuring(self._measured, self.lost)

    def begin(self, state: Vector) -> Curves:
        """Take in all that are there, and measure those that are not known."""
        self.update(state)
        while len(self._measuring):
            self._crew.check_stop()
            try:
                self._measuring.take(self._stepping.events.get(timeout=0.2))
            except queue.Empty:
                self.give_up_silent()
        self._log.info("plan: %s", self._pacing.described)
        self._begun = True
        batches = dict(zip(self._crew.names, self._pacing.plan.batches.tolist(), strict=True))
        return Curves(tuple(self._profiles.values()), batches)

    def update(self, state: Vector) -> None:
        """Take in who has come since, and how busy those are that have nothing to do."""
        for rank, _ in enumerate(self._crew.names):
            if rank not in self._stepping.links and rank not in self._measuring.ranks:
                self._take_in(rank, state)
            elif self._pacing.sits_out(rank):
                busy = self._crew.processor_load(rank)
                self._stepping.busy[rank] = float("nan") if busy is None else busy

    def lost(self, loss: Loss) -> None:
        """A worker is lost; another is prepared, unless it is no good to the job."""
        rank, participant = loss.link.rank, self._crew.participant(loss.link.rank)
        self._log.warning("it goes on without %s: %s", loss.link.worker.name, loss.reason)
        self._pacing.leave(rank)
        loss.link.end()
        (participant.expel if loss.for_good else participant.lose)(loss.link.worker, loss.reason)

    def give_up_silent(self) -> None:
        """Nobody waits for a worker whose device has not been heard."""
        for link in self._stepping.at_work():
            device = self._around.devices.get(link.worker.name)
            if device is not None and device.silence > SILENCE_SECONDS:
                link.worker.close()  # its link tells of the loss

    def _take_in(self, rank: int, state: Vector) -> None:
        participant = self._crew.participant(rank)
        worker, ready = participant.worker, participant.ready
        if worker is None or ready is None:
            return
        if complaint := self._holdings.add(rank, self._crew.holdings_of(rank, ready)):
            self._log.warning("%s is out of the job: %s", worker.name, complaint)
            participant.expel(worker, f"{worker.name}: {complaint}")
            return
        link = Link(rank, worker, ready.size, self._stepping.events)
        known = self._around.record.profile(worker.name, self._work(rank, ready.shape))
        if known is not None:
            self._join(link, known)
            return
        self._log.info("%s is measured", worker.name)
        probe = Probe(MEASURE_SECONDS, ready.samples, self._memory(rank))
        self._measuring.begin(link, self._crew.kind(rank), probe, ready.parts, state)

    def _measured(self, link: Link, profile: Profile) -> None:
        ready = self._crew.participant(link.rank).ready
        if ready is not None:  # else it is lost, and its link will tell
            self._around.record.set_profile(self._work(link.rank, ready.shape), profile)
            self._join(link, profile)

    def _join(self, link: Link, profile: Profile) -> None:
        self._profiles[link.rank] = profile
        most = largest(profile.points, MOST_SAMPLES, self._memory(link.rank))
        self._pacing.join(link.rank, profile, most, self._holdings.samples)
        self._stepping.links[link.rank] = link
        if self._begun:
            self._log.info("%s joins; plan: %s", link.worker.name, self._pacing.described)

    def _work(self, rank: int, shape: tuple[int, ...]) -> str:
        """A fingerprint of what a worker does in a step: model, code, shape of samples, threads, software."""
        job, device = self._row.job, self._around.devices.get(self._crew.names[rank])
        welcome = device.status.welcome if device else None
        software = welcome.software if welcome else importlib.metadata.version("millpond")
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

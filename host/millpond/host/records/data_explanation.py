# SPDX-License-Identifier: Apache-2.0
"""Pure: what was chosen for the data of a job's workers, what that predicts, and what was measured.

A prediction follows from measured times of reading and of training alone, so that what is measured beside it
says whether the machine overlaps both as it should.

*Batches.* Reading one takes ``r`` seconds of a thread, training on it ``t``. Without threads that read ahead
each is waited for. ``p`` threads supply one each ``r / p`` seconds, but the first of a pass over the samples
after ``r``. So a pass of ``n`` batches takes ``r + (n - 1) max(t, r / p) + t`` seconds, of which ``n t`` are
training.

*Mini-epochs.* ``tier_model.simulated``: each is fetched while the one before is trained on, but the first one
of an exchange, which is waited for. The fetch is hidden by ``EB1 / B2`` repeats or more, the bytes per second
that training takes over those that are read (Xu et al., *Data-Aware Storage Tiering for Deep Learning*).

*Streams.* The worker's own tuner has chosen, and predicts, see ``data.streaming.protocol.tuner``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millpond.data.tier.tier_model import TieredSystem, simulated
from millpond.host.records.data_costs import DataCosts, total
from millpond.host.records.jobs import Round
from millpond.train.job.spec import Job
from millpond.train.protocol import StreamTiming

_MOST_SIMULATED = 1000  # mini-epochs: a device may claim any number


@dataclass(frozen=True, slots=True)
class MiniEpochChoice:
    """Each exchange has ``count`` mini-epochs of ``size`` samples, of which ``[tier] fast`` holds two of
    ``fitting``. Each is repeated ``repeats`` times on average; ``hiding`` repeats hide its fetch.
    """

    count: float
    size: float
    fitting: int
    repeats: float
    hiding: float


@dataclass(frozen=True, slots=True)
class WorkerData:
    """The data of one worker: seconds of ``reading`` a sample, in one thread, and of ``training`` on it once;
    its ``bytes``, and the bytes per second at which a thread reads (None where reading took no time that can
    be told). The share of its time that it is ``predicted`` to wait, and has ``waited`` by measurement: for
    mini-epochs where there are any, else for batches. ``all_waits`` are for both.
    """

    reading: float
    training: float
    bytes: float
    rate: float | None
    predicted: float
    waited: float
    all_waits: float
    mini_epochs: MiniEpochChoice | None = None
    stream: StreamTiming | None = None


@dataclass(frozen=True, slots=True)
class DataExplanation:
    """The data of a job's ``workers`` in its rounds from ``first`` to ``last``; ``prefetch`` threads of each
    read ahead, and ``passes`` are made over its samples.
    """

    id: int
    name: str
    unit: str
    first: int
    last: int
    prefetch: int
    passes: int
    workers: dict[str, WorkerData] = field(default_factory=dict)


def explanation(number: int, job: Job, unit: str, rounds: Sequence[Round]) -> DataExplanation | None:
    """Return what is known of the data of job ``number`` in some of its rounds; None if it was measured in
    none of them.
    """
    measured = [each for each in rounds if each.data]
    if not measured:
        return None
    work = job.work
    passes = max(work.passes, 1)
    costs = total(each.data for each in measured)
    workers = _workers(costs, work.prefetch, passes)
    first, last = measured[0].round, measured[-1].round
    return DataExplanation(number, job.name, unit, first, last, work.prefetch, passes, workers)


def _workers(costs: Mapping[str, DataCosts], threads: int, passes: int) -> dict[str, WorkerData]:
    return {
        worker: worker_data(own, threads, passes)
        for worker, own in costs.items()
        if own.seconds > 0 and own.trained and own.samples
    }


def worker_data(costs: DataCosts, threads: int, passes: int) -> WorkerData:
    """Return what is known of a worker's data: ``threads`` read ahead, and ``passes`` passes are made over
    the samples of an exchange.
    """
    tiered = bool(costs.mini_epochs)
    waited = costs.stalled if tiered else costs.waited
    choice = _mini_epochs(costs, passes) if tiered else None
    visits = (choice.repeats if choice else passes) * costs.trained
    if costs.stream:
        predicted = costs.stream.idle / 100
    elif choice:
        predicted = _stall(costs, choice)
    else:
        predicted = batch_wait(costs, threads, passes)
    return WorkerData(
        costs.reading / costs.samples,
        (costs.seconds - costs.waited) / visits,
        costs.size / costs.samples,
        costs.size / costs.reading if costs.reading else None,
        predicted,
        waited / costs.seconds,
        costs.share,
        choice,
        costs.stream,
    )


def batch_wait(costs: DataCosts, threads: int, passes: int) -> float:
    """Return the share of its time that a worker is predicted to wait for batches."""
    batches, runs = max(costs.batches, 1), max(costs.exchanges * passes, 1)
    read, train = costs.reading / batches, (costs.seconds - costs.waited) / batches
    if not threads:
        return _share(read, read + train)
    each = max(batches / runs, 1.0)
    whole = read + (each - 1) * max(train, read / threads) + train
    return _share(whole - each * train, whole)


def _mini_epochs(costs: DataCosts, passes: int) -> MiniEpochChoice:
    count = costs.mini_epochs / costs.exchanges
    repeats = costs.repeats / costs.mini_epochs if costs.repeats else float(passes)
    fetch, train = costs.reading / costs.samples, (costs.seconds - costs.stalled) / costs.trained
    hiding = _share(fetch, train / repeats)
    return MiniEpochChoice(count, costs.trained / costs.mini_epochs, costs.fitting, repeats, hiding)


def _stall(costs: DataCosts, choice: MiniEpochChoice) -> float:
    """Return the share of its time that a worker is predicted to wait for mini-epochs, in an exchange."""
    busy = costs.seconds - costs.stalled
    if not busy or not costs.reading:
        return 1.0 if costs.reading else 0.0
    peak = choice.repeats * costs.trained / busy
    size = max(costs.size / costs.samples, 1.0)
    slow = size * costs.samples / costs.reading
    system = TieredSystem(peak, size, slow, fast=float("inf"))
    repeats = [choice.repeats] * min(max(round(choice.count), 1), _MOST_SIMULATED)
    return simulated(system, repeats, choice.size, cold=True).stall


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0

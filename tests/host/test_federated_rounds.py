# SPDX-License-Identifier: Apache-2.0
"""Rounds with stand-in workers: a late, lost or wrong worker is named, and its update is not counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded, MillpondError, Refused
from millpond.host.jobs.federated.collection import BUFFERS, ReceiveBuffers, RoundCollection
from millpond.host.workers.supervisor import WorkerSupervisor
from millpond.train.protocol import Ready, Trained
from millpond.train.reduce.exact import ExactSum, Vector
from millpond.train.state.layout import Tensor

SIZE = 1000
TENSORS = (Tensor("w", (SIZE,), "float32"),)


class StandIn:
    """A worker that answers with one value everywhere."""

    def __init__(
        self,
        name: str,
        value: float = 1.0,
        *,
        samples: int = 10,
        claims: int | None = None,
        prepare: MillpondError | None = None,
        train: MillpondError | None = None,
        seconds: float = 0.0,
        upload: MillpondError | None = None,
        upload_seconds: float = 0.0,
    ) -> None:
        self.name, self.value, self.samples = name, value, samples
        self._claims = samples if claims is None else claims
        self._prepare, self._train, self._upload = prepare, train, upload
        self._seconds, self._upload_seconds = seconds, upload_seconds
        self.closed = threading.Event()

    def prepare(self, deadline: Deadline) -> Ready:
        if self._prepare:
            raise self._prepare
        return Ready(self.samples, TENSORS, SIZE)

    def train(self, round_number: int, state: Vector, deadline: Deadline) -> Trained:
        self._wait(self._seconds, deadline)
        if self._train:
            raise self._train
        return Trained(round_number, self._claims, 0.1, 0.1)

    def receive_state(self, into: Vector, deadline: Deadline) -> None:
        into[: SIZE // 2] = self.value
        self._wait(self._upload_seconds, deadline)
        if self._upload:
            raise self._upload
        into[:] = self.value

    def close(self) -> None:
        self.closed.set()

    def _wait(self, seconds: float, deadline: Deadline) -> None:
        if self.closed.wait(min(seconds, deadline.remaining() or seconds)):
            raise ConnectionLost(f"{self.name} closed the connection")
        deadline.remaining()


Start = Callable[..., WorkerSupervisor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Participants that are started, settled, and stopped in the end."""
    started: list[WorkerSupervisor] = []

    def make(*workers: StandIn | None, settle: bool = True) -> WorkerSupervisor:
        left = list(workers)
        name = next(worker.name for worker in workers if worker)
        supervisor = WorkerSupervisor(name, lambda: left.pop(0) if left else None)
        supervisor.start()
        started.append(supervisor)
        if settle:
            assert supervisor.wait_prepared(Deadline.after(10))
        return supervisor

    yield make
    for supervisor in started:
        supervisor.stop()


def gather(*supervisors: WorkerSupervisor, seconds: float = 10.0, number: int = 1) -> RoundCollection:
    state = np.zeros(SIZE, np.float32)
    buffers = ReceiveBuffers(SIZE)
    collection = RoundCollection(number, state, ExactSum(TENSORS, 10_000), buffers, Deadline.after(seconds))
    collection.run(supervisors)
    for _ in range(BUFFERS):  # all came back
        buffers.acquire(Deadline.after(0.5))
    return collection


def test_updates_are_weighted_by_samples(start: Start) -> None:
    collection = gather(start(StandIn("a", 1.0, samples=10)), start(StandIn("b", 4.0, samples=20)))
    assert not collection.missing
    assert set(collection.counted) == {"a", "b"}
    assert np.array_equal(collection.total.average(), np.full(SIZE, 3.0, np.float32))


def test_more_workers_than_buffers(start: Start) -> None:
    many = [start(StandIn(f"w{n}", float(n), upload_seconds=0.01)) for n in range(4 * BUFFERS)]
    collection = gather(*many)
    assert len(collection.counted) == len(many)
    assert collection.total.average()[0] == np.float32((len(many) - 1) / 2)


def test_an_upload_that_breaks_off_counts_for_nothing(start: Start) -> None:
    breaking = StandIn("bad", 100.0, upload=ConnectionLost("bad closed the connection"))
    supervisor = start(breaking, StandIn("bad", 7.0))
    collection = gather(start(StandIn("good", 2.0)), supervisor)
    assert set(collection.counted) == {"good"}
    assert collection.missing["bad"].reason == "bad closed the connection"
    assert not collection.missing["bad"].by_job
    assert np.array_equal(collection.total.average(), np.full(SIZE, 2.0, np.float32))
    assert breaking.closed.is_set()
    assert supervisor.wait_prepared(Deadline.after(10))
    assert gather(supervisor).counted  # it is back


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_value_that_is_none_is_refused_and_the_worker_kept(start: Start, value: float) -> None:
    worker = StandIn("bad", value)
    supervisor = start(worker)
    collection = gather(start(StandIn("good", 2.0)), supervisor)
    assert set(collection.counted) == {"good"}
    assert "bad: update refused" in collection.missing["bad"].reason
    assert supervisor.worker is worker
    assert np.array_equal(collection.total.average(), np.full(SIZE, 2.0, np.float32))


@pytest.mark.parametrize("claims", [0, -5, 11, 10**9])
def test_a_claim_of_other_samples_than_prepared_is_refused(start: Start, claims: int) -> None:
    collection = gather(start(StandIn("good")), start(StandIn("bad", claims=claims)))
    assert set(collection.missing) == {"bad"}
    assert collection.total.samples == 10


def test_who_is_late_is_missing_and_nobody_waits(start: Start) -> None:
    began = time.monotonic()
    late = StandIn("late", seconds=30)
    collection = gather(start(StandIn("good")), start(late), seconds=0.5)
    assert time.monotonic() - began < 15
    assert set(collection.counted) == {"good"}
    assert "deadline" in collection.missing["late"].reason
    assert late.closed.is_set()


def test_an_upload_may_not_take_for_ever(start: Start) -> None:
    collection = gather(start(StandIn("good")), start(StandIn("slow", upload_seconds=30)), seconds=0.5)
    assert set(collection.counted) == {"good"}
    assert set(collection.missing) == {"slow"}


@pytest.mark.parametrize(
    ("code", "by_job", "lost"), [("data", True, False), ("model", True, False), ("worker", False, True)]
)
def test_a_refusal_tells_whose_fault_it_is(start: Start, code: str, by_job: bool, lost: bool) -> None:
    worker = StandIn("bad", train=Refused("bad", code, "no"))
    collection = gather(start(worker))
    assert collection.missing["bad"].by_job is by_job
    assert collection.missing["bad"].reason == "bad: no"
    assert worker.closed.is_set() is lost


def test_a_device_that_is_not_there_is_not_asked(start: Start) -> None:
    absent = start(None, StandIn("absent"), settle=False)
    collection = gather(absent)
    assert collection.missing["absent"].reason == "not ready"


def test_a_participant_comes_back_after_failures(start: Start) -> None:
    workers = [StandIn("a", prepare=ConnectionLost("a closed the connection")) for _ in range(2)]
    good = StandIn("a")
    supervisor = start(*workers, None, good, settle=True)
    assert supervisor.worker is good
    assert all(worker.closed.is_set() for worker in workers)
    assert supervisor.failure == ""


@pytest.mark.parametrize("code", ["data", "model"])
def test_a_participant_that_the_job_itself_fails_stays_out(start: Start, code: str) -> None:
    good = StandIn("a")
    supervisor = start(StandIn("a", prepare=Refused("a", code, "no folder")), good)
    assert supervisor.failure == supervisor.reason == "a: no folder"
    assert supervisor.worker is None
    time.sleep(0.7)  # longer than it takes to try again
    assert supervisor.worker is None
    assert gather(supervisor).missing["a"].by_job


def test_losing_an_earlier_worker_does_not_harm_the_present_one(start: Start) -> None:
    first, second = StandIn("a"), StandIn("a")
    supervisor = start(first, second)
    supervisor.lose(first, "gone")
    assert supervisor.wait_prepared(Deadline.after(10))
    supervisor.lose(first, "gone again")
    assert supervisor.worker is second


def test_stopping_closes_the_worker_and_prepares_no_other(start: Start) -> None:
    first, second = StandIn("a"), StandIn("a")
    supervisor = start(first, second)
    supervisor.stop()
    assert first.closed.wait(5)
    assert supervisor.worker is None
    assert supervisor.wait_prepared(Deadline.after(5))


def test_stopping_ends_a_round_in_progress(start: Start) -> None:
    supervisor = start(StandIn("a", seconds=30))
    threading.Timer(0.2, supervisor.stop).start()
    began = time.monotonic()
    collection = gather(supervisor, seconds=20)
    assert time.monotonic() - began < 15
    assert set(collection.missing) == {"a"}


def test_nobody_waits_for_a_buffer_beyond_the_deadline() -> None:
    buffers = ReceiveBuffers(4)
    taken = [buffers.acquire(Deadline.after(1)) for _ in range(BUFFERS)]
    with pytest.raises(DeadlineExceeded, match="buffer"):
        buffers.acquire(Deadline.after(0.1))
    buffers.release(taken[0])
    assert buffers.acquire(Deadline.after(1)) is taken[0]


def settled(supervisor: WorkerSupervisor) -> WorkerSupervisor:
    supervisor.start()
    assert supervisor.wait_prepared(Deadline.after(10))
    return supervisor


def test_a_worker_that_cannot_be_made_ends_its_part() -> None:
    tries: list[None] = []

    def make() -> StandIn:
        tries.append(None)
        raise OSError(28, "No space left on device")

    supervisor = settled(WorkerSupervisor("csd0", make))
    assert supervisor.worker is None
    assert "No space left on device" in supervisor.failure
    assert len(tries) == 3
    supervisor.stop()


def test_a_worker_that_does_not_fit_is_never_used() -> None:
    worker = StandIn("csd0")
    supervisor = settled(WorkerSupervisor("csd0", lambda: worker, lambda ready: "csd0 builds another model"))
    assert supervisor.worker is None
    assert supervisor.ready is None
    assert "another model" in supervisor.failure
    assert worker.closed.is_set()
    supervisor.stop()


def test_stopping_closes_a_worker_that_is_being_prepared() -> None:
    preparing = threading.Event()

    class Slow(StandIn):
        def prepare(self, deadline: Deadline) -> Ready:
            preparing.set()
            self._wait(60, deadline)
            return super().prepare(deadline)

    worker = Slow("csd0")
    supervisor = WorkerSupervisor("csd0", lambda: worker)
    supervisor.start()
    assert preparing.wait(10)
    supervisor.stop()
    assert worker.closed.wait(10)
    assert supervisor.worker is None


@pytest.mark.expected_log("internal error")
def test_an_error_of_ours_names_the_worker_and_loses_it(start: Start) -> None:
    class Odd(StandIn):
        def train(self, round_number: int, state: Vector, deadline: Deadline) -> Trained:
            raise OverflowError("timestamp out of range")

    collection, supervisor = (
        RoundCollection(
            1, np.zeros(SIZE, np.float32), ExactSum(TENSORS, 100), ReceiveBuffers(SIZE), Deadline.after(5)
        ),
        start(Odd("csd0")),
    )
    collection.run([supervisor])
    assert "timestamp out of range" in collection.missing["csd0"].reason

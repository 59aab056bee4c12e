# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a worker: prepares it, and another after a loss, unless no other can help."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from millpond.aggregate.kernels import Vector
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, MillpondError, ProtocolError, Refused
from millpond.host.workers import supervisor as module
from millpond.host.workers.supervisor import WorkerSupervisor
from millpond.host.workers.worker import ModelState
from millpond.train.protocol import Ready, Update, Work

from ..waiting import eventually


class StandIn:
    """A worker that is only prepared, in ``seconds``."""

    def __init__(self, name: str, fault: Exception | None = None, seconds: float = 0.0) -> None:
        self.name, self.holds = name, False
        self.preparing, self.closed = threading.Event(), threading.Event()
        self._fault, self._seconds = fault, seconds

    def prepare(self, deadline: Deadline) -> Ready:
        self.preparing.set()
        if self.closed.wait(self._seconds):
            raise ConnectionLost(f"{self.name} closed the connection")
        if self._fault:
            raise self._fault
        return Ready((10,))

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        raise ProtocolError(f"{self.name} does not train")

    def fetch(self, stop: int, deadline: Deadline) -> None:
        raise ProtocolError(f"{self.name} does not train")

    def read(self, out: Vector, deadline: Deadline) -> None:
        raise ProtocolError(f"{self.name} does not train")

    def close(self) -> None:
        self.closed.set()


Start = Callable[..., WorkerSupervisor]


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)


@pytest.fixture
def start() -> Iterator[Start]:
    """Supervisors that are started with the workers that they will make, and stopped in the end."""
    started: list[WorkerSupervisor] = []

    def make(*workers: StandIn | None) -> WorkerSupervisor:
        left = list(workers)
        supervisor = WorkerSupervisor("csd0", lambda: left.pop(0) if left else None)
        supervisor.start()
        started.append(supervisor)
        return supervisor

    yield make
    for supervisor in started:
        supervisor.stop()


def prepared(supervisor: WorkerSupervisor, worker: StandIn | None = None) -> bool:
    """Wait until a worker (or this one) is prepared."""
    end = Deadline.after(10)
    while supervisor.worker is None or (worker is not None and supervisor.worker is not worker):
        if end.passed:
            return False
        time.sleep(0.002)
    return True


def test_a_worker_is_prepared_as_soon_as_its_device_is_there(start: Start) -> None:
    worker = StandIn("csd0")
    supervisor = start(None, None, worker)
    assert supervisor.wait_settled(Deadline.after(10))
    assert supervisor.worker is worker and supervisor.ready == Ready((10,))
    assert supervisor.failure == ""


def test_while_a_device_is_absent_nothing_is_settled(start: Start) -> None:
    supervisor = start(None)
    assert not supervisor.wait_settled(Deadline.after(0.1))
    assert (supervisor.worker, supervisor.reason, supervisor.failure) == (None, "not ready", "")


def test_a_worker_that_is_lost_while_it_prepares_is_prepared_again(start: Start) -> None:
    bad = [StandIn("csd0", ConnectionLost("csd0 closed the connection")) for _ in range(4)]
    good = StandIn("csd0")
    supervisor = start(*bad, None, good)
    assert supervisor.wait_settled(Deadline.after(10))  # nobody waits for it any more
    assert prepared(supervisor, good)
    assert all(worker.closed.is_set() for worker in bad)
    assert supervisor.failure == ""


def test_pauses_between_losses_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    tries: list[float] = []

    def make() -> StandIn:
        tries.append(time.monotonic())
        raise OSError(28, "No space left on device")

    supervisor = WorkerSupervisor("csd0", make)
    supervisor.start()
    end = Deadline.after(10)
    while len(tries) < 6 and not end.passed:
        time.sleep(0.01)
    supervisor.stop()
    assert "No space left on device" in supervisor.reason and supervisor.failure == ""
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert all(pause >= 0.02 * 2**number for number, pause in enumerate(pauses))


@pytest.mark.parametrize("code", ["data", "model", "policy", "processes"])
def test_a_worker_that_the_job_itself_fails_stays_out(start: Start, code: str) -> None:
    supervisor = start(StandIn("csd0", Refused("csd0", code, "no folder")), StandIn("csd0"))
    assert supervisor.wait_settled(Deadline.after(10))
    assert supervisor.failure == supervisor.reason == "no folder"
    time.sleep(0.1)  # longer than it takes to try again
    assert supervisor.worker is None


@pytest.mark.parametrize(("codes", "stays"), [(["memory"] * 2, False), (["memory", "io", "memory"], True)])
def test_a_worker_at_its_limit_of_memory_stays_out_the_second_time_in_a_row(
    start: Start, codes: list[str], stays: bool
) -> None:
    """Before: the first time was for good."""
    good = StandIn("csd0")
    supervisor = start(*(StandIn("csd0", Refused("csd0", code, "out of memory")) for code in codes), good)
    if stays:
        assert prepared(supervisor, good)
    else:
        eventually(lambda: supervisor.failure == "out of memory", "the end of its part")
        assert not good.preparing.wait(0.1)


def test_a_machine_without_memory_is_no_reason_to_stay_out(start: Start) -> None:
    bad = [StandIn("csd0", Refused("csd0", "machine-memory", "out of memory")) for _ in range(3)]
    good = StandIn("csd0")
    assert prepared(start(*bad, good), good)


def test_a_worker_that_is_not_admitted_is_never_used() -> None:
    worker = StandIn("csd0")
    supervisor = WorkerSupervisor("csd0", lambda: worker, lambda ready: f"{ready.samples} samples are few")
    supervisor.start()
    assert supervisor.wait_settled(Deadline.after(10))
    assert (supervisor.worker, supervisor.ready) == (None, None)
    assert "10 samples are few" in supervisor.failure
    assert worker.closed.wait(5)
    supervisor.stop()


def test_after_a_loss_another_is_prepared_and_the_earlier_does_no_harm(start: Start) -> None:
    first, second = StandIn("csd0"), StandIn("csd0")
    supervisor = start(first, second)
    assert prepared(supervisor, first)
    supervisor.lose(first, "gone")
    assert first.closed.is_set() and prepared(supervisor, second)
    supervisor.lose(first, "gone again")
    assert supervisor.worker is second and not second.closed.is_set()


def test_a_banned_worker_is_prepared_after_its_pause(start: Start) -> None:
    first, second = StandIn("csd0"), StandIn("csd0")
    supervisor = start(first, second)
    assert prepared(supervisor, first)
    began = time.monotonic()
    supervisor.lose(first, "gone for the 3rd time", pause=4.0)  # longer than this test may stand still
    assert (supervisor.worker, supervisor.reason) == (None, "gone for the 3rd time")
    assert prepared(supervisor, second) and time.monotonic() - began >= 4.0


def test_a_worker_that_is_banned_for_good_has_no_successor(start: Start) -> None:
    first, second = StandIn("csd0"), StandIn("csd0")
    supervisor = start(first, second)
    assert prepared(supervisor, first)
    supervisor.ban(first, "update refused")
    supervisor.ban(first, "another reason")
    assert first.closed.is_set() and supervisor.failure == "update refused"
    assert not second.preparing.wait(0.1) and supervisor.worker is None


def test_stopping_closes_the_worker_and_prepares_no_other(start: Start) -> None:
    first, second = StandIn("csd0"), StandIn("csd0")
    supervisor = start(first, second)
    assert prepared(supervisor, first)
    supervisor.stop()
    assert first.closed.wait(5) and supervisor.worker is None
    assert supervisor.wait_settled(Deadline.after(5))
    assert not second.preparing.wait(0.1)


def test_stopping_closes_a_worker_that_is_being_prepared(start: Start) -> None:
    worker = StandIn("csd0", seconds=60)
    supervisor = start(worker)
    assert worker.preparing.wait(10)
    supervisor.stop()
    assert worker.closed.wait(10) and supervisor.worker is None


@pytest.mark.expected_log("worker csd0: internal error")
def test_an_error_of_ours_is_logged_and_the_worker_prepared_again(start: Start) -> None:
    odd, good = StandIn("csd0", OverflowError("timestamp out of range")), StandIn("csd0")
    assert not issubclass(OverflowError, MillpondError | OSError)
    assert prepared(start(odd, good), good)
    assert odd.closed.is_set()

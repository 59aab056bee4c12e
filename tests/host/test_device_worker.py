# SPDX-License-Identifier: Apache-2.0
"""Updates of several parts: read in any order, or left unread before the next task."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, RemoteError
from millpond.host.fleet.device import Device
from millpond.host.workers.worker import DeviceWorker
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import (
    PART_VALUES,
    Fetch,
    Folder,
    MissingFiles,
    Part,
    PrepareWorker,
    Ready,
    Update,
    WarmUp,
    Work,
)
from millpond.train.state.layout import Tensor
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok

from ..job_files import no_contents
from .steps import zero_state

SIZE = 2 * PART_VALUES + 10
STARTS = (0, PART_VALUES, 2 * PART_VALUES)


def soon() -> Deadline:
    return Deadline.after(30)


class Sender:
    """A device whose update of exchange n has the values n, n + 1, ... It notes what is fetched, and sends
    no part from ``silent_from`` on.
    """

    name = "csd0"

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.silent_from = SIZE
        self._exchange = 0
        self._threads: list[threading.Thread] = []

    def control(self, deadline: Deadline) -> Channel:
        return self._served()

    def bulk(self, token: bytes, tls: bool, deadline: Deadline) -> Channel:
        return self._served()

    def _served(self) -> Channel:
        near, far = socket.socketpair()
        self._threads.append(threading.Thread(target=self._run, args=(far,)))
        self._threads[-1].start()
        return Channel(near, self.name)

    def _run(self, far: socket.socket) -> None:
        with Channel(far, "the host") as host:
            try:
                while True:
                    self._answer(host)
            except RemoteError:
                return

    def _answer(self, host: Channel) -> None:
        request = host.receive(soon()).message
        if isinstance(request, WarmUp):
            host.send(Ok(), soon())
        elif isinstance(request, PrepareWorker):
            host.send(MissingFiles(()), soon())
            host.send(Ready((10,), token=b"the token"), soon())
        elif isinstance(request, Work):
            host.receive_payload(4 * SIZE, soon())
            self._exchange = request.exchange
            head = (request.exchange, request.samples, request.samples, 1e5, 1.0, 0.1, 0.0, 0)
            host.send(Update(*head, {"loss": (1.0, 1.0)}), soon())
        elif isinstance(request, Fetch):
            self.fetched.append(request.stop)
            for start in range(0, min(request.stop, self.silent_from), PART_VALUES):
                stop = min(start + PART_VALUES, request.stop)
                host.send(Part(start), soon(), values(self._exchange)[start:stop].tobytes())

    def ended(self) -> bool:
        for thread in self._threads:
            thread.join(10)
        return not any(thread.is_alive() for thread in self._threads)


def values(exchange: int) -> np.ndarray:
    return np.arange(exchange, exchange + SIZE, dtype=np.float32)


def request_of(_deadline: Deadline) -> PrepareWorker:
    work = WorkSpec("parts", ModelSpec("net:build"))
    return PrepareWorker(work, "csd0", (Folder("private", "csd0"),), {}, (Tensor("w", (SIZE,), "float32"),))


Pair = tuple[DeviceWorker, Sender]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A worker that is prepared, and its device."""
    device = Sender()
    worker = DeviceWorker(cast(Device, device), request_of, no_contents)
    worker.prepare(soon())
    yield worker, device
    worker.close()
    assert device.ended()


def train(worker: DeviceWorker, exchange: int) -> None:
    update = worker.train(Work(exchange, 1, 1, (((0, 3),),)), zero_state(SIZE), soon())
    assert update.exchange == exchange


def read(worker: DeviceWorker, start: int, exchange: int, deadline: Deadline | None = None) -> bool:
    """Whether the next values are those from ``start`` on."""
    out = np.empty(min(PART_VALUES, SIZE - start), np.float32)
    worker.read(out, deadline or soon())
    return np.array_equal(out, values(exchange)[start : start + len(out)])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_values_come_in_order_as_often_as_they_are_asked_for(pair: Pair, number: int) -> None:
    worker, device = pair
    stop = min(number * PART_VALUES, SIZE)
    for exchange in (1, 2):
        train(worker, exchange)
        for end in (SIZE, stop):
            worker.fetch(end, soon())
            assert all(read(worker, start, exchange) for start in STARTS if start < end)
    assert device.fetched == [SIZE, stop, SIZE, stop]


def test_an_update_that_is_not_read_does_no_harm(pair: Pair) -> None:
    worker, device = pair
    train(worker, 1)
    train(worker, 2)
    worker.fetch(PART_VALUES, soon())
    assert read(worker, 0, 2)
    train(worker, 3)
    worker.fetch(PART_VALUES, soon())
    assert read(worker, 0, 3)
    assert device.fetched == [PART_VALUES, PART_VALUES]


def test_a_part_that_does_not_come_costs_no_more_than_its_time(pair: Pair) -> None:
    worker, device = pair
    device.silent_from = PART_VALUES
    train(worker, 1)
    worker.fetch(SIZE, soon())
    assert read(worker, 0, 1)
    with pytest.raises(DeadlineExceeded):
        read(worker, STARTS[1], 1, Deadline.after(0.1))

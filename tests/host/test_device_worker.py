# SPDX-License-Identifier: Apache-2.0
"""Updates of several parts: read in any order, or left unread before the next task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import pytest

from millpond.aggregate.encoding.codec import codec
from millpond.aggregate.encoding.layout import Encoding
from millpond.aggregate.rules.rule import LEAST_RANGE
from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, ProtocolError
from millpond.host.fleet.device import Device
from millpond.host.workers.worker import DeviceWorker
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import (
    MOST_PERCENT,
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
    WorkProgress,
)
from millpond.train.state.layout import Tensor
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok

from ..job_files import no_contents
from .steps import DialledDevice, zero_state

SIZE = 2 * PART_VALUES + 10
INT8, TOP = Encoding("int8"), Encoding("top-k", 0.1)
ENCODED = (Encoding("bfloat16"), INT8, TOP)
STARTS = (0, PART_VALUES, 2 * PART_VALUES)


def soon() -> Deadline:
    return Deadline.after(30)


class Sender(DialledDevice):
    """A device whose update of exchange n has the values n, n + 1, ... It notes what is fetched, and sends
    no part from ``silent_from`` on. Its updates are encoded as ``encoding``, and then ``changed``.
    """

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.encoding, self.head_encoding = encoding, encoding.name
        self.changed: Callable[[bytearray], bytes] = bytes
        self.fetched: list[int] = []
        self.told: tuple[int, ...] = ()
        self.silent_from = SIZE
        self._exchange = 0

    def answer(self, host: Channel) -> None:
        request = host.receive(soon()).message
        if isinstance(request, WarmUp):
            host.send(Ok(), soon())
        elif isinstance(request, PrepareWorker):
            host.send(MissingFiles(()), soon())
            host.send(Ready((10,), token=b"the token"), soon())
        elif isinstance(request, Work):
            host.receive_payload(4 * SIZE, soon())
            self._exchange = request.exchange
            for percent in self.told:
                host.send(WorkProgress(percent), soon())
            head = (request.exchange, request.samples, request.samples, 1e5, 1.0, 0.1, 0.0, 0)
            host.send(Update(*head, {"loss": (1.0, 1.0)}, self.head_encoding), soon())
        elif isinstance(request, Fetch):
            self.fetched.append(request.stop)
            for start in range(0, min(request.stop, self.silent_from), PART_VALUES):
                stop = min(start + PART_VALUES, request.stop)
                host.send(Part(start), soon(), self._part(values(self._exchange)[start:stop]))

    def _part(self, part: np.ndarray) -> bytes:
        if self.encoding.name == "float32":
            return part.tobytes()
        out, zeros = bytearray(self.encoding.size(len(part))), (bytearray(part.nbytes) for _ in range(2))
        feedback = zeros if self.encoding.feeds_back else ()
        codec(self.encoding).encode(self.encoding, bytearray(part.tobytes()), out, *feedback)
        return self.changed(out)


def values(exchange: int) -> np.ndarray:
    return np.arange(exchange, exchange + SIZE, dtype=np.float32)


def request_of(encoding: Encoding) -> PrepareWorker:
    work = WorkSpec("parts", ModelSpec("net:build"), encoding=encoding)
    return PrepareWorker(work, "csd0", (Folder("private", "csd0"),), {}, (Tensor("w", (SIZE,), "float32"),))


Pair = tuple[DeviceWorker, Sender]


@contextmanager
def pair_with(encoding: Encoding) -> Iterator[Pair]:
    """A worker that is prepared, and its device."""
    device = Sender(encoding)
    worker = DeviceWorker(cast(Device, device), lambda _deadline: request_of(encoding), no_contents)
    worker.prepare(soon())
    try:
        yield worker, device
    finally:
        worker.close()
    assert device.ended()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_with(Encoding()) as found:
        yield found


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


@pytest.mark.parametrize("encoding", ENCODED, ids=lambda encoding: encoding.name)
def test_encoded_values_come_in_order_as_often_as_they_are_asked_for(encoding: Encoding) -> None:
    with pair_with(encoding) as (worker, _):
        train(worker, 1)
        found = []
        for stop, step in ((SIZE, PART_VALUES), (PART_VALUES, PART_VALUES), (SIZE, LEAST_RANGE)):
            worker.fetch(stop, soon())
            out = np.empty(stop, np.float32)
            for start in range(0, stop, step):
                worker.read(out[start : min(start + step, stop)], soon())
            found.append(out)
        assert found[0].tobytes() == found[2].tobytes()
        assert found[1].tobytes() == found[0][:PART_VALUES].tobytes()
        lost = np.abs(found[0] - values(1)) / values(1).max()
        assert (lost.max() if encoding.name != "top-k" else lost.min()) <= 2.0**-8


@pytest.mark.parametrize(
    ("encoding", "changed", "text"),
    [
        (INT8, lambda data: bytes(data[:-1]), "131583 bytes behind 'part', not 131584"),
        (INT8, lambda data: bytes(4 * PART_VALUES), "524288 bytes behind 'part', not 131584"),
        (INT8, lambda data: np.float32(np.nan).tobytes() + data[4:], "are not encoded as int8"),
        (TOP, lambda data: bytes(len(data)), "are not encoded as top-k"),
    ],
)
def test_values_that_are_none_of_the_encoding_are_refused(
    encoding: Encoding, changed: Callable[[bytearray], bytes], text: str
) -> None:
    with pair_with(encoding) as (worker, device):
        device.changed = changed
        train(worker, 1)
        worker.fetch(SIZE, soon())
        with pytest.raises(ProtocolError, match=text):
            read(worker, 0, 1)


@pytest.mark.parametrize(("said", "told"), [("bfloat16", "bfloat16"), ("\x1b[2J", " [2J")])
def test_an_update_in_another_encoding_is_refused(said: str, told: str) -> None:
    with pair_with(INT8) as (worker, device):
        device.head_encoding = said
        with pytest.raises(ProtocolError) as caught:
            train(worker, 1)
    assert str(caught.value) == f"csd0 encoded an update as {told}"


def test_a_device_tells_how_far_it_is_before_it_answers(pair: Pair) -> None:
    """What it claims beyond its bounds counts as within them."""
    worker, device = pair
    for told, percent in (((10, 30), 30), ((-5,), 0), ((1000,), MOST_PERCENT), ((), 0)):
        device.told = told
        request = Work(1, 1, 1, (((0, 10),),))
        assert worker.train(request, zero_state(SIZE), soon()).samples == 10
        assert worker.percent == percent

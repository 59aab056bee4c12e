# SPDX-License-Identifier: Apache-2.0
"""Messages over real sockets, also over a link that delays, cuts and breaks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LimitExceeded,
    ProtocolError,
    Refused,
    RemoteError,
)
from millpond.wire.channel import Buffer, Channel
from millpond.wire.control_messages import GetLog, Log
from millpond.wire.framing import Head, Limits, encode
from millpond.wire.messages import Failure, Kind, Message, Ok, message

SOON = 20.0  # far more than any of this takes


@message("test.parameters", Kind.METRICS, payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Parameters(Message):
    """Carries parameters."""


class Pair:
    """Two ends of one connection; threads that talk at the far end are joined on exit."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = Channel(near, "csd0"), Channel(far, "host")
        self._threads: list[threading.Thread] = []

    def run(self, work: Callable[[], object]) -> None:
        def quietly() -> None:
            with contextlib.suppress(RemoteError, OSError):  # the near end tells what went wrong
                work()

        self._threads.append(threading.Thread(target=quietly))
        self._threads[-1].start()

    def close(self) -> None:
        self.near.close()
        self.far.close()
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(*socket.socketpair())
    yield made
    made.close()


@dataclass
class FakeLink:
    """Relays between two socket pairs: late, in pieces, and for no more than ``budget`` bytes each way."""

    piece: int = 1 << 16
    delay: float = 0.0
    budget: int | None = None
    near: socket.socket = field(init=False)
    far: socket.socket = field(init=False)

    def __enter__(self) -> FakeLink:
        self.near, left = socket.socketpair()
        right, self.far = socket.socketpair()
        self._inner = (left, right)
        self._threads = [
            threading.Thread(target=self._relay, args=ends) for ends in ((left, right), (right, left))
        ]
        for thread in self._threads:
            thread.start()
        return self

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        left = self.budget
        with contextlib.suppress(OSError):
            while data := source.recv(self.piece if left is None else min(self.piece, left)):
                time.sleep(self.delay)
                target.sendall(data)
                left = None if left is None else left - len(data)
                if left == 0:
                    break
        for sock in self._inner:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_exc: object) -> None:
        for sock in (self.near, self.far, *self._inner):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive()


def soon() -> Deadline:
    return Deadline.after(SOON)


def test_call_and_reply(pair: Pair) -> None:
    def answer() -> None:
        head = pair.far.receive(soon())
        assert head == Head(GetLog(2), 0)
        pair.far.send(Log(("a", "b")), soon())

    pair.run(answer)
    assert pair.near.call(GetLog(2), Log, soon()) == Log(("a", "b"))
    assert pair.near.closed_cleanly


@pytest.mark.parametrize("size", [0, 1, 100, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_payload_arrives_in_its_buffer(pair: Pair, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    pair.run(lambda: pair.near.send(Ok(), soon(), memoryview(data)[:size]))
    assert pair.far.receive(soon()) == Head(Ok(), size)
    into = bytearray(size)
    pair.far.receive_into(into, soon())
    assert into == data[:size]
    assert pair.far.closed_cleanly


def test_a_message_without_payload_may_come_with_the_next_one(pair: Pair) -> None:
    """An eager channel has read the next message, too; nothing of it belongs to the empty payload."""
    pair.near.eager = True
    pair.far.send(Ok(), soon())
    pair.far.send(Parameters(), soon(), b"values")
    values = bytearray(6)
    assert pair.near.receive(soon()).payload_size == 0
    pair.near.receive_into(b"", soon())
    assert pair.near.receive(soon()).message == Parameters()
    pair.near.receive_into(values, soon())
    assert values == b"values"


@pytest.mark.parametrize("piece", [1, 3, 17, 4096])
def test_through_a_link_that_cuts_into_pieces(piece: int) -> None:
    payload = bytes(range(256)) * (2 if piece < 100 else 4000)
    with FakeLink(piece=piece) as link:
        pair = Pair(link.near, link.far)
        pair.run(lambda: pair.far.send(Log(("x" * 50,)), soon(), payload))
        assert pair.near.expect(Log, soon(), payload=None).lines == ("x" * 50,)
        assert pair.near.receive_payload(len(payload), soon()) == payload
        pair.close()


def test_a_deadline_counts_for_the_whole_message_not_for_each_piece() -> None:
    # Each byte comes well within the deadline, the message as a whole cannot.
    with FakeLink(piece=1, delay=0.05) as link:
        pair = Pair(link.near, link.far)
        pair.run(lambda: pair.far.send(Log(("x" * 400,)), soon()))
        started = time.monotonic()
        with pytest.raises(
            DeadlineExceeded, match=r"^(csd0 did not answer in time|the deadline has passed)$"
        ):
            pair.near.receive(Deadline.after(0.3))
        assert time.monotonic() - started < 10
        pair.close()


@pytest.mark.parametrize("budget", [1, 15, 16, 17, 25, 40, 100])
def test_a_link_that_breaks_anywhere(budget: int) -> None:
    whole = encode(Log(("x",)), 200) + bytes(200)
    assert budget < len(whole)
    with FakeLink(budget=budget) as link:
        pair = Pair(link.near, link.far)
        pair.run(lambda: pair.far.send(Log(("x",)), soon(), bytes(200)))
        with pytest.raises(ConnectionLost, match=r"^csd0 closed the connection$"):
            pair.near.expect(Log, soon(), payload=200)
            pair.near.receive_into(bytearray(200), soon())
        assert not pair.near.closed_cleanly
        pair.close()


def test_an_end_between_messages_is_clean(pair: Pair) -> None:
    pair.far.send(Ok(), soon())
    pair.far.close()
    pair.near.receive(soon())
    with pytest.raises(ConnectionLost):
        pair.near.receive(soon())
    assert pair.near.closed_cleanly


def test_no_answer_in_time(pair: Pair) -> None:
    with pytest.raises(DeadlineExceeded, match=r"^csd0 did not answer in time$"):
        pair.near.call(GetLog(1), Log, Deadline.after(0.05))


def test_nobody_reads(pair: Pair) -> None:
    with pytest.raises(DeadlineExceeded, match=r"^csd0 took no data in time$"):
        pair.near.send(Ok(), Deadline.after(0.2), bytes(64 << 20))


def test_a_passed_deadline_sends_nothing(pair: Pair) -> None:
    with pytest.raises(DeadlineExceeded, match="the deadline has passed"):
        pair.near.send(Ok(), Deadline.after(-1))
    pair.far.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair.far.sock.recv(1)


def test_a_failure_is_a_refusal(pair: Pair) -> None:
    pair.far.send(Failure("full", "the flash is full"), soon())
    with pytest.raises(Refused) as caught:
        pair.near.expect(Log, soon())
    assert (str(caught.value), caught.value.code) == ("csd0: the flash is full", "full")
    assert caught.value.text == "the flash is full"
    pair.far.send(Ok(), soon())
    assert pair.near.expect(Ok, soon()) == Ok()


def test_bytes_behind_a_failure_are_an_error_of_the_peer(pair: Pair) -> None:
    pair.far.send(Failure("full", "x"), soon(), b"abc")
    with pytest.raises(ProtocolError, match=r"^csd0 sent 3 bytes behind 'failure'$"):
        pair.near.expect(Log, soon(), payload=None)


def test_another_message_than_expected(pair: Pair) -> None:
    pair.far.send(Ok(), soon())
    with pytest.raises(ProtocolError, match=r"^csd0 sent 'ok' where 'log' belongs$"):
        pair.near.expect(Log, soon())


@pytest.mark.parametrize(("sent", "expected"), [(3, 0), (0, 3), (3, 4)])
def test_another_size_than_expected(pair: Pair, sent: int, expected: int) -> None:
    pair.far.send(Ok(), soon(), bytes(sent))
    with pytest.raises(ProtocolError, match=rf"^csd0 sent {sent} bytes behind 'ok', not {expected}$"):
        pair.near.expect(Ok, soon(), payload=expected)


def test_a_buffer_of_another_size(pair: Pair) -> None:
    pair.far.send(Ok(), soon(), b"abc")
    pair.near.receive(soon())
    with pytest.raises(ProtocolError, match=r"^csd0 sent 3 bytes where 2 belong$"):
        pair.near.receive_into(bytearray(2), soon())


def test_a_payload_over_the_limit_of_its_caller(pair: Pair) -> None:
    pair.far.send(Ok(), soon(), b"abc")
    pair.near.receive(soon())
    with pytest.raises(LimitExceeded, match=r"^csd0 sent 3 bytes; at most 2 are accepted here$"):
        pair.near.receive_payload(2, soon())
    assert pair.near.receive_payload(3, soon()) == b"abc"


def test_a_payload_that_was_left_is_a_mistake_of_this_side(pair: Pair) -> None:
    pair.far.send(Ok(), soon(), b"abc")
    pair.near.receive(soon())
    with pytest.raises(RuntimeError, match="was not received"):
        pair.near.receive(soon())


def test_limits_of_a_channel() -> None:
    near, far = socket.socketpair()
    with Channel(near, "csd0", limits=Limits(payload=2)) as narrow, Channel(far, "host") as wide:
        wide.send(Ok(), soon(), b"abc")
        with pytest.raises(LimitExceeded, match="at most 2 are accepted"):
            narrow.receive(soon())


def test_close_wakes_a_waiting_thread(pair: Pair) -> None:
    caught: list[Exception] = []

    def wait() -> None:
        try:
            pair.near.receive(NEVER)
        except RemoteError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pair.near.shut_down()
    thread.join(SOON)
    assert not thread.is_alive()
    assert isinstance(caught[0], ConnectionLost)


class Count:
    """An outlet that counts by kind, and stops at ``limit`` bytes."""

    def __init__(self, limit: int = 1 << 30, *, searches: bool = False) -> None:
        self.seen: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self._limit = limit
        self.searches = searches

    def passing(self, kind: Kind, data: Buffer, payload: bool) -> None:
        if sum(self.seen.values()) + len(data) > self._limit:
            raise RemoteError("stopped at the gate")
        self.seen[kind] += len(data)


def test_the_outlet_sees_every_byte_by_its_kind() -> None:
    near, far = socket.socketpair()
    outlet = Count()
    with Channel(near, "csd0", outlet=outlet) as out, Channel(far, "host") as into:
        out.send(Parameters(), soon(), bytes(1000))
        out.send(Ok(), soon())
        assert into.expect(Parameters, soon(), payload=1000) == Parameters()
        into.receive_payload(1000, soon())
        into.expect(Ok, soon())
    assert outlet.seen == {
        Kind.PARAMETERS: 1000,
        Kind.METRICS: len(encode(Parameters(), 1000)),
        Kind.CONTROL: len(encode(Ok())),
        Kind.VOLUME: 0,
        Kind.LAUNCHED: 0,
    }


def test_what_the_outlet_stops_does_not_leave() -> None:
    near, far = socket.socketpair()
    with Channel(near, "csd0", outlet=Count(limit=0)) as out, far:
        with pytest.raises(RemoteError, match="stopped at the gate"):
            out.send(Ok(), soon())
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)


def test_deadlines() -> None:
    assert NEVER.remaining() is None
    assert not NEVER.passed
    assert Deadline.after(None) == NEVER
    passed = Deadline.after(-1)
    assert passed.passed
    with pytest.raises(DeadlineExceeded):
        passed.remaining()
    late = Deadline.after(1000)
    assert late.earlier(5000) == late
    assert 0 < (late.earlier(10).remaining() or 0) <= 10
    assert 0 < (NEVER.earlier(10).remaining() or 0) <= 10

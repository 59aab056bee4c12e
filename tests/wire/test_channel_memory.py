# SPDX-License-Identifier: Apache-2.0
"""Long payloads: sent from shared memory without a copy, and received in few pieces."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded, RemoteError
from millpond.linux import memory
from millpond.linux.memory import SharedSlice
from millpond.wire.channel import Channel, FileSlice
from millpond.wire.framing import encode
from millpond.wire.messages import Kind, Ok

from .test_channel import Count, Pair, Parameters, soon

SIZE = 3_000_001
START = 12_345


def over_tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


@pytest.fixture(params=[over_tcp, socket.socketpair])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(*request.param())
    yield made
    made.close()


@pytest.fixture
def stretch() -> SharedSlice:
    """The middle of memory with unlike bytes."""
    descriptor = memory.make("of the tests")
    try:
        shared = memory.map_first(descriptor, START + SIZE + 99)
    finally:
        os.close(descriptor)
    shared.data[:] = os.urandom(len(shared.data))
    return shared.part(START, SIZE)


def taken(pair: Pair) -> bytes:
    pair.far.expect(Parameters, soon(), payload=SIZE)
    return bytes(pair.far.receive_payload(SIZE, soon()))


def test_shared_memory_arrives_and_the_talk_goes_on(pair: Pair, stretch: SharedSlice) -> None:
    for _ in range(2):
        pair.run(lambda: (pair.near.send(Parameters(), soon(), stretch), pair.near.send(Ok(), soon())))
        assert taken(pair) == stretch.data
        assert pair.far.expect(Ok, soon()) == Ok()
    assert pair.far.closed_cleanly


@pytest.mark.parametrize("searches", [False, True])
def test_the_outlet_sees_shared_memory_as_well(stretch: SharedSlice, searches: bool) -> None:
    seen: list[object] = []

    class Recording(Count):
        def passing(self, kind: Kind, data: bytes | bytearray | memoryview, payload: bool) -> None:
            super().passing(kind, data, payload)
            if payload:
                seen.append(data)

    near, far = over_tcp()
    outlet = Recording(searches=searches)
    made = Pair(near, far)
    made.near = Channel(near, "csd0", outlet=outlet)
    try:
        made.run(lambda: made.near.send(Parameters(), soon(), stretch))
        assert taken(made) == stretch.data
    finally:
        made.close()
    assert outlet.seen[Kind.PARAMETERS] == SIZE
    assert all(isinstance(part, bytes) for part in seen) is searches
    assert b"".join(bytes(part) for part in seen) == stretch.data  # type: ignore[call-overload]


@pytest.mark.parametrize("searches", [False, True])
def test_a_file_is_sent_and_received_in_parts(tmp_path: Path, searches: bool) -> None:
    """No more of it than a part is in memory at one time, also where it cannot be sent from its pages."""
    data, sizes = os.urandom(SIZE), list[int]()

    class Recording(Count):
        def passing(self, kind: Kind, data: bytes | bytearray | memoryview, payload: bool) -> None:
            super().passing(kind, data, payload)
            sizes.append(len(data))

    (tmp_path / "file").write_bytes(data)
    made = Pair(*over_tcp())
    made.near = Channel(made.near.sock, "csd0", outlet=Recording(searches=searches))
    try:
        with (tmp_path / "file").open("rb") as file:
            piece = FileSlice(file.fileno(), START, SIZE - START)
            made.run(lambda: (made.near.send(Parameters(), soon(), piece), made.near.send(Ok(), soon())))
            made.far.expect(Parameters, soon(), payload=None)
            assert made.far.payload_left == SIZE - START
            received = [bytes(part) for part in made.far.receive_parts(soon())]
            assert b"".join(received) == data[START:]
            assert max(map(len, received)) <= 1 << 18 and max(sizes) <= 1 << 18
            assert made.far.expect(Ok, soon()) == Ok()
    finally:
        made.close()


def test_an_outlet_stops_shared_memory_before_it_is_sent(stretch: SharedSlice) -> None:
    near, far = over_tcp()
    with far, Channel(near, "csd0", outlet=Count(len(encode(Parameters(), SIZE)))) as channel:
        with pytest.raises(Exception, match="stopped at the gate"):
            channel.send(Parameters(), soon(), stretch)
        near.shutdown(socket.SHUT_WR)
        assert len(b"".join(iter(lambda: far.recv(1 << 16), b""))) == len(encode(Parameters(), SIZE))


def test_a_peer_that_takes_nothing_is_told_and_one_that_left_too(pair: Pair, stretch: SharedSlice) -> None:
    with pytest.raises(DeadlineExceeded, match="csd0 took no data in time"):
        while True:
            pair.near.send(Parameters(), Deadline.after(0.3), stretch)
    pair.far.close()
    with pytest.raises(ConnectionLost, match="csd0"):
        pair.near.send(Parameters(), soon(), stretch)


def dribbled(pair: Pair, data: bytes, pieces: int) -> Callable[[], None]:
    """Send a payload in pieces with pauses, the last of a few bytes."""

    def send() -> None:
        pair.near.sock.sendall(encode(Parameters(), len(data)))
        step = (len(data) - 10) // pieces
        for start in range(0, len(data) - 10, step):
            pair.near.sock.sendall(data[start : min(start + step, len(data) - 10)])
            time.sleep(0.003)
        pair.near.sock.sendall(data[-10:])

    return send


@pytest.mark.parametrize("pieces", [1, 7, 100])
def test_what_comes_slowly_is_not_waited_for_in_vain(pair: Pair, pieces: int) -> None:
    data = os.urandom(SIZE)
    pair.run(dribbled(pair, data, pieces))
    assert taken(pair) == data


def test_a_payload_that_stops_is_late_or_lost(pair: Pair) -> None:
    stopped = threading.Event()

    def send() -> None:
        pair.near.sock.sendall(encode(Parameters(), SIZE) + bytes(1_000_000))
        stopped.wait(20)
        pair.near.close()

    pair.run(send)
    pair.far.expect(Parameters, soon(), payload=SIZE)
    with pytest.raises(DeadlineExceeded, match="host did not answer in time"):
        pair.far.receive_into(bytearray(SIZE), Deadline.after(0.3))
    stopped.set()
    with pytest.raises(ConnectionLost, match="host closed the connection"):
        pair.far.receive_into(bytearray(SIZE), soon())


@pytest.mark.parametrize("sends", [False, True])
def test_whoever_waits_is_woken_when_the_channel_is_closed(
    pair: Pair, stretch: SharedSlice, sends: bool
) -> None:
    found: list[Exception] = []

    def wait() -> None:
        try:
            while True:
                pair.near.send(Parameters(), soon(), stretch) if sends else pair.near.receive_into(
                    bytearray(SIZE), soon()
                )
        except RemoteError as error:
            found.append(error)

    if not sends:
        pair.far.sock.sendall(encode(Parameters(), SIZE))
        pair.near.expect(Parameters, soon(), payload=SIZE)
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    began = time.monotonic()
    pair.near.close()
    waiting.join(30)
    assert time.monotonic() - began < 15
    assert [type(error) for error in found] == [ConnectionLost]
    assert str(found[0]).startswith("csd0")


def test_a_stretch_is_inside(stretch: SharedSlice) -> None:
    shared = stretch.shared
    assert shared.part(0, len(shared.data)).data == shared.data
    for start, size in ((-1, 5), (0, len(shared.data) + 1), (len(shared.data), 1), (5, -1)):
        with pytest.raises(IndexError):
            shared.part(start, size)


def test_memory_closes_its_descriptor_with_itself() -> None:
    descriptor = memory.make("of the tests")
    shared = memory.map_first(descriptor, 4096)
    os.close(descriptor)
    own = shared.descriptor
    assert os.fstat(own).st_size == 4096
    del shared
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)

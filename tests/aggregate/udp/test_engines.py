# SPDX-License-Identifier: Apache-2.0
"""Both engines over loopback, each with each: the same bits, losses repaired, hostile datagrams counted."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from millpond.aggregate.udp import native
from millpond.aggregate.udp.datagrams import (
    FROM_AGGREGATOR,
    HEADER,
    Datagram,
    DatagramKind,
    VectorPlan,
    seal,
    values_at,
)
from millpond.aggregate.udp.exchange import (
    EngineName,
    LostClients,
    ReceivedMean,
    aggregate,
    exchange,
)
from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, MillpondError, RemoteError

from .fake_link import Vector, client_key, exact_mean, heads_of, open_socket

HAS_C = pytest.mark.skipif(not native.is_usable(), reason="no C compiler built it")
PYTHON, C = "python", pytest.param("c", marks=HAS_C)
ENGINES = [PYTHON, C]
PAIRS = [
    pytest.param(*pair, marks=[HAS_C] if "c" in pair else [])
    for pair in itertools.product(("python", "c"), repeat=2)
]
_SO_NO_CHECK, _SO_ATTACH_FILTER = 11, 26
_DROPS = [(0x20, 0, 0, 0xFFFFF038), (0x35, 0, 1, 0), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
"""A socket filter: a random number; drop if it is at least a limit; else take the whole packet."""


def some_vectors(count: int, size: int) -> list[Vector]:
    rng = np.random.default_rng(size)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(count)]


def lose(connection: socket.socket, share: float) -> None:
    """Let the kernel drop a share of what comes to a socket."""
    program = [(*each[:3], int((1 - share) * 0xFFFFFFFF) if each[0] == 0x35 else each[3]) for each in _DROPS]
    code = np.frombuffer(b"".join(struct.pack("=HBBI", *each) for each in program), np.uint8)
    filtered = struct.pack("HL", len(program), code.ctypes.data)
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtered)


@dataclass
class World:
    """A round on loopback: its clients are threads."""

    plan: VectorPlan
    vectors: list[Vector]
    engine: EngineName
    client_engine: EngineName
    loss: float = 0.0
    checksums: bool = True
    disturb: Callable[[socket.socket, tuple[str, int]], None] | None = None
    received: dict[int, ReceivedMean] = field(default_factory=dict)
    repaired: list[int] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def run(self) -> dict[str, int]:
        heads = heads_of(self.vectors)
        with contextlib.ExitStack() as stack:
            hub = stack.enter_context(open_socket(("127.0.0.1", 0), 1 << 20))
            self._prepare(hub)
            threads = [
                threading.Thread(target=self._exchange, args=(client, hub.getsockname()[:2]))
                for client in range(len(self.vectors))
            ]
            if self.disturb:
                self.disturb(stack.enter_context(open_socket(("127.0.0.1", 0))), hub.getsockname()[:2])
            for each in threads:
                each.start()
            try:
                return aggregate(
                    hub,
                    self.plan,
                    heads,
                    stall=20.0,
                    engine=self.engine,
                    repaired=self.repaired.append,
                )
            finally:
                for each in threads:
                    each.join()

    def _prepare(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, not self.checksums)
        if self.loss:
            lose(connection, self.loss)

    def _exchange(self, client: int, hub: tuple[str, int]) -> None:
        try:
            with open_socket(("127.0.0.1", 0), 1 << 20) as connection:
                self._prepare(connection)
                self.received[client] = exchange(
                    connection,
                    hub,
                    self.plan,
                    client,
                    client_key(client),
                    self.vectors[client],
                    Deadline.after(30),
                    weight=1.0 + client,
                    engine=self.client_engine,
                    repaired=self.repaired.append,
                )
        except (MillpondError, OSError, ValueError) as error:
            self.errors.append(error)

    def expect_exact(self) -> None:
        """See that everybody has the bits of an exact sum."""
        expected = exact_mean(self.vectors, heads_of(self.vectors)).tobytes()
        assert not self.errors
        assert {each.mean.tobytes() for each in self.received.values()} == {expected}
        assert len(self.received) == len(self.vectors)


@pytest.mark.parametrize(("engine", "client_engine"), PAIRS)
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_each_engine_understands_each(engine: EngineName, client_engine: EngineName, loss: float) -> None:
    size = 500_001  # some 200 trains of datagrams, each of them lost as one: no run goes without a loss
    world = World(VectorPlan(9, size), some_vectors(3, size), engine, client_engine, loss)
    world.run()
    world.expect_exact()
    assert len(world.repaired) == 4 and (sum(world.repaired) > 0 or not loss)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bits", [32, 64])
def test_words_are_added_as_such_also_where_datagrams_are_lost(engine: EngineName, bits: int) -> None:
    """The sum is modulo a power of two, which carries from a half of a word to the other."""
    rng, kind = np.random.default_rng(bits), np.uint32 if bits == 32 else np.uint64
    words = rng.integers(0, 1 << bits, (3, 40_001), kind)
    vectors = [each.view(np.float32) for each in words]
    world = World(VectorPlan(9, len(vectors[0]), 358, words=bits), vectors, engine, engine, 0.05)
    world.run()
    assert not world.errors and len(world.received) == 3
    assert {each.mean.tobytes() for each in world.received.values()} == {words.sum(0, kind).tobytes()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("values", [1, 3, 32, 64, values_at(1500), values_at(9000), values_at(1 << 16)])
def test_datagrams_of_any_size(engine: EngineName, values: int) -> None:
    """Payloads of one to many blocks of BLAKE2b, whole and not; the last datagram is a short one."""
    world = World(VectorPlan(9, 5 * values + 1, values), some_vectors(2, 5 * values + 1), engine, "python")
    world.run()
    world.expect_exact()
    world.engine, world.client_engine = "python", engine
    world.run()
    world.expect_exact()


@HAS_C
def test_a_socket_serves_rounds_of_either_engine() -> None:
    vector = some_vectors(1, 90_000)[0]
    heads = heads_of([vector])
    with open_socket(("127.0.0.1", 0)) as hub, open_socket(("127.0.0.1", 0)) as connection:
        engines: list[EngineName] = ["c", "python", "c"]
        for number, engine in enumerate(engines):
            plan, arguments = VectorPlan(number, len(vector)), (heads, Deadline.after(30))
            with ThreadPoolExecutor(1) as pool:
                pool.submit(aggregate, hub, plan, *arguments, engine=engine)
                found = exchange(connection, hub.getsockname(), plan, 0, heads[0].key, vector, engine=engine)
            assert found.mean.tobytes() == vector.tobytes()
            assert found.counted["malformed"] == 0


@HAS_C
def test_without_segmentation_each_datagram_goes_out_by_itself() -> None:
    """The kernel does not segment for a socket that sends without checksums."""
    world = World(VectorPlan(9, 50_001), some_vectors(2, 50_001), "c", "c", checksums=False)
    world.run()
    world.expect_exact()


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_that_stay_leave_the_clients_own_values(engine: EngineName) -> None:
    size = 900_000 if engine == "c" else 90_000  # of Python's, each datagram is lost by itself
    plan = VectorPlan(9, size, repair=False)
    vectors = [each + 100.0 * (1 + client) for client, each in enumerate(some_vectors(2, size))]
    world = World(plan, vectors, engine, engine, loss=0.2)
    world.run()
    assert not world.errors
    heads = heads_of(vectors)
    alone = [vector / np.float32(head.weight) for vector, head in zip(vectors, heads, strict=True)]
    whole = exact_mean(vectors, heads)
    for client, received in world.received.items():
        has_whole, has_own = received.mean == whole, received.mean == alone[client]
        assert has_whole.mean() > 0.3 and has_own.any()
        assert (has_whole | has_own | (received.mean == alone[1 - client])).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_absent_client_ends_the_round(engine: EngineName) -> None:
    plan, vectors = VectorPlan(9, 9000), some_vectors(2, 9000)
    with open_socket(("127.0.0.1", 0)) as hub, open_socket(("127.0.0.1", 0)) as own:
        with ThreadPoolExecutor(1) as pool:
            arguments = (hub.getsockname(), plan, 0, client_key(0), vectors[0], Deadline.after(2))
            client = pool.submit(exchange, own, *arguments, engine=engine)
            with pytest.raises(LostClients) as lost:
                aggregate(hub, plan, heads_of(vectors), stall=0.5, engine=engine)
        assert list(lost.value.lost) == [1]
        assert isinstance(client.exception(), DeadlineExceeded)


def hostile_datagrams(plan: VectorPlan, key: bytes) -> Iterator[tuple[str, bytes]]:
    """Return what must not count, with the counter that names why."""
    poison = b"\xff" * (4 * plan.values)
    data = Datagram(DatagramKind.DATA, 0, plan.round, 0, 0, poison)

    def changed(known: bytes = key, **fields: object) -> bytes:
        named = {name: getattr(data, name) for name in Datagram.__slots__} | fields
        return seal(known, Datagram(**named))  # type: ignore[arg-type]

    yield "malformed", b"\x17"
    yield "malformed", changed()[: HEADER.size + 15]
    yield "malformed", bytes([0x27]) + changed()[1:]
    yield "malformed", changed(kind=DatagramKind.DATA | FROM_AGGREGATOR)
    yield "client", changed(client=2)
    yield "client", changed(client=65535)
    yield "round", changed(round=plan.round - 1)
    yield "malformed", changed()[:1] + b"\1" + changed()[2:]
    yield "length", changed(index=plan.blocks)
    yield "length", changed(index=0xFFFFFFFF)
    yield "length", changed(index=plan.blocks - 1)
    yield "length", changed(payload=poison[:-4])
    yield "length", changed(payload=poison + b"1234")
    yield "length", changed(payload=b"")
    yield "length", changed(payload=b"\0" * 60_000)
    yield "tag", changed(client_key(1))
    yield "tag", changed(bytes(32))
    yield "tag", changed()[:-1] + b"\0"
    yield "tag", b"".join((changed()[:-16], bytes(16)))
    yield "tag", changed(key[::-1], kind=DatagramKind.END, payload=b"")


@pytest.mark.parametrize("engine", ENGINES)
def test_hostile_datagrams_are_counted_and_dropped(engine: EngineName) -> None:
    plan = VectorPlan(9, 9001)
    hostile = list(hostile_datagrams(plan, client_key(0)))

    def disturb(connection: socket.socket, hub: tuple[str, int]) -> None:
        for _, datagram in hostile:
            connection.sendto(datagram, hub)

    world = World(plan, some_vectors(2, 9001), engine, engine, disturb=disturb)
    done = world.run()
    world.expect_exact()
    expected = dict.fromkeys(("malformed", "client", "round", "length", "tag"), 0)
    for name, _ in hostile:
        expected[name] += 1
    assert {name: done[name] for name in expected} == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_random_bytes_change_nothing(engine: EngineName) -> None:
    plan, rng = VectorPlan(9, 9001), random.Random(1)

    def disturb(connection: socket.socket, hub: tuple[str, int]) -> None:
        for _ in range(300):
            junk = rng.randbytes(rng.choice([0, 1, 31, 32, 33, 48, 1000, 1472]))
            head = HEADER.pack(0x10 | rng.randrange(16), 0, rng.randrange(3), 9, 5, rng.randrange(30))
            connection.sendto((head + junk)[: rng.choice([None, 40])], hub)

    world = World(plan, some_vectors(2, 9001), engine, engine, disturb=disturb)
    done = world.run()
    world.expect_exact()
    assert done["accepted"] == 2 * plan.blocks


@pytest.mark.parametrize("engine", ENGINES)
def test_recorded_datagrams_of_another_round_do_not_count(engine: EngineName) -> None:
    """The same job's key, a round before: whole genuine vectors, sent again."""
    old, plan = VectorPlan(8, 9001), VectorPlan(9, 9001)
    recorded = [
        seal(
            client_key(0),
            Datagram(DatagramKind.DATA, 0, 8, index, index, bytes(4 * old.length(index))),
        )
        for index in range(old.blocks)
    ]

    def disturb(connection: socket.socket, hub: tuple[str, int]) -> None:
        for datagram in recorded:
            connection.sendto(datagram, hub)

    world = World(plan, some_vectors(1, 9001), engine, engine, disturb=disturb)
    done = world.run()
    world.expect_exact()
    assert done["round"] == old.blocks


def test_nobody_is_there() -> None:
    plan = VectorPlan(1, 1000)
    with open_socket(("127.0.0.1", 0)) as connection:
        with pytest.raises(RemoteError, match="client 0: no datagram came"):
            aggregate(connection, plan, heads_of(some_vectors(1, 1000)), stall=0.1)
        with open_socket(("127.0.0.1", 0)) as other, pytest.raises(DeadlineExceeded):
            vector = some_vectors(1, 1000)[0]
            exchange(
                other, connection.getsockname(), plan, 0, bytes(32), vector, deadline=Deadline.after(0.1)
            )


@pytest.mark.parametrize(
    "bad", [{"values": 0}, {"values": 20_000}, {"size": 0}, {"size": 1 << 60}, {"round": -1}]
)
def test_a_plan_that_fits_no_datagram_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"fit|empty"):
        VectorPlan(**{"round": 1, "size": 10, **bad})


_CLIENTS = """
import socket, sys, threading

import numpy as np

from millpond.aggregate.udp.datagrams import VectorPlan
from millpond.aggregate.udp.exchange import exchange

port, size, clients = map(int, sys.argv[1:])
values = np.ones(size, np.float32)


def run(client):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        hub, key = ("127.0.0.1", port), bytes(range(client, client + 32))
        exchange(connection, hub, VectorPlan(1, size), client, key, values)


for client in range(clients):
    threading.Thread(target=run, args=(client,)).start()
"""


@HAS_C
@pytest.mark.parametrize("clients", [2, 20])
def test_an_aggregator_takes_less_than_three_models_whatever_the_number_of_clients(clients: int) -> None:
    size = 1_000_000
    heads = heads_of([np.ones(1, np.float32)] * clients)
    with open_socket(("127.0.0.1", 0)) as hub:
        argv = [sys.executable, "-c", _CLIENTS, *map(str, (hub.getsockname()[1], size, clients))]
        with subprocess.Popen(argv) as others:
            tracemalloc.start()
            try:
                aggregate(hub, VectorPlan(1, size), heads, stall=30.0, engine="c")
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
                others.wait()
    assert peak < 2.5 * 4 * size

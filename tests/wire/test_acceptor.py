# SPDX-License-Identifier: Apache-2.0
"""Connections that are accepted: each has its thread, and a place that others leave to it."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from millpond.base.errors import RemoteError
from millpond.wire.acceptor import Acceptor
from millpond.wire.connection_limits import ConnectionPlace, ConnectionPlaces


@pytest.fixture
def server() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def connect(server: socket.socket) -> socket.socket:
    return socket.create_connection(server.getsockname(), timeout=30)


def echo(connection: socket.socket) -> None:
    while data := connection.recv(100):
        connection.sendall(data)


def answered(client: socket.socket) -> bytes:
    with client:
        client.sendall(b"hello")
        return client.recv(100)


def test_each_connection_has_its_own_thread(server: socket.socket) -> None:
    acceptor = Acceptor(server, echo, places=4, name="echo")
    with connect(server) as first:
        assert answered(connect(server)) == b"hello"
        first.sendall(b"still here")
        assert first.recv(100) == b"still here"
    acceptor.close()
    assert not acceptor.alive


@pytest.mark.expected_log("too many connections")
def test_places_are_given_back(server: socket.socket) -> None:
    acceptor = Acceptor(server, echo, places=1, name="echo")
    with connect(server) as first:
        first.sendall(b"x")
        assert first.recv(1) == b"x"
        with connect(server) as second:
            assert second.recv(1) == b""
    for _ in range(100):  # the place is free as soon as the thread has noticed
        with connect(server) as third, contextlib.suppress(ConnectionError):
            third.sendall(b"x")
            if third.recv(1) == b"x":
                break
    else:
        pytest.fail("the place was never given back")
    acceptor.close()


@pytest.mark.expected_log("cannot accept")
def test_outlives_a_lack_of_descriptors(server: socket.socket) -> None:
    acceptor = Acceptor(server, echo, places=4, name="echo")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
        client.settimeout(30)
        client.connect(server.getsockname())  # the kernel accepts; the process has no descriptor for it
        threading.Event().wait(0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answered(client) == b"hello"
    assert acceptor.alive
    acceptor.close()


class Connections:
    """Connections with places, and their far ends."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo, self.places = undo, ConnectionPlaces(strangers=3, known=2, relayed=3)

    def connect(self) -> tuple[ConnectionPlace, socket.socket]:
        near, far = (self._undo.enter_context(sock) for sock in socket.socketpair())
        far.settimeout(0.05)
        place = self.places.enter(near)
        self._undo.enter_context(place.connection)
        return place, far


@pytest.fixture
def connections() -> Iterator[Connections]:
    with ExitStack() as undo:
        yield Connections(undo)


def is_open(far: socket.socket) -> bool:
    try:
        return bool(far.recv(1))
    except TimeoutError:
        return True


def test_the_oldest_silent_stranger_goes(connections: Connections) -> None:
    first, *others = [connections.connect() for _ in range(4)]
    assert [is_open(far) for _, far in (first, *others)] == [False, True, True, True]
    with pytest.raises(RemoteError, match="lost its place"):
        first[0].authenticated()


def test_those_that_have_spoken_take_no_place_of_a_silent_one(connections: Connections) -> None:
    spoken = [connections.connect() for _ in range(3)]
    for place, _ in spoken:
        place.spoke()
    silent = [connections.connect() for _ in range(3)]
    assert all(is_open(far) for _, far in (*spoken, *silent))
    silent[0][0].spoke()
    assert [is_open(far) for _, far in (*spoken, *silent)] == [False, True, True, True, True, True]


def test_no_stranger_takes_the_place_of_one_that_is_authenticated(connections: Connections) -> None:
    host = connections.connect()
    host[0].authenticated()
    host[0].authenticated()
    strangers = [connections.connect() for _ in range(100)]
    assert is_open(host[1])
    assert [is_open(far) for _, far in strangers] == [False] * 97 + [True] * 3


def test_authenticated_ones_have_places_of_their_own(connections: Connections) -> None:
    known = [connections.connect() for _ in range(2)]
    for place, _ in known:
        place.authenticated()
    third, _ = connections.connect()
    with pytest.raises(RemoteError, match="2 connections are in use"):
        third.authenticated()
    known[0][0].__exit__(None, None, None)
    third.authenticated()


def test_connections_that_are_relayed_take_no_place_of_the_others(connections: Connections) -> None:
    """With encrypted volumes, two busy mounts had all of a device's places, and nobody else got in."""
    placed = list[ConnectionPlace]()
    for _ in range(4):
        placed.append(connections.connect()[0])
        placed[-1].authenticated()
        if len(placed) < 4:
            placed[-1].relayed()
    with pytest.raises(RemoteError, match="too many connections are relayed"):
        placed[3].relayed()
    assert connections.places.left == 1
    for place in placed:
        with place:
            pass
    assert connections.places.left == 2
    again = connections.connect()[0]
    again.authenticated()
    again.relayed()

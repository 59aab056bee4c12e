# SPDX-License-Identifier: Apache-2.0
"""The acceptor: connections in threads of their own, and failures that end only one."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading

import pytest

from millpond.wire.acceptor import Acceptor


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

# SPDX-License-Identifier: Apache-2.0
"""Unix sockets at deep paths, and descriptors passed over them."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.linux import sockets
from millpond.linux.descriptors import allow_most


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def deep(tmp_path: Path) -> Path:
    return tmp_path.joinpath(*["directory-with-a-long-name"] * 8, "host.socket")


def test_a_path_longer_than_an_address(tmp_path: Path) -> None:
    path = deep(tmp_path)
    assert len(os.fsencode(path)) > 107
    with sockets.listen(path) as server, sockets.connect(path, 5) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"hello")
            assert accepted.recv(5) == b"hello"


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_a_socket_has_the_mode_that_is_asked_for(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "s"
    with sockets.listen(path, mode=mode):
        assert path.stat().st_mode & 0o777 == mode


def test_the_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sockets.listen(path).close()
    assert path.exists()
    with sockets.listen(path) as server, sockets.connect(path, 5):
        server.accept()[0].close()


def test_the_socket_of_a_living_server_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with sockets.listen(path) as server:
        with pytest.raises(OSError, match="Address already in use") as caught:
            sockets.listen(path)
        assert (caught.value.errno, caught.value.filename) == (errno.EADDRINUSE, str(path))
        server.accept()[0].close()  # the question whether it lives
        with sockets.connect(path, 5):
            server.accept()[0].close()


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(OSError, match="Address already in use"):
        sockets.listen(path)
    assert path.read_text() == "precious"


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sockets.connect(tmp_path / "nothing" / "s")
    with pytest.raises(FileNotFoundError):
        sockets.connect(tmp_path / "s")
    sockets.listen(tmp_path / "s").close()
    with pytest.raises(ConnectionRefusedError):
        sockets.connect(tmp_path / "s")


def test_descriptors_arrive(pair: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    near, far = pair
    paths = [tmp_path / name for name in ("a", "b")]
    files = [path.open("w") for path in paths]
    sockets.send_descriptors(near, [file.fileno() for file in files])
    for file in files:
        file.close()
    received = sockets.receive_descriptors(far, 2)
    for descriptor, text in zip(received, (b"one", b"two"), strict=True):
        assert not os.get_inheritable(descriptor)
        os.write(descriptor, text)
        os.close(descriptor)
    assert [path.read_bytes() for path in paths] == [b"one", b"two"]


def open_descriptors(path: Path) -> int:
    """How many this process has of a file."""
    descriptors = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(descriptor) == str(path.resolve()) for descriptor in descriptors)


@pytest.mark.parametrize(("sent", "asked"), [(1, 2), (2, 1), (3, 1)])
def test_another_number_than_expected_leaks_none(
    pair: tuple[socket.socket, socket.socket], sent: int, asked: int, tmp_path: Path
) -> None:
    near, far = pair
    path = tmp_path / "a"
    with path.open("w") as file:
        sockets.send_descriptors(near, [file.fileno()] * sent)
        with pytest.raises(ConnectionError, match=f"^expected {asked} descriptors, got "):
            sockets.receive_descriptors(far, asked)
        assert open_descriptors(path) == 1


def test_something_else_than_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    near.sendall(b"D")
    with pytest.raises(ConnectionError, match="expected 1 descriptors, got 0"):
        sockets.receive_descriptors(far, 1)
    near.close()
    with pytest.raises(ConnectionError, match="expected 1 descriptors, got 0"):
        sockets.receive_descriptors(far, 1)


def test_descriptors_of_any_number_are_waited_for() -> None:
    if allow_most() <= 1024:
        pytest.skip("this machine allows no such number")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1024)  # select(2) refuses it
        assert sockets.readable([high], 0.0) == []
        theirs.send(b"x")
        assert sockets.readable([high, ours.fileno()]) == [high, ours.fileno()]
        os.close(high)
        assert sockets.readable([ours], 0.0) == [ours]


@pytest.mark.expected_log("a connection is lost: Too many open files")
def test_a_connection_without_a_descriptor_is_lost_and_no_later_one(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Before: the server ended at the first such connection, and all others with it."""
    agent, server = pair
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)

    taken = list[socket.socket]()
    lost, ours, kept, theirs = (*socket.socketpair(), *socket.socketpair())
    waiting = threading.Thread(target=lambda: taken.extend(sockets.passed_connections(server)))
    lowest = os.dup(0)
    os.close(lowest)
    with ours, kept:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, usual[1]))
        try:
            waiting.start()
            sockets.send_descriptors(agent, [lost.fileno()])
            agent.send(sockets.QUESTION)
            assert agent.recv(1) == sockets.ANSWER
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        lost.close()
        assert ours.recv(1) == b""
        sockets.send_descriptors(agent, [theirs.fileno()])
        agent.send(sockets.QUESTION)
        assert agent.recv(1) == sockets.ANSWER
        agent.shutdown(socket.SHUT_RDWR)
        waiting.join()
        theirs.close()
        taken[0].sendall(b"!")
        assert kept.recv(1) == b"!"
        taken[0].close()

# SPDX-License-Identifier: Apache-2.0
"""Links that are cut or fall silent, services that stand still: the epoch is whole, or the loop is told."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import RemoteError
from millpond.data.streaming.client import StreamSource, TcpAddress
from millpond.data.streaming.dataset import StreamDataset, StreamOptions
from millpond.data.streaming.loader import StreamLoader
from millpond.data.streaming.protocol.messages import (
    MOST_HEAD,
    AskRunState,
    DataOpened,
    JoinRun,
    OpenData,
    RunJoined,
    RunState,
    ServiceAlive,
)
from millpond.wire.acceptor import Acceptor
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits

from .link import relay
from .served import SAMPLES, service

SILENCE = 0.4


def stream(where: str, *, patience: float = 30.0, silence: float = SILENCE) -> StreamDataset:
    """A stream of batches of 8 with little on the way, of one silent connection after ``silence`` seconds."""
    host, _, port = where.rpartition(":")
    source = StreamSource(TcpAddress(host, int(port)), "images", patience=patience, silence=silence)
    return StreamDataset(source, StreamOptions(8, memory=2000, chunk=8))


def labels(stream: StreamDataset | StreamLoader) -> Iterator[int]:
    return (label for _, batch in stream for label in batch.tolist())


def test_a_link_that_falls_silent_is_left_for_another_connection(folder: Path) -> None:
    with service(folder, keep_alive=0.1) as where, relay(where) as link:
        found = []
        for label in labels(stream(link.where, silence=4.0)):  # of the link alone, on a slow machine, too
            found.append(label)
            if len(found) == 48:
                link.silence()
        assert sorted(found) == list(range(SAMPLES)) and link.connections == 2


def test_a_service_that_never_says_more_than_hello_is_an_error_after_some_tries() -> None:
    tries = []

    def only_hello(sock: socket.socket) -> None:
        with Channel(sock, "a consumer", limits=Limits(MOST_HEAD, 0)) as channel:
            tries.append(channel.expect(OpenData, Deadline.after(10)))
            channel.send(DataOpened((SAMPLES,), 64), Deadline.after(10))
            with contextlib.suppress(RemoteError):
                while True:
                    channel.receive(Deadline.after(30))

    with socket.create_server(("127.0.0.1", 0)) as server:
        acceptor = Acceptor(server, only_hello, places=8, name="hello")
        with pytest.raises(RemoteError, match=r"the data service is away: .* did not answer in time"):
            next(labels(stream("{}:{}".format(*server.getsockname()), patience=0.3, silence=0.1)))
        acceptor.close()
    assert 2 <= len(tries) <= 8


def test_a_service_with_nothing_to_send_says_that_it_is_there(folder: Path) -> None:
    with service(folder, keep_alive=0.05) as where:
        host, _, port = where.rpartition(":")
        with Channel(socket.create_connection((host, int(port))), "the service") as channel:
            channel.call(OpenData("images"), DataOpened, Deadline.after(10))
            for _ in range(3):
                assert channel.expect(ServiceAlive, Deadline.after(10)) == ServiceAlive()


def test_a_consumer_that_waits_for_busy_ones_hears_that_the_service_is_there(folder: Path) -> None:
    with service(folder, keep_alive=0.3) as where, ThreadPoolExecutor(1) as pool:
        waiting, busy = (
            Channel(socket.create_connection(("127.0.0.1", int(where.split(":")[1]))), "the service")
            for _ in range(2)
        )
        with waiting, busy:
            for channel in (waiting, busy):
                channel.call(OpenData("images"), DataOpened, Deadline.after(10))
            busy.call(JoinRun("run", "busy", 0), RunJoined, Deadline.after(10))
            heard, end = pool.submit(waiting.expect, ServiceAlive, Deadline.after(10)), Deadline.after(3)
            while not heard.done() and not end.passed:
                busy.call(AskRunState(), RunState, Deadline.after(10))  # wakes all connections
            assert heard.done() and heard.result() == ServiceAlive()


@pytest.mark.parametrize("rest", ["stream", "state", "loader"])
def test_what_was_yielded_as_the_link_went_down_is_not_trained_again(folder: Path, rest: str) -> None:
    with service(folder, grace=0.2) as where, relay(where) as link:
        first: Any = stream(link.where) if rest != "loader" else StreamLoader(stream(link.where), 1)
        found = []
        for label in labels(first):
            found.append(label)
            if len(found) == 24:
                link.cut()
                break
        link.mend()
        if rest == "state":
            state, first = first.state_dict(), stream(where)
            first.load_state_dict(state)
        found += labels(first)
    assert sorted(found) == list(range(SAMPLES))


def test_a_loaders_state_has_what_was_trained_on_before_a_link_was_cut(folder: Path) -> None:
    with service(folder) as where, relay(where) as link:
        loader = StreamLoader(stream(link.where), 1)
        batches, found = iter(loader), []
        for step in range(3):
            found += next(batches)[1].tolist()
            if step == 1:
                link.cut()
                link.mend()
        rest = StreamLoader(stream(where), 1)
        rest.load_state_dict(loader.state_dict())
        del batches
        found += labels(rest)
    assert sorted(found) == list(range(SAMPLES))

# SPDX-License-Identifier: Apache-2.0
"""Connections of an agent: who can only connect shuts nobody out, and tickets are good once."""

from __future__ import annotations

import ipaddress
import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from millpond.agent.gate import Gate, LedgerCounters
from millpond.agent.listener import CONNECTIONS, Listener
from millpond.agent.tickets import VALID_SECONDS, Tickets
from millpond.base.deadline import Deadline
from millpond.wire import tls
from millpond.wire.channel import Channel
from millpond.wire.control_messages import Attach
from millpond.wire.messages import Ok

from ..waiting import eventually
from ..wire.test_tls import Authority

PLACE = ipaddress.IPv4Interface("127.9.0.2/30")
HOST = "127.9.0.1"


class Answering:
    """An agent's service that answers Ok to whatever the host asks."""

    def __init__(self) -> None:
        self.gate = Gate((), LedgerCounters.in_memory())

    def serve(self, host: Channel) -> Attach | None:
        host.receive(Deadline.after(30))
        host.send(Ok(), Deadline.after(30))
        host.receive(Deadline.after(30))
        host.send(Ok(), Deadline.after(30))
        return None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((str(PLACE.ip), 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[int, tls.Identity]]:
    """The port of a listening agent, and the host's identity."""
    authority, port = Authority("fleet"), free_port()
    own = authority.identity(tmp_path / "csd0", "csd0")
    context = tls.CurrentContext(own, server=True)
    listener = Listener(Answering(), context, PLACE, port)  # type: ignore[arg-type]
    try:
        yield port, authority.identity(tmp_path / "host", tls.HOST)
    finally:
        listener.stop()


def connect(port: int) -> socket.socket:
    return socket.create_connection((str(PLACE.ip), port), 10, (HOST, 0))


def greet(port: int, identity: tls.Identity) -> Channel:
    """The host's connection, once it was served."""
    sock = connect(port)
    try:
        secure = tls.connect(sock, identity.context(server=False), "csd0", Deadline.after(20))
    except BaseException:
        sock.close()
        raise
    host = Channel(secure, "csd0")
    host.call(Ok(), Ok, Deadline.after(20))
    return host


@pytest.mark.expected_log("connection refused: a client")
@pytest.mark.parametrize("word", [b"", b"\x16", b"m"], ids=["silent", "half a handshake", "half a frame"])
def test_connections_that_show_nothing_shut_nobody_out(agent: tuple[int, tls.Identity], word: bytes) -> None:
    port, identity = agent
    with ExitStack() as undo:
        early = undo.enter_context(greet(port, identity))
        for _ in range(2 * CONNECTIONS):
            idle = undo.enter_context(connect(port))
            idle.sendall(word)
        undo.enter_context(greet(port, identity))
        early.call(Ok(), Ok, Deadline.after(20))  # it has its place still


def test_the_host_is_served_while_a_user_renews_silent_connections(agent: tuple[int, tls.Identity]) -> None:
    port, identity = agent
    over = threading.Event()

    def renew() -> None:
        held: list[socket.socket] = []
        while not over.wait(0.005):
            held.append(connect(port))
            if len(held) > CONNECTIONS:
                held.pop(0).close()
        for sock in held:
            sock.close()

    user = threading.Thread(target=renew)
    user.start()
    try:
        for _ in range(5):
            greet(port, identity).close()
    finally:
        over.set()
        user.join()


def test_an_agent_whose_connections_are_all_in_use_says_that_no_job_can_run(tmp_path: Path) -> None:
    """Before: its load was asked for on a connection that it had, and the device was ready, for no job."""
    authority, port = Authority("fleet"), free_port()
    own, host = authority.identity(tmp_path / "csd0", "csd0"), authority.identity(tmp_path / "host", tls.HOST)
    listener = Listener(Answering(), tls.CurrentContext(own, server=True), PLACE, port)  # type: ignore[arg-type]
    with ExitStack() as stack, ExitStack() as undo:
        stack.callback(listener.stop)
        for _ in range(CONNECTIONS - 2):
            undo.enter_context(greet(port, host))
        assert listener.fault == ""
        undo.enter_context(greet(port, host))
        assert listener.fault == f"all but 1 of the agent's {CONNECTIONS} connections are in use"
        undo.close()
        eventually(lambda: listener.fault == "", "the recovery")


def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    """Also one whose key is not in its place yet, since the power was cut in between."""
    authority, port = Authority("fleet"), free_port()
    own = authority.identity(tmp_path / "csd0", "csd0")
    host = authority.identity(tmp_path / "host", tls.HOST)
    context = tls.CurrentContext(own, server=True)
    listener = Listener(Answering(), context, PLACE, port)  # type: ignore[arg-type]
    try:
        seen = [shown(port, host)]
        for number in range(2):
            new = authority.identity(tmp_path / f"new{number}", "csd0")
            new.key.rename(own.next_key)
            new.certificate.rename(own.certificate)
            seen.append(shown(port, host))
            own.next_key.rename(own.key)
            assert shown(port, host) == seen[-1]
    finally:
        listener.stop()
    assert len(set(seen)) == 3


def shown(port: int, identity: tls.Identity) -> int:
    with greet(port, identity) as host:
        return tls.peer_serial(host.sock)  # type: ignore[arg-type]


@pytest.fixture
def tickets() -> Tickets[str]:
    numbers = itertools.count()
    return Tickets(lambda: b"%032d" % next(numbers))


def test_a_ticket_is_good_once(tickets: Tickets[str]) -> None:
    token = tickets.issue("volume", tls=False, now=100.0)
    assert tickets.redeem(token, tls=False, now=101.0) == "volume"
    assert tickets.redeem(token, tls=False, now=101.0) is None


@pytest.mark.parametrize(
    ("after", "good"), [(VALID_SECONDS - 0.001, True), (VALID_SECONDS, False), (1e6, False)]
)
def test_a_ticket_expires(tickets: Tickets[str], after: float, good: bool) -> None:
    token = tickets.issue("volume", tls=False, now=5.0)
    assert (tickets.redeem(token, tls=False, now=5.0 + after) == "volume") is good


def test_a_ticket_for_tls_is_no_good_in_plain_and_is_used_up_by_trying(tickets: Tickets[str]) -> None:
    token = tickets.issue("volume", tls=True, now=0.0)
    assert tickets.redeem(token, tls=False, now=1.0) is None
    assert tickets.redeem(token, tls=True, now=1.0) is None
    assert tickets.redeem(tickets.issue("volume", tls=True, now=0.0), tls=True, now=1.0) == "volume"
    assert tickets.redeem(tickets.issue("volume", tls=False, now=0.0), tls=True, now=1.0) == "volume"


@pytest.mark.parametrize("token", [b"", b"x", b"0" * 31, b"0" * 33, b"\xff" * 32])
def test_other_tokens_are_no_tickets(tickets: Tickets[str], token: bytes) -> None:
    good = tickets.issue("volume", tls=False, now=0.0)
    assert tickets.redeem(token, tls=False, now=1.0) is None
    assert tickets.redeem(good, tls=False, now=1.0) == "volume"


def test_tickets_that_nobody_redeems_are_forgotten(tickets: Tickets[str]) -> None:
    for number in range(1000):
        tickets.issue("volume", tls=False, now=float(number))
    assert len(tickets._issued) <= VALID_SECONDS + 1

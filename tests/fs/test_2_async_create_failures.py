# SPDX-License-Identifier: Apache-2.0
"""Asynchronous creates, when the connection or the lease is lost before they are flushed."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from ..waiting import eventually
from .caching_client import Client, Device, hold, make
from .support import SOON, Cutting, Doing, Server, errno_of
from .test_2_async_create import client, device, patience, public, server

__all__ = ["client", "device", "patience", "public", "server"]


def test_a_lost_answer_is_told_again(client: Client, public: Path) -> None:
    hold(client)
    client.dial = client.server.dial  # type: ignore[method-assign]
    make(client, b"f")
    client.tree.rpc._dial = client.server.dial
    for lane in client.tree.rpc._all:
        lane._dial = client.server.dial
        lane.disconnect()
    Cutting.cut_after = "fs.tell"
    client.tree.async_create.flush()
    assert (
        Cutting.cut_after is None and (public / "f").exists() and not client.tree.async_create.names.pending
    )


def test_a_lane_of_before_a_restart_does_not_lose_names_of_after_it(
    client: Client, server: Server, public: Path
) -> None:
    asked, done = threading.Event(), threading.Event()

    def in_another_thread() -> None:
        client.tree.statfs()
        done.set()
        assert asked.wait(SOON)
        client.tree.async_create.flush()  # at once: its connection seems to be in use

    other = Doing(in_another_thread)
    assert done.wait(SOON)
    server.refusing = True
    server.restart()
    server.refusing = False
    client.await_lease()
    hold(client)
    make(client, b"f")
    for lane in client.tree.rpc._all:
        lane._used = time.monotonic()
    asked.set()
    other.result()
    assert (public / "f").exists() and client.tree.async_create.delegations.of(
        client.tree.rpc.inodes.file(client.public)
    )


@pytest.mark.expected_log("new names are lost")
def test_names_that_were_not_told_within_the_lease_are_lost(
    client: Client, server: Server, device: Device, public: Path
) -> None:
    hold(client)
    (lost, handle), directory = make(client, b"f"), client.tree.opendir(client.public)
    server.refusing = True
    server.drop()
    device.put(b"g", b"data")
    server.refusing = False
    client.await_lease()
    assert client.names() == {"first", "second", "g"} and not (public / "f").exists()
    for each in (handle, directory):
        assert errno_of(client.tree.fsync, each, False) == errno.EIO
        assert errno_of(client.tree.fsync, each, False) is None
    assert client.tree.getattr(lost).attributes.links == 0
    make(client, b"f")


def test_names_that_nobody_missed_are_told_after_the_lease(client: Client, public: Path) -> None:
    hold(client)
    client.gate.shut("fs.recall")
    client.gate.reached()
    make(client, b"f")
    granting, directory = client.tree.async_create.delegations, client.tree.rpc.inodes.file(client.public)
    eventually(lambda: not granting.of(directory), "the lease is over")
    client.gate.open()
    eventually((public / "f").exists, "the name is told")
    client.await_lease()
    assert "f" in client.names()


def test_names_of_a_lost_session_are_told_in_the_next(client: Client, server: Server, public: Path) -> None:
    hold(client)
    _, handle = make(client, b"f")
    refused(client)  # or something would be sent, and the outcome not be known
    server.restart()
    server.refusing = False
    client.await_lease()
    client.tree.lookup(client.public, b"f")
    assert (public / "f").exists()
    client.tree.fsync(handle, False)
    hold_again = make(client, b"g")
    client.tree.fsync(hold_again[1], False)
    assert (public / "g").exists()


def cut(*_: object) -> None:
    """The connection is."""
    raise OSError(errno.EIO, "nobody knows")


@pytest.mark.expected_log("new names are lost")
def test_the_kernel_hears_of_a_name_that_is_lost_though_nobody_knows_of_the_next(
    client: Client, public: Path
) -> None:
    hold(client)
    for name in (b"third", b"one", b"two"):  # with the third, files are prepared for the others
        client.tree.release(make(client, name)[1])
        if name == b"third":
            client.tree.async_create.flush()
    (public / "one").touch()  # by nobody whom the server hears of
    before, tell = client.kernel.names_dropped, client.tree.async_create._send
    tries = iter((tell, tell, cut))  # both; each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.tree.async_create, "_send", lambda *told: next(tries)(*told))
        assert errno_of(client.tree.async_create.flush) == errno.EIO
    assert client.kernel.names_dropped == before + 1
    client.tree.async_create.flush()
    assert (public / "two").exists()


def refused(client: Client) -> None:
    """Connections are, but for that over which the lease is renewed."""
    client.server.refusing = True
    for lane in client.tree.rpc._all:
        lane.disconnect()


def test_names_are_not_lost_while_connections_are_refused_for_a_moment(
    client: Client, server: Server, public: Path
) -> None:
    hold(client)
    client.tree.release(make(client, b"f")[1])
    refused(client)
    assert {errno_of(client.tree.statfs) for _ in range(9)} == {errno.EIO}
    server.refusing = False
    client.tree.async_create.flush()
    assert (public / "f").exists()


@pytest.mark.expected_log("new names are lost")
def test_nobody_waits_for_ever_for_names_to_be_told(server: Server, patience: None) -> None:
    client = Client(server, timeout=0.5)
    hold(client)
    client.tree.release(make(client, b"f")[1])
    refused(client)
    eventually(lambda: errno_of(client.tree.async_create.flush) is None, "the names are given up")
    assert not client.tree.async_create.names.pending
    server.refusing = False
    client.close()

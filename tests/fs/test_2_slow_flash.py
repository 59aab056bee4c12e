# SPDX-License-Identifier: Apache-2.0
"""A flash that takes long fails no operation as long as its server answers; one that has stopped does."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.fs.client import session
from millpond.fs.client.keep_alive import KeepAlive
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import file_ops as p
from millpond.fs.server import sessions
from millpond.fs.server.connection import serve
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.operation import Operation, current
from millpond.fs.vfs.path_api import Handle
from millpond.wire.channel import Channel

from ..waiting import eventually
from .support import NAME, SLOT, SOON, Doing, Held, Server, _tcp_pair, errno_of, lasts

SILENCE = 0.4


@pytest.fixture
def flash(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Whose fsync takes until it is to go on."""
    monkeypatch.setattr(session, "SILENT_SECONDS", SILENCE)
    made = Held(server.tree, "fsync")
    yield made
    made.go_on.set()


def opened(tree: RemoteFs, name: bytes = b"f") -> Handle:
    handle = tree.create(ROOT, name, os.O_RDWR, 0o644, None)[1]
    tree.write(handle, b"x", 0)
    return handle


def test_an_fsync_may_take_long_while_the_server_answers(server: Server, flash: Held) -> None:
    tree = RemoteFs(server.dial, timeout=8 * SOON)
    syncing = Doing(tree.fsync, opened(tree), False)
    flash.begun()
    assert lasts(lambda: not syncing.done, 5 * SILENCE)
    flash.go_on.set()
    syncing.result()
    tree.close()


def test_a_server_that_says_nothing_has_stopped(server: Server, flash: Held) -> None:
    """However long an operation may take."""
    tree = RemoteFs(server.dial, timeout=100 * SOON)
    handle = opened(tree)
    server.refusing = True  # there is no connection but that of the fsync: no keep-alive is answered
    assert errno_of(tree.fsync, handle, False) == errno.ETIMEDOUT
    server.refusing = False
    tree.close()


def test_another_operation_does_not_wait_for_one_that_was_given_up(server: Server, flash: Held) -> None:
    """Its session slot still performs it: the next operation has another one."""
    tree = RemoteFs(server.dial, timeout=SILENCE)
    handle = opened(tree)
    assert errno_of(tree.fsync, handle, False) == errno.ETIMEDOUT
    flash.begun()
    tree.statfs()  # over the same slot, as far as the client is concerned
    tree.write(handle, b"y", 1)
    assert tree.read(handle, 5, 0) == b"xy"
    flash.go_on.set()
    tree.fsync(handle, False)
    tree.close()


def test_an_interrupted_fsync_ends_at_once(server: Server, flash: Held) -> None:
    tree = RemoteFs(server.dial, timeout=100 * SOON)
    handle, operation = opened(tree), Operation()
    syncing = Doing(_sync, tree, handle, operation)
    flash.begun()
    assert lasts(lambda: not syncing.done)
    operation.interrupt()
    assert syncing.result() == errno.EINTR
    tree.statfs()
    flash.go_on.set()
    tree.fsync(handle, False)
    tree.close()


def test_requests_that_were_abandoned_delay_others_at_most(
    server: Server, flash: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flash still performs them: with all slots of the client taken, another request waits for one."""
    monkeypatch.setattr(sessions, "_MAX_SLOTS", 4)
    tree = RemoteFs(server.dial, timeout=100 * SOON)
    handle = opened(tree)
    for _ in range(4):
        operation = Operation()
        syncing = Doing(_sync, tree, handle, operation)
        flash.begun()
        operation.interrupt()
        assert syncing.result() == errno.EINTR
    asking = Doing(tree.statfs)
    assert lasts(lambda: not asking.done, 3 * SILENCE)  # the server answers keep-alives all the time
    flash.go_on.set()
    asking.result()
    tree.close()


def _sync(tree: RemoteFs, handle: Handle, operation: Operation) -> int | None:
    current.set(operation)
    return errno_of(tree.fsync, handle, False)


def test_the_time_of_a_request_is_not_that_of_its_reply(server: Server, flash: Held, top: Path) -> None:
    """The server gives a client so long to take a reply, however long it took to perform the request."""
    (top / "f").touch()
    ours, theirs = _tcp_pair()
    thread = threading.Thread(
        target=serve, args=(Channel(theirs, "a client"), server.sessions), kwargs={"transfer": 0.2}
    )
    thread.start()
    with Channel(ours, "server") as channel:
        deadline = Deadline.after(8 * SOON)
        channel.call(p.SessionHello(NAME, SLOT), p.SessionWelcome, deadline)
        found = channel.call(p.Walk(ROOT, (b"f",)), p.FoundIs, deadline)
        handle = channel.call(p.Open(found.node, os.O_RDWR), p.Opened, deadline).handle
        channel.send(p.Sync(handle, False), deadline)
        flash.begun()
        assert lasts(lambda: thread.is_alive(), 0.5)
        flash.go_on.set()
        channel.expect(p.Done, deadline)
    thread.join(SOON)
    eventually(lambda: not thread.is_alive(), "the connection has ended")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_create_that_is_interrupted_leaves_no_open_file(
    tree: RemoteFs, server: Server, is_late: bool
) -> None:
    """Whether the flash is done before or after the next request."""
    making_file, operation = Held(server.tree, "create", after=True), Operation(time.monotonic())

    def make() -> None:
        current.set(operation)
        tree.create(ROOT, b"f", os.O_RDWR, 0o644, None)

    making = Doing(errno_of, make)
    making_file.begun()
    operation.interrupt()
    assert making.result() == errno.EINTR
    if is_late:
        tree.statfs()
    making_file.go_on.set()
    tree.statfs()
    eventually(lambda: not server.open_files, "nothing is open")
    assert tree.lookup(ROOT, b"f").attributes.size == 0


def test_a_server_that_was_heard_since_is_not_away() -> None:
    """It is dialled again for as long when it starts again later."""
    watch = KeepAlive(lambda _deadline: None, 0.01, [])
    assert not watch.is_away()
    time.sleep(0.02)
    assert watch.is_away()
    watch.heard = time.monotonic()
    assert not watch.is_away()

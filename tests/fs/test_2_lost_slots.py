# SPDX-License-Identifier: Apache-2.0
"""Slots and waits that an interruption or a restart of the server leaves behind."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import file_ops as p
from millpond.fs.server import sessions
from millpond.fs.server.sessions import SessionSlot
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.operation import Operation, current
from millpond.wire.channel import Channel

from ..waiting import eventually
from .support import NAME, SLOT, SOON, Doing, Held, Server, errno_of, lasts

SLOTS = sessions._MAX_SLOTS


def interruptible(operation: Operation, call: Callable[..., object], *arguments: object) -> Doing:
    """Do something as an operation of a program; the result is its errno."""

    def do() -> int | None:
        current.set(operation)
        return errno_of(call, *arguments)

    return Doing(do)


def test_a_file_is_closed_though_the_next_hello_was_interrupted_too(server: Server, top: Path) -> None:
    is_silent, silent = False, list[socket.socket]()

    def dial(deadline: Deadline) -> Channel:
        if not is_silent:
            return server.dial(deadline)
        ours, theirs = socket.socketpair()
        silent.append(theirs)
        return Channel(ours, "csd0")

    tree, slow = RemoteFs(dial, SOON), Held(server.tree, "create")
    create, statfs = Operation(), Operation()
    creating = interruptible(create, tree.create, ROOT, b"f", os.O_RDWR, 0o644, None)
    slow.begun()
    create.interrupt()
    assert creating.result() == errno.EINTR
    is_silent = True
    asking = interruptible(statfs, tree.statfs)
    eventually(lambda: silent, "the client has connected")
    eventually(lambda: silent[0].recv(1, socket.MSG_PEEK), "and sent its hello")
    statfs.interrupt()
    assert asking.result() == errno.EINTR
    is_silent = False
    tree.statfs()
    slow.go_on.set()
    eventually(lambda: (top / "f").exists() and not server.open_files, "the server has closed the file")
    tree.close()
    silent[0].close()


def test_a_slot_that_was_given_up_makes_room_first(server: Server) -> None:
    """One whose client may come back and ask for its reply stays."""
    with server.talk() as lost:
        lost.call(p.Make(ROOT, b"d", stat.S_IFDIR | 0o755), p.FoundIs)
    server.join()
    with server.talk(slot=b"an abandoned one"):
        pass
    server.join()
    talks = [Channel(server.raw(), "server") for _ in range(SLOTS - 1)]
    for number, channel in enumerate(talks):
        instead = b"an abandoned one" if number == SLOTS - 2 else b""
        hello = p.SessionHello(NAME, b"%16d" % number, instead=instead)
        channel.call(hello, p.SessionWelcome, Deadline.after(SOON))
    with server.talk() as again:
        assert again.welcome.performed == 1
        again.call(p.Again(), p.FoundIs)
    for channel in talks:
        channel.close()


def test_nothing_is_sent_in_a_session_that_has_ended(tree: RemoteFs, server: Server, top: Path) -> None:
    """Over a connection of whose end the client has not heard yet."""
    slow = Held(server.tree, "statfs")
    asking = Doing(tree.statfs)
    slow.begun()
    tree.getattr(ROOT)
    slow.go_on.set()
    asking.result()
    assert server.dialled == 2
    server.forget()
    server.channels[0].shut_down()
    slow = Held(server.tree, "statfs")
    asking = Doing(tree.statfs)  # over the first connection, in a new session
    slow.begun()
    tree.mkdir(ROOT, b"d", 0o755, None)  # over the second one: it is known not to be sent
    slow.go_on.set()
    asking.result()
    assert (top / "d").is_dir()


class _GivenUpMeanwhile:
    """The lock of a slot that is given up at the end of a block that holds it."""

    def __init__(self, slot: SessionSlot) -> None:
        self._slot, self._lock = slot, threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        if not self._slot.is_given_up:
            self._slot.give_up()
        self.release()


def test_a_file_is_closed_though_the_connection_ends_in_the_same_moment(server: Server) -> None:
    with server.talk() as talk:
        talk.call(p.Create(ROOT, b"f", os.O_RDWR, 0o644), p.Opened)
        (client,) = server.sessions.clients()
        client.slots[SLOT]._lock = _GivenUpMeanwhile(client.slots[SLOT])  # type: ignore[assignment]
    server.join()
    assert not server.open_files


def test_a_program_that_waits_for_the_read_of_another_can_be_interrupted(server: Server) -> None:
    tree, operation = RemoteFs(server.dial, timeout=8 * SOON), Operation()
    handle = tree.create(ROOT, b"f", os.O_RDWR, 0o644, None)[1]
    ahead, opened = tree._readahead, tree.files.get(handle)
    with ahead._lanes[handle % len(ahead._lanes)].lock:
        waiting = interruptible(operation, ahead.take, handle, opened, 1, 0, 1)
        assert lasts(lambda: not waiting.done)
        operation.interrupt()
        assert waiting.result(SOON) == errno.EINTR
    tree.close()

# SPDX-License-Identifier: Apache-2.0
"""The device's own mount and the delegation manager, over the socket between them."""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.base.deadline import Deadline
from millpond.fs.coherence import device_client
from millpond.fs.coherence.delegation_table import Holder, Inode
from millpond.fs.coherence.device_client import DeviceDelegationBreaker
from millpond.fs.coherence.lease_file import PersistentLeases, open_leases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.coherence.shared_bitmap import SharedBitmap, SharedBitmapView
from millpond.fs.proto import delegations as m
from millpond.fs.vfs.operation import Operation, current
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

from ..waiting import eventually
from .caching_client import LONG_LEASE, Listening, managed
from .support import SOON, Doing, errno_of, lasts, listening

D, F, G = 1, 10, 11


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def server(path: Path) -> Iterator[Listening]:
    with managed(path) as made:
        yield made


@pytest.fixture
def guard(server: Listening, path: Path) -> Iterator[DeviceDelegationBreaker]:
    with DeviceDelegationBreaker(path, lease=LONG_LEASE) as made:
        yield made


def changed(guard: DeviceDelegationBreaker, *directories: int, inodes: tuple[int, ...] = ()) -> None:
    with guard.write_intent(*directories, inodes=inodes):
        pass


def refused() -> Channel:
    raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")


def give_up(manager: DelegationManager, holder: Holder, opened: tuple[int, ...] = ()) -> set[int]:
    inodes, upto = manager.next_recall(holder, SOON)
    manager.return_delegations(holder, inodes, upto, opened)
    return set(inodes)


def test_a_mount_that_has_arrived_stays(server: Listening, guard: DeviceDelegationBreaker) -> None:
    """With that connection its file locks would end."""
    time.sleep(0.3)
    assert server.accepted == 1
    changed(guard, D)
    changed(guard, D)  # over the one that is nobody's now
    assert server.accepted == 2


def test_new_locks_wait_until_hosts_have_reclaimed_theirs(
    server: Listening, guard: DeviceDelegationBreaker
) -> None:
    manager, host = server.manager, server.client()
    guard.await_hosts()
    manager.begin_lease(host, lambda: False)
    assert not guard.is_settled()
    guard.await_hosts()  # of the same manager: once is enough
    manager.restored_locks(host)
    assert guard.is_settled() and server.accepted == 2  # with the one that has waited


def test_what_is_added_to_a_change_is_recalled_then(
    server: Listening, guard: DeviceDelegationBreaker
) -> None:
    manager, client = server.manager, server.client()
    manager.grant_read(client, F)

    def revoke() -> None:
        with guard.write_intent(D + 1) as recall:
            recall(F)

    manager.grant_read(client, D + 1)
    doing = Doing(revoke)
    assert give_up(manager, client) == {D + 1}
    assert give_up(manager, client) == {F}
    doing.result()


def test_a_lookup_asks_only_where_there_is_a_mark(server: Listening, guard: DeviceDelegationBreaker) -> None:
    manager, client = server.manager, server.client()
    assert not guard.recall_writer(D) and server.accepted == 1
    assert manager.grant_write(client, D)
    assert not guard.recall_writer(F) and server.accepted == 1
    looking = Doing(guard.recall_writer, D)
    assert manager.next_recall(client, SOON)[0] == {D} and not looking.done
    assert give_up(manager, client) == {D}
    assert looking.result()
    assert not guard.recall_writer(D)


def test_marks_are_those_of_the_master_that_is_there(server: Listening, path: Path) -> None:
    with DeviceDelegationBreaker(path, lease=0.5) as guard:
        assert server.manager.grant_write(server.client(), D)
        server.kill()
        Doing(guard.recall_writer, D).result()  # once its leases are over
        other = Listening(path, device=True)
        client = other.client()
        # once the mount has seen its marks
        eventually(
            lambda: other.manager.renew_lease(client) or other.manager.grant_write(client, F),
            "the new manager knows the mount",
        )
        looking = Doing(guard.recall_writer, F)
        assert give_up(other.manager, client) == {F}
        assert looking.result()
        # the manager grants once it knows the mount, an instant before the mount has the marks
        eventually(lambda: not guard.recall_writer(D), "the marks of the new manager")
    other.kill()


def test_a_lookup_waits_for_the_hosts_of_the_manager_before(path: Path, tmp_path: Path) -> None:
    """The new manager marks nothing that it does not know of."""
    file = open_leases(tmp_path / "leases")
    PersistentLeases(file, LONG_LEASE).renew(b"the host before.")
    again = Listening(path, device=True, leases=PersistentLeases(file, LONG_LEASE))
    with DeviceDelegationBreaker(path, lease=LONG_LEASE) as guard:
        operation = Operation()

        def look() -> None:
            current.set(operation)
            guard.recall_writer(F)

        interrupted, looking = Doing(look), Doing(guard.recall_writer, F)
        assert lasts(lambda: not interrupted.done and not looking.done)
        operation.interrupt()
        assert errno_of(interrupted.result) == errno.EINTR and not looking.done
        again.manager.begin_lease(again.manager.join(b"the host before."), lambda: False)
        looking.result()
        eventually(lambda: not guard.recall_writer(F), "the mount asks no more")
    again.kill()
    os.close(file)


def test_what_is_granted_before_the_marks_have_come_is_asked_for(
    server: Listening, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, come = device_client.receive_bitmap, threading.Event()

    def late(sock: socket.socket, seconds: float) -> SharedBitmapView:
        assert come.wait(SOON)
        return received(sock, seconds)

    monkeypatch.setattr(device_client, "receive_bitmap", late)
    made = DeviceDelegationBreaker(path, lease=2 * SOON)
    before = SharedBitmap()
    made.bitmap, made._last_heard = (
        SharedBitmapView(os.dup(before.descriptor())),
        -math.inf,
    )  # of a manager that is gone
    arriving = Doing(made.__enter__)
    client = server.client()
    eventually(
        lambda: server.accepted and server.manager.grant_write(client, F),
        "the manager grants a file",
    )
    eventually(lambda: made.bitmap is None, "the marks of the earlier manager are dropped")
    looking = Doing(made.recall_writer, F)
    assert give_up(server.manager, client) == {F}
    assert looking.result()
    come.set()
    arriving.result()
    made.__exit__()


def test_a_mount_that_dies_leaves_nothing(server: Listening, path: Path) -> None:
    manager, client = server.manager, server.client()
    channel = Channel(socket.socket(socket.AF_UNIX), "the manager")
    channel.sock.connect(str(path))
    with channel:
        channel.call(m.BeginChange((D,), (F,)), m.ChangeBegun, Deadline.after(SOON))
        channel.call(m.BeginWriting(G), m.WritingBegun, Deadline.after(SOON))
        channel.send(m.EndWriting(99), Deadline.after(SOON))  # of which it knows nothing
        assert channel.call(m.BeginWriting(G), m.WritingBegun, Deadline.after(SOON)).passthrough
        assert [manager.grant_read(client, inode) for inode in (D, F, G)] == [0, 0, 0]
    eventually(
        lambda: all(manager.grant_read(client, inode) for inode in (D, F, G)),
        "all that the mount had begun has ended",
    )


def test_a_master_that_was_started_again_is_told_what_is_written(
    server: Listening, guard: DeviceDelegationBreaker, path: Path
) -> None:
    for inode in (F, G, G):
        assert guard.begin_writing(inode)
    server.kill()
    guard.end_writing(F)
    again = Listening(path, device=True)
    client = again.client()
    eventually(
        lambda: again.manager.grant_read(client, F), "the new manager knows the mount"
    )  # nothing before it knows what is written
    assert again.manager.grant_read(client, G) == 0 and not again.manager.opened(client, G)
    guard.end_writing(G)
    assert again.manager.grant_read(client, G) == 0
    guard.end_writing(G)
    eventually(lambda: again.manager.grant_read(client, G), "the kernel writes the file no more")
    again.kill()


def test_a_mount_that_lost_its_connection_arrives_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Listening(path, device=True)
    manager, client = server.manager, server.client()
    with DeviceDelegationBreaker(path, lease=LONG_LEASE) as guard:
        assert guard.begin_writing(F) and manager.grant_read(client, D)
        with monkeypatch.context() as away:
            away.setattr(guard, "_connect", refused)
            assert guard._presence_channel
            guard._presence_channel.shut_down()
            eventually(lambda: not manager.device[0], "the manager knows no mount")
            assert manager.grant_read(client, F) == manager.grant_read(client, G) == 0
            assert manager._table.holds(client, Inode(D))  # which no kernel can be writing
            eventually(
                lambda: manager._table.grant_read(client, Inode(F)), "as if it had been granted just before"
            )
        eventually(lambda: manager.grant_read(client, G), "the mount has arrived again")
        assert give_up(manager, client) == {F}
        assert manager.grant_read(client, F) == 0
    server.kill()


def test_a_change_in_the_middle_of_which_the_master_is_started_again(
    server: Listening, guard: DeviceDelegationBreaker, path: Path
) -> None:
    """What is added to it is announced to another manager, which must hear of the rest as well."""
    with guard.write_intent(D, inodes=(G,)) as recall:
        server.kill()
        again = Listening(path)
        client = again.client()
        recall(F)
        assert [again.manager.grant_read(client, inode) for inode in (F, D, G)] == [0, 0, 0]
    eventually(lambda: again.manager.grant_read(client, F), "the change has ended")
    again.kill()


def test_nobody_is_waited_for_where_there_never_was_a_master(path: Path) -> None:
    with DeviceDelegationBreaker(path, lease=1000.0) as guard:
        changed(guard, D, inodes=(F,))
        assert guard.begin_writing(F)
        guard.end_writing(F)


def test_a_master_that_ends_after_a_quiet_time_is_waited_for(server: Listening, path: Path) -> None:
    """Hosts had a lease until it ended, though the mount has asked nothing since long before."""
    lease, now = 10.0, [1000.0]
    with DeviceDelegationBreaker(path, lease=lease, clock=lambda: now[0]) as guard:
        assert server.manager.grant_read(server.client(), F)
        now[0] += 2 * lease
        server.kill()
        waiting = Doing(changed, guard, inodes=(F,))
        eventually(lambda: guard._presence_channel is None, "the mount knows that its manager has ended")
        now[0] += 0.9 * lease
        assert lasts(lambda: not waiting.done)
        now[0] += 0.2 * lease
        waiting.result()
        with guard.write_intent(D) as recall:
            recall(F)
        assert guard.begin_writing(F)
        guard.end_writing(F)


def test_a_program_that_waits_for_a_manager_can_be_interrupted(path: Path) -> None:
    with listening(path):
        guard = DeviceDelegationBreaker(path, lease=LONG_LEASE)
    operation = Operation()

    def ask() -> int | None:
        current.set(operation)
        return errno_of(changed, guard, D)

    asking = Doing(ask)
    assert lasts(lambda: not asking.done)
    operation.interrupt()
    assert asking.result(SOON) == errno.EINTR


def test_a_manager_that_stands_still_is_not_waited_for_without_an_end(
    server: Listening, guard: DeviceDelegationBreaker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is still connected, and takes no other connection."""
    monkeypatch.setattr(device_client, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(guard, "_connect", refused)
    assert Doing(errno_of, changed, guard, D).result(SOON) == errno.EIO


def test_a_signal_just_after_the_reply_ends_the_change_before_it_is_made(
    guard: DeviceDelegationBreaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cuts the connection: the manager has ended the write intent."""
    operation, made, expect = Operation(), list[str](), Channel.expect

    def then_interrupted(*arguments: Any) -> Message:
        answer = expect(*arguments)
        operation.interrupt()
        return answer

    def change() -> None:
        current.set(operation)
        with guard.write_intent(D):
            made.append("a change")

    monkeypatch.setattr(Channel, "expect", then_interrupted)
    assert Doing(errno_of, change).result(SOON) == errno.EINTR
    assert not made

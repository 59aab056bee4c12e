"""The device's own mount and the lock master, over the socket between them."""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.fs.coherence import device_client
from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.coherence.device_client import DeviceDelegationBreaker
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.coherence.shared_bitmap import SharedBitmap, SharedBitmapView
from millpond.fs.proto import delegations as m
from millpond.fs.vfs.inode_api import WouldBlock
from millpond.wire.channel import Channel

from ..waiting import eventually
from .keeping import LONG_LEASE, Listening, mastered
from .support import SOON, Doing, errno_of

D, F, G = 1, 10, 11


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def server(path: Path) -> Iterator[Listening]:
    with mastered(path) as made:
        yield made


@pytest.fixture
def guard(server: Listening, path: Path) -> Iterator[DeviceDelegationBreaker]:
    with DeviceDelegationBreaker(path, lease=LONG_LEASE) as made:
        yield made


def changed(guard: DeviceDelegationBreaker, *directories: int, inodes: tuple[int, ...] = ()) -> None:
    with guard.change(*directories, inodes=inodes):
        pass


def give_up(master: DelegationManager, holder: Holder, opened: tuple[int, ...] = ()) -> set[int]:
    inodes, upto = master.next_recall(holder, SOON)
    master.recalled(holder, inodes, upto, opened)
    return set(inodes)


def test_a_mount_that_has_arrived_stays(server: Listening, guard: DeviceDelegationBreaker) -> None:
    """With that connection its file locks would end."""
    time.sleep(0.3)
    assert server.accepted == 1
    changed(guard, D)
    changed(guard, D)  # over the one that is nobody's now
    assert server.accepted == 2


def test_a_change_is_announced(server: Listening, guard: DeviceDelegationBreaker) -> None:
    master, client = server.master, server.client()
    with guard.change(D, inodes=(F,)) as change:
        assert master.share(client, D) == master.share(client, F) == 0
        assert master.share(client, G) == 1
        doing = Doing(give_up, master, client)
        change.revoke(G)
        assert doing.result() == {G}
        assert master.share(client, G) == master.share(client, F) == 0
    eventually(
        lambda: master.share(client, D) and master.share(client, F) and master.share(client, G),
        "the change has ended",
    )


def test_a_change_waits_until_nobody_keeps_it(server: Listening, guard: DeviceDelegationBreaker) -> None:
    master, client = server.master, server.client()
    master.share(client, F)
    doing = Doing(changed, guard, D, inodes=(F,))
    assert master.next_recall(client, SOON)[0] == {F}
    assert not doing.done
    other = Doing(changed, guard, D + 1, inodes=(G,))  # of other files, in another thread
    other.result()
    assert give_up(master, client) == {F}
    doing.result()


def test_who_cannot_wait_is_told_so(server: Listening, guard: DeviceDelegationBreaker) -> None:
    master, client = server.master, server.client()
    master.share(client, F)
    with pytest.raises(WouldBlock):
        Doing(changed, guard, D, inodes=(F,), may_wait=False).result()
    eventually(lambda: master.share(client, D), "no change has begun")  # nothing has begun

    def revoke() -> None:
        with guard.change(D + 1) as change:
            change.revoke(F)

    with pytest.raises(WouldBlock):
        Doing(revoke, may_wait=False).result()
    eventually(lambda: master.share(client, D + 1), "no change has begun")
    doing = Doing(revoke)
    assert give_up(master, client) == {D + 1}
    assert give_up(master, client) == {F}
    doing.result()


def test_who_looks_asks_only_where_there_is_a_mark(server: Listening, guard: DeviceDelegationBreaker) -> None:
    master, client = server.master, server.client()
    assert not guard.settle(D) and server.accepted == 1
    assert master.take(client, D)
    assert not guard.settle(F) and server.accepted == 1
    with pytest.raises(WouldBlock):
        Doing(guard.settle, D, may_wait=False).result()
    looking = Doing(guard.settle, D)
    assert master.next_recall(client, SOON)[0] == {D} and not looking.done
    assert give_up(master, client) == {D}
    assert looking.result()
    assert not guard.settle(D)


def test_marks_are_those_of_the_master_that_is_there(server: Listening, path: Path) -> None:
    with DeviceDelegationBreaker(path, lease=0.5) as guard:
        assert server.master.take(server.client(), D)
        server.kill()
        Doing(guard.settle, D).result()  # once its leases are over
        other = Listening(path, device=True)
        client = other.client()
        # once the mount has seen its marks
        eventually(
            lambda: other.master.heard(client) or other.master.take(client, F),
            "the new master knows the mount",
        )
        looking = Doing(guard.settle, F)
        assert give_up(other.master, client) == {F}
        assert looking.result() and not guard.settle(D)
    other.kill()


def test_what_is_granted_before_the_marks_have_come_is_asked_for(
    server: Listening, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, come = device_client._received_marks, threading.Event()

    def late(channel: Channel) -> SharedBitmapView:
        assert come.wait(SOON)
        return received(channel)

    monkeypatch.setattr(device_client, "_received_marks", late)
    made = DeviceDelegationBreaker(path, lease=0.5)
    before = SharedBitmap()
    made._marks, made._heard = (
        SharedBitmapView(os.dup(before.shared())),
        -math.inf,
    )  # of a master that is gone
    arriving = Doing(made.__enter__)
    client = server.client()
    eventually(lambda: server.accepted and server.master.take(client, F), "the master grants a directory")
    eventually(lambda: made._marks is None, "the marks of the earlier master are dropped")
    looking = Doing(made.settle, F)
    assert give_up(server.master, client) == {F}
    assert looking.result()
    come.set()
    arriving.result()
    made.__exit__()


def test_a_refusal_says_why(
    server: Listening, guard: DeviceDelegationBreaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object, **_more: object) -> None:
        raise OSError(errno.ETIMEDOUT, "they never gave it up")

    monkeypatch.setattr(server.master, "add", late)
    assert errno_of(changed, guard, D) == errno.ETIMEDOUT


def test_what_the_kernel_writes_is_granted_to_nobody(
    server: Listening, guard: DeviceDelegationBreaker
) -> None:
    master, client = server.master, server.client()
    for inode in (F, F, G):
        with guard.change(inodes=(inode,)):
            assert guard.begin_writing(inode)
    eventually(lambda: master.share(client, D), "the change has ended")
    assert master.share(client, F) == 0 and not master.opened(client, F)
    guard.end_writing(F)
    guard.end_writing(G)
    eventually(
        lambda: master.share(client, G), "the kernel writes the file no more"
    )  # and so the master has heard of F as well
    assert master.share(client, F) == 0
    guard.end_writing(F)
    eventually(lambda: master.share(client, F), "the kernel writes the file no more")


def test_the_kernel_may_not_write_what_a_client_keeps_or_has_open(
    server: Listening, guard: DeviceDelegationBreaker
) -> None:
    master, client = server.master, server.client()
    master.opened(client, F)
    with guard.change(inodes=(F,)):
        assert not guard.begin_writing(F)
    master.closed(client, F)
    master.share(client, G)
    doing = Doing(changed, guard, inodes=(G,))
    give_up(master, client, (G,))  # it was opened without a word
    doing.result()
    assert not guard.begin_writing(G)
    assert guard.begin_writing(F)
    eventually(lambda: master.share(client, G), "the change has ended")


def test_a_mount_that_dies_leaves_nothing(server: Listening, path: Path) -> None:
    master, client = server.master, server.client()
    channel = Channel(socket.socket(socket.AF_UNIX), "the master")
    channel.sock.connect(str(path))
    with channel:
        channel.call(m.BeginChange((D,), (F,), True), m.ChangeBegun, Deadline.after(SOON))
        channel.call(m.BeginWriting(G), m.WritingBegun, Deadline.after(SOON))
        channel.send(m.EndWriting(99), Deadline.after(SOON))  # of which it knows nothing
        assert channel.call(m.BeginWriting(G), m.WritingBegun, Deadline.after(SOON)).by_kernel
        assert [master.share(client, inode) for inode in (D, F, G)] == [0, 0, 0]
    eventually(
        lambda: all(master.share(client, inode) for inode in (D, F, G)),
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
        lambda: again.master.share(client, F), "the new master knows the mount"
    )  # nothing before it knows what is written
    assert again.master.share(client, G) == 0 and not again.master.opened(client, G)
    guard.end_writing(G)
    assert again.master.share(client, G) == 0
    guard.end_writing(G)
    eventually(lambda: again.master.share(client, G), "the kernel writes the file no more")
    again.kill()


def test_a_master_that_never_heard_of_a_mount_grants_nothing(path: Path) -> None:
    server = Listening(path, device=True)
    client = server.client()
    assert server.master.share(client, F) == 0 == server.master.share_data(client, F)
    with DeviceDelegationBreaker(path, lease=LONG_LEASE):
        assert server.master.share(client, F)
    server.kill()


def test_a_change_is_announced_to_a_master_that_was_started_again(
    server: Listening, guard: DeviceDelegationBreaker, path: Path
) -> None:
    changed(guard, D)
    server.kill()
    again = Listening(path)
    client = again.client()
    with guard.change(D) as change:
        assert again.master.share(client, D) == 0
        change.revoke(F)
        assert again.master.share(client, F) == 0
    eventually(lambda: again.master.share(client, D), "the change has ended")
    again.kill()


def test_a_change_in_the_middle_of_which_the_master_is_started_again(
    server: Listening, guard: DeviceDelegationBreaker, path: Path
) -> None:
    """What is added to it is announced to another master, which must hear of the rest as well."""
    with guard.change(D, inodes=(G,)) as change:
        server.kill()
        again = Listening(path)
        client = again.client()
        change.revoke(F)
        assert [again.master.share(client, inode) for inode in (F, D, G)] == [0, 0, 0]
    eventually(lambda: again.master.share(client, F), "the change has ended")
    again.kill()


def test_a_master_that_is_away_is_waited_for(
    server: Listening, guard: DeviceDelegationBreaker, path: Path
) -> None:
    changed(guard, D)
    server.kill()
    doing = Doing(changed, guard, D)
    with pytest.raises(WouldBlock):
        Doing(changed, guard, D, may_wait=False).result()
    assert not doing.done
    again = Listening(path)
    doing.result()
    again.kill()


def test_a_master_that_does_not_come_back_is_waited_for_as_long_as_a_lease(
    server: Listening, path: Path
) -> None:
    lease = 0.5
    start = time.monotonic()
    with DeviceDelegationBreaker(path, lease=lease) as guard:
        changed(guard, D)
        server.kill()
        changed(guard, D, inodes=(F,))
        assert time.monotonic() - start >= lease
        with guard.change(D) as change:
            change.revoke(F)
        assert guard.begin_writing(F)
        guard.end_writing(F)


def test_nobody_is_waited_for_where_there_never_was_a_master(path: Path) -> None:
    with DeviceDelegationBreaker(path, lease=1000.0) as guard:
        changed(guard, D, inodes=(F,))
        assert guard.begin_writing(F)
        guard.end_writing(F)

# SPDX-License-Identifier: Apache-2.0
"""The file locks of a volume: two clients of one server."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.file_locks import RemoteLocks
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.coherence.delegation_table import DEVICE
from millpond.fs.coherence.lease_file import open_leases
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.store.file_locks import FileLocks
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.lock_types import OFFSET_MAX, Family, Lock, Mode
from millpond.fs.vfs.path_api import os_error

from ..waiting import eventually
from . import caching_client
from .caching_client import Client
from .recall_clients import client, device, lease, other, server
from .support import Cutting, Doing, Server, errno_of

__all__ = ["client", "device", "lease", "other", "server"]
WRITE, READ, UNLOCK = Mode.WRITE, Mode.READ, Mode.UNLOCK
LOCKING = (r.SetLock.NAME, r.ReleaseLocks.NAME, r.GetLock.NAME)
FAMILIES = pytest.mark.parametrize("family", Family)
LOST = pytest.mark.expected_log("a file lock was lost")
BIG = (1 << 64) - 1
"""An owner's number, as kernels have them."""


def lock(mode: Mode, start: int = 0, end: int = OFFSET_MAX, owner: int = BIG) -> Lock:
    return Lock(owner, mode, start, end, 77)


def ask(client: Client, family: Family, wanted: Lock, name: bytes = b"f") -> int:
    return client.tree.locks.lock(client.find(name), family, wanted)


@FAMILIES
@pytest.mark.parametrize("how", ["leaves", "is gone"])
def test_the_locks_of_a_host_end_with_it(client: Client, other: Client, family: Family, how: str) -> None:
    assert ask(client, family, lock(WRITE)) == 0
    assert ask(other, family, lock(WRITE)) == errno.EAGAIN
    if how == "leaves":
        client.tree.close()
    else:
        client.recalls.stop()
    eventually(lambda: ask(other, family, lock(WRITE)) == 0, "the lock is free")


def test_what_cannot_be_written_costs_no_lock(client: Client, other: Client) -> None:
    failing = False

    def flush(_file: CachedInode) -> None:
        if failing:
            raise os_error(errno.ENOSPC)

    locks, node = RemoteLocks(client.tree.session, flush), client.find(b"f")
    for byte in (0, 5):
        assert locks.lock(node, Family.POSIX, lock(WRITE, byte, byte)) == 0
    failing = True
    assert errno_of(locks.lock, node, Family.POSIX, lock(WRITE, 9, 9)) == errno.ENOSPC
    assert locks.lock(node, Family.POSIX, lock(UNLOCK, 5, 5)) == 0
    locks.require(node)
    answers = [ask(other, Family.POSIX, lock(READ, byte, byte)) for byte in (0, 5, 9)]
    assert answers == [errno.EAGAIN, 0, 0]


def test_a_close_asks_nobody_if_there_is_nothing_to_unlock(client: Client) -> None:
    assert ask(client, Family.POSIX, lock(WRITE)) == 0
    assert ask(client, Family.POSIX, lock(UNLOCK)) == 0
    before = client.asked(*LOCKING)
    for family in Family:
        client.tree.locks.release(client.find(b"f"), family, BIG)
    assert ask(client, Family.POSIX, lock(UNLOCK)) == 0
    assert client.asked(*LOCKING) == before > 0


@FAMILIES
def test_a_server_that_forgot_all_is_asked_again(
    client: Client, other: Client, server: Server, family: Family
) -> None:
    assert ask(client, family, lock(WRITE)) == 0
    assert ask(client, Family.POSIX, lock(READ, 5, 9), b"g") == 0
    assert ask(other, family, lock(WRITE)) == errno.EAGAIN
    server.forget()
    server.cut()
    client.await_lease()
    eventually(lambda: ask(other, family, lock(WRITE)) == errno.EAGAIN, "the lock is asked for again")
    assert ask(other, Family.POSIX, lock(WRITE, 0, 4), b"g") == 0
    assert ask(other, Family.POSIX, lock(WRITE, 9, 9), b"g") == errno.EAGAIN
    client.tree.locks.release(client.find(b"f"), family, BIG)
    assert ask(other, family, lock(WRITE)) == 0


@LOST
@FAMILIES
def test_what_somebody_else_has_got_meanwhile_is_lost(
    client: Client, other: Client, server: Server, family: Family
) -> None:
    node = client.find(b"f")
    assert ask(client, family, lock(WRITE)) == 0
    client.away = True
    server.forget()
    server.cut()
    eventually(lambda: errno_of(ask, other, family, lock(WRITE)) is None, "the other has the lock")
    client.tree.locks.require(node)
    client.away = False
    eventually(
        lambda: errno_of(client.tree.locks.require, node) == errno.EIO, "the loss of the lock is known"
    )
    assert ask(client, family, lock(READ)) == errno.EIO
    assert ask(client, family, lock(UNLOCK)) == 0
    client.tree.locks.release(node, family, BIG)
    client.tree.locks.require(node)
    assert ask(client, family, lock(READ)) == errno.EAGAIN


def test_a_request_whose_reply_is_lost_is_done_once(tree: RemoteFs, other: Client) -> None:
    node = tree.walk(ROOT, [b"public", b"f"]).node
    for mode, answer in ((WRITE, errno.EAGAIN), (UNLOCK, 0)):
        Cutting.cut_after = r.SetLock.NAME
        assert tree.locks.lock(node, Family.POSIX, lock(mode, 0, 0)) == 0
        assert ask(other, Family.POSIX, lock(READ, 0, 0)) == answer


@LOST
def test_a_request_of_which_nothing_is_heard_costs_its_owner_his_locks_of_the_file(
    tree: RemoteFs, other: Client, server: Server
) -> None:
    f, g = (tree.walk(ROOT, [b"public", name]).node for name in (b"f", b"g"))
    for node, owner in ((f, 1), (f, 2), (g, 1)):
        assert tree.locks.lock(node, Family.POSIX, lock(WRITE, owner, owner, owner)) == 0

    Cutting.then = staticmethod(lambda: setattr(server, "refusing", True))
    Cutting.cut_after = r.SetLock.NAME
    assert errno_of(tree.locks.lock, f, Family.POSIX, lock(WRITE, 5, 5, 1)) in (errno.EIO, errno.ETIMEDOUT)
    Cutting.then = staticmethod(lambda: None)
    server.refusing = False
    tree.statfs()  # what is posted goes with it
    assert [errno_of(tree.locks.require, node) for node in (f, g)] == [errno.EIO, None]
    assert tree.locks.lock(f, Family.POSIX, lock(READ, 7, 7, 1)) == errno.EIO
    locked = [ask(other, Family.POSIX, lock(READ, byte, byte)) == errno.EAGAIN for byte in (1, 2, 5)]
    assert locked == [False, True, False]
    assert ask(other, Family.POSIX, lock(READ, 1, 1), b"g") == errno.EAGAIN
    tree.locks.release(f, Family.POSIX, 1)
    tree.locks.require(f)


def test_a_request_that_was_given_up_is_not_done_later(client: Client, server: Server) -> None:
    with server.talk() as talk:
        file, epoch = talk.find(b"public", b"f"), talk.call(r.GetLockEpoch(0), r.LocksDropped).epoch
        inode = talk.call(p.GetAttributes(file), p.AttributesAre).attributes.inode
        assert talk.ask(r.SetLock(file, epoch, 1, False, 1, WRITE)) == r.LockSet(0)
        talk.post(r.ReleaseLocks(inode, 3, False, 1))
        assert talk.ask(r.SetLock(file, epoch, 2, False, 1, WRITE)) == r.LockSet(None)
        assert talk.ask(r.GetLock(file, 2, WRITE, 0, 9)) == r.LockIs(UNLOCK)
        assert talk.ask(r.SetLock(file, epoch + 1, 4, False, 1, WRITE)) == r.LocksDropped(epoch)
        assert talk.ask(r.SetLock(file, epoch, 4, False, 1, WRITE)) == r.LockSet(0)
        assert talk.ask(r.GetLock(4711, 1, WRITE, 0, 1)) == p.Error(errno.ESTALE)


def test_a_host_that_waits_for_another_to_reclaim_its_locks_keeps_its_lease(tmp_path: Path) -> None:
    """To find its files again after a restart of the server it waits for all hosts that may have written."""
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "f").touch()
    leases = open_leases(tmp_path / "leases")
    with caching_client.shared(tmp_path, 3.0, leases) as served:
        one, other = Client(served), Client(served)
        assert ask(one, Family.POSIX, lock(WRITE)) == 0
        one.away = other.away = True
        served.crash()
        one.away = False
        eventually(one.attended, "the client has a lease")
        manager = served.sessions.delegations
        assert manager.others_reclaim(DEVICE)  # the other's lease still lasts
        Doing(manager.await_locks, DEVICE).result()
        device = FileLocks(served.tree)
        node = served.tree.walk(ROOT, [b"public", b"f"]).node
        assert device.lock(node, Family.POSIX, lock(WRITE)) == errno.EAGAIN
        one.tree.locks.require(one.find(b"f"))
        for client in (one, other):
            client.close()
    os.close(leases)

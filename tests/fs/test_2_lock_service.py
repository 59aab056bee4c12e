# SPDX-License-Identifier: Apache-2.0
"""The file locks of a volume: the service that host and device share, and the device's end."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.base.errors import ProtocolError
from millpond.fs.coherence.delegation_table import DEVICE
from millpond.fs.coherence.device_client import DeviceDelegationBreaker
from millpond.fs.coherence.device_server import serve
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.filelocks.remote import RemoteLocks, own_locks
from millpond.fs.filelocks.service import LockService
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import ROOT, Node, WouldBlock
from millpond.fs.vfs.lock_types import OFFSET_MAX, Family
from millpond.fs.vfs.path_api import os_error
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

from ..waiting import eventually
from .caching_client import brisk
from .lock_clients import (
    BIG,
    FAMILIES,
    LOST,
    READ,
    UNLOCK,
    WRITE,
    Told,
    end_grace,
    lock,
    one,
    other,
    served,
    top,
)
from .support import SOON, Doing, Server, errno_of, listening

__all__ = ["one", "other", "served", "top"]

H, J = 1, 2


class Asked:
    """Asks a lock service as the device's mount does, and fails once with ``failure`` when it is asked for a
    request of a kind.
    """

    def __init__(self, service: LockService, kind: type[r.LockRequest], failure: Exception) -> None:
        self._service, self._kind, self._failure = service, kind, failure
        self.failing, self.seen = False, set[type[r.LockRequest]]()

    def __call__(self, node: Node | None, request: Callable[[int], r.LockRequest]) -> r.LockReply:
        asked = request(node or 0)
        self.seen.add(type(asked))
        if self.failing and isinstance(asked, self._kind):
            self.failing = False
            raise self._failure
        return self._service.perform(DEVICE, node or 0, asked)


@contextlib.contextmanager
def two_locks(service: LockService, ask: Asked) -> Iterator[tuple[RemoteLocks, int]]:
    """The device has locked two files, and a host waits for the first; the host's epoch."""
    with brisk(), contextlib.closing(RemoteLocks(ask)) as locks:
        for node in (1, 2):
            assert locks.lock(Node(node), Family.POSIX, lock(WRITE, owner=node), None) == 0
        epoch = epoch_of(service, H)
        wanted = r.SetLock(1, epoch, False, 9, WRITE, ticket=5)
        assert service.perform(H, 1, wanted) == r.LockSet(None)
        yield locks, epoch


@pytest.mark.parametrize("how", ["unlocks", "closes"])
def test_an_unlock_that_may_not_wait_changes_nothing(shared: LockService, how: str) -> None:
    """It is done by another thread, which may."""
    ask = Asked(shared, r.SetLock if how == "unlocks" else r.ReleaseLocks, WouldBlock())

    def unlock(locks: RemoteLocks) -> None:
        if how == "unlocks":
            assert locks.lock(Node(2), Family.POSIX, lock(UNLOCK, owner=2), None) == 0
        else:
            locks.release(Node(2), Family.POSIX, 2)

    with two_locks(shared, ask) as (locks, _):
        ask.failing = True
        with pytest.raises(WouldBlock):
            unlock(locks)
        assert shared.count(DEVICE) == 2
        unlock(locks)
        assert shared.count(DEVICE) == 1
        assert locks.lock(Node(2), Family.POSIX, lock(READ, owner=3), None) == 0
    assert not ask.seen & {r.DropLocks, r.DropFileLocks}


def test_a_lost_unlock_leaves_the_locks_of_other_files(shared: LockService) -> None:
    ask = Asked(shared, r.ReleaseLocks, OSError(errno.ETIMEDOUT, "no answer"))
    with two_locks(shared, ask) as (locks, epoch):
        assert locks.lock(Node(2), Family.POSIX, lock(WRITE, 0, 9, owner=3), None) == errno.EAGAIN
        ask.failing = True
        locks.release(Node(2), Family.POSIX, 2)
        eventually(lambda: shared.count(DEVICE) == 1, "the server has released the lock")
        assert shared.perform(H, 0, r.AwaitLocks(epoch, 0.0)) == r.LocksAnswered((), ())
        locks.require(Node(1))
        assert locks.lock(Node(2), Family.POSIX, lock(WRITE, 0, 9, owner=3), None) == 0
        locks.release(Node(1), Family.POSIX, 1)
        assert shared.perform(H, 0, r.AwaitLocks(epoch, SOON)) == r.LocksAnswered((5,), (0,))
    assert r.DropLocks not in ask.seen


def test_a_drop_whose_reply_is_lost_is_repeated(shared: LockService) -> None:
    """The epoch has changed, but the server has kept its locks of the other file, which differ, too."""
    ask = Asked(shared, r.DropFileLocks, OSError(errno.ETIMEDOUT, "no answer"))
    with two_locks(shared, ask) as (locks, epoch):
        shared.perform(DEVICE, 2, r.SetLock(2, locks._epoch, False, 77, READ, ticket=9))
        shared.perform(DEVICE, 3, r.DropFileLocks(3, locks._epoch))  # which was not told
        locks._mark_diverged(Node(2))
        eventually(
            lambda: len(list(shared._table.waiting())) == 1 and shared.count(DEVICE) == 2,
            "the file is repaired",
        )
        assert shared.perform(H, 0, r.AwaitLocks(epoch, 0.0)) == r.LocksAnswered((), ())


@LOST
def test_a_file_that_is_gone_takes_all_locks_with_it(shared: LockService) -> None:
    """A server that cannot be told which file it was drops all, which are asked for again."""
    ask = Asked(shared, r.OfFile, os_error(errno.ESTALE))
    with two_locks(shared, ask) as (locks, epoch):
        locks._mark_diverged(Node(2))
        ask.failing = True
        eventually(lambda: r.DropLocks in ask.seen, "all locks are dropped")
        assert shared.perform(H, 0, r.AwaitLocks(epoch, SOON)) == r.LocksAnswered((5,), (0,))
        eventually(lambda: errno_of(locks.require, Node(1)) == errno.EIO, "the lock is lost")
        assert shared.count(DEVICE) == 1


def test_a_file_whose_locks_are_dropped_ends_the_epoch_but_no_other_locks(shared: LockService) -> None:
    epoch = epoch_of(shared, H)
    for file in (7, 8):
        assert shared.perform(H, file, r.SetLock(file, epoch, False, 1, WRITE)) == r.LockSet(0)
    other = epoch_of(shared, J)
    assert shared.perform(J, 9, r.SetLock(9, other, False, 1, WRITE)) == r.LockSet(0)
    for file, ticket in ((7, 3), (8, 4)):
        assert shared.perform(J, file, r.SetLock(file, other, False, 1, WRITE, ticket=ticket)) == r.LockSet(
            None
        )
    waiting = r.SetLock(9, epoch, False, 2, WRITE, ticket=6)
    assert shared.perform(H, 9, waiting) == r.LockSet(None)
    begun = shared.perform(H, 7, r.DropFileLocks(7, epoch))
    assert isinstance(begun, r.LockEpochBegun) and begun.epoch != epoch
    assert shared.perform(J, 0, r.AwaitLocks(other, 0.0)) == r.LocksAnswered((3,), (0,))
    late = r.SetLock(8, epoch, False, 1, UNLOCK)  # was under way
    assert shared.perform(H, 8, late) == r.Regain(begun.epoch) and shared.count(H) == 1
    again = replace(waiting, epoch=begun.epoch)  # sent once more, since the epoch is another
    assert shared.perform(H, 9, again) == r.LockSet(None)
    shared.perform(J, 9, r.SetLock(9, other, False, 1, UNLOCK))
    assert shared.perform(H, 0, r.AwaitLocks(begun.epoch, 0.0)) == r.LocksAnswered((6,), (0,))


def test_requests_of_a_dropped_file_wait_no_longer(shared: LockService) -> None:
    epoch, other = epoch_of(shared, H), epoch_of(shared, J)
    assert shared.perform(J, 7, r.SetLock(7, other, False, 1, WRITE)) == r.LockSet(0)
    assert shared.perform(H, 7, r.SetLock(7, epoch, False, 1, WRITE, ticket=3)) == r.LockSet(None)
    begun = shared.perform(H, 7, r.DropFileLocks(7, epoch))
    assert isinstance(begun, r.LockEpochBegun)
    shared.perform(J, 7, r.SetLock(7, other, False, 1, UNLOCK))
    assert shared.count(H) == 0
    assert shared.perform(H, 0, r.AwaitLocks(begun.epoch, 0.0)) == r.LocksAnswered((), ())


def test_answers_about_a_dropped_file_are_dropped(shared: LockService) -> None:
    epoch, other = epoch_of(shared, H), epoch_of(shared, J)
    for file, ticket in ((7, 3), (8, 4)):
        shared.perform(J, file, r.SetLock(file, other, False, 1, WRITE))
        waiting = r.SetLock(file, epoch, False, 1, WRITE, ticket=ticket)
        assert shared.perform(H, file, waiting) == r.LockSet(None)
        shared.perform(J, file, r.SetLock(file, other, False, 1, UNLOCK))
    begun = shared.perform(H, 7, r.DropFileLocks(7, epoch))
    assert isinstance(begun, r.LockEpochBegun) and shared.count(H) == 1
    assert shared.perform(H, 0, r.AwaitLocks(begun.epoch, 0.0)) == r.LocksAnswered((4,), (0,))


def test_a_thread_of_the_device_that_must_not_wait_changes_no_lock(tmp_path: Path) -> None:
    """A request that it gave up would be performed later, perhaps after the next one."""
    manager = DelegationManager(30.0)
    with listening(tmp_path / "locks") as listener:
        threading.Thread(target=_accept, args=(listener, manager), daemon=True).start()
        with DeviceDelegationBreaker(tmp_path / "locks") as guard:
            epoch = epoch_of(manager.files, DEVICE)
            for request in (
                r.SetLock(7, epoch, False, 1, WRITE),
                r.ReleaseLocks(7, epoch, False, 1),
                r.CancelLock(epoch, 1),
            ):
                with pytest.raises(WouldBlock):
                    Doing(guard.call_file_locks, 7, request, may_wait=False).result()
            looking = Doing(guard.call_file_locks, 7, r.GetLock(7, 1, WRITE, 0, 9), may_wait=False)
            assert looking.result() == r.LockIs(UNLOCK) and manager.files.count(DEVICE) == 0
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def lapsed() -> set[int]:
    return set()


@pytest.fixture
def shared(lapsed: set[int]) -> LockService:
    return LockService(lambda holder: holder in lapsed)


def epoch_of(shared: LockService, holder: int) -> int:
    answer = shared.perform(holder, 0, r.AwaitLocks(0, 0.0))
    assert isinstance(answer, r.Regain)
    return answer.epoch


def test_nothing_is_done_in_an_era_that_has_ended(shared: LockService) -> None:
    epoch = epoch_of(shared, H)
    setting = r.SetLock(7, epoch, False, 1, WRITE)
    assert shared.perform(H, 7, setting) == r.LockSet(0) and shared.count(H) == 1
    assert shared.perform(H, 7, r.DropLocks(epoch)) == r.LockSet(0) and shared.count(H) == 0
    assert epoch_of(shared, H) != epoch
    for request in (setting, r.ReleaseLocks(7, epoch, False, 1), r.CancelLock(epoch, 1), r.DropLocks(epoch)):
        assert shared.perform(H, 7, request) == r.Regain(epoch_of(shared, H))
    assert shared.count(H) == 0


@FAMILIES
def test_who_has_lapsed_keeps_his_locks_until_somebody_wants_them(
    shared: LockService, lapsed: set[int], family: Family
) -> None:
    flock = family is Family.FLOCK
    epochs = {holder: epoch_of(shared, holder) for holder in (H, J)}
    shared.perform(H, 7, r.SetLock(7, epochs[H], flock, 1, WRITE))
    assert shared.perform(J, 7, r.SetLock(7, epochs[J], flock, 1, WRITE, ticket=3)) == r.LockSet(None)
    assert shared.perform(J, 0, r.AwaitLocks(epochs[J], 0.0)) == r.LocksAnswered((), ())
    waiting = Doing(shared.perform, J, 0, r.AwaitLocks(epochs[J], SOON))
    lapsed.add(H)
    assert waiting.result() == r.LocksAnswered((3,), (0,))
    assert epoch_of(shared, H) != epochs[H] and (shared.count(H), shared.count(J)) == (0, 1)
    assert shared.perform(H, 7, r.GetLock(7, 1, WRITE, 0, 9)) == r.LockIs(
        *((UNLOCK,) if flock else (WRITE, 0, OFFSET_MAX, 0))
    )


@pytest.mark.parametrize(
    "request_",
    [
        r.SetLock(7, 0, False, 1, 3),
        r.SetLock(7, 0, False, -1, WRITE),
        r.SetLock(7, 0, False, 1 << 64, WRITE),
        r.SetLock(7, 0, False, 1, WRITE, 5, 4),
        r.SetLock(7, 0, False, 1, WRITE, 0, 1 << 63),
        r.SetLock(7, 0, False, 1, WRITE, -1, 4),
        r.SetLock(7, 0, False, 1, WRITE, pid=-1),
        r.GetLock(7, 1, UNLOCK, 0, 1),
    ],
)
def test_what_no_kernel_asks_is_refused(shared: LockService, request_: r.LockRequest) -> None:
    if isinstance(request_, r.SetLock):
        values = {name: getattr(request_, name) for name in r.SetLock.__slots__} | {"file": 7}
        request_ = r.SetLock(**values | {"epoch": epoch_of(shared, H)})
    assert errno_of(shared.perform, H, 7, request_) == errno.EINVAL
    assert shared.count(H) == 0


def test_what_is_no_request(shared: LockService) -> None:
    class Odd(r.LockRequest):
        NAME = "odd"

    with pytest.raises(ProtocolError):
        shared.perform(H, 7, Odd())


def test_a_client_locks_only_what_it_knows(served: Server) -> None:
    with served.talk() as talk:
        request: Message = r.GetLock(4711, 1, WRITE, 0, 1)
        assert getattr(talk.ask(request), "errno", None) == errno.ESTALE


def test_a_table_of_its_own(top: Path) -> None:
    locks = own_locks()
    told, late = Told(), Told(6)
    assert locks.lock(Node(3), Family.POSIX, lock(WRITE), None) == 0
    assert locks.first_conflict(Node(3), lock(READ, owner=1))
    assert not locks.first_conflict(Node(2), lock(READ, owner=1))
    assert locks.lock(Node(3), Family.POSIX, lock(READ, owner=1), told.waiting) is None
    assert locks.lock(Node(3), Family.POSIX, lock(READ, owner=1), late.waiting) is None
    locks.cancel(5)
    assert told.error == errno.EINTR and late.error is None
    locks.require(Node(3))
    locks.release(Node(3), Family.POSIX, BIG)
    assert late.answer() == 0
    assert locks.first_conflict(Node(3), lock(WRITE, owner=2))
    locks.close()


def test_a_device_without_a_server_has_its_own_which_the_server_then_learns(tmp_path: Path) -> None:
    guard = DeviceDelegationBreaker(tmp_path / "locks", lease=0.5)
    locks = RemoteLocks(lambda node, request: guard.call_file_locks(node or 0, request(node or 0)))
    told = Told()
    assert locks.lock(ROOT, Family.POSIX, lock(WRITE, 0, 0), None) == 0
    assert locks.lock(ROOT, Family.POSIX, lock(WRITE, 0, 0, owner=1), None) == errno.EAGAIN
    assert locks.lock(ROOT, Family.POSIX, lock(WRITE, 0, 0, owner=2), told.waiting) is None
    manager = DelegationManager(30.0)
    with brisk(), listening(tmp_path / "locks") as listener:
        threading.Thread(target=_accept, args=(listener, manager), daemon=True).start()
        with guard:
            eventually(lambda: manager.files.count(DEVICE) == 1, "the server knows the device's lock")
            assert told.error is None
            locks.release(ROOT, Family.POSIX, BIG)
            end_grace(locks)
            assert told.answer() == 0
            eventually(lambda: manager.files.count(DEVICE) == 1, "the lock went to the device's other owner")
            locks.close()
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, manager: DelegationManager) -> None:
    with contextlib.suppress(OSError):
        while True:
            channel = Channel(listener.accept()[0], "the mount")
            threading.Thread(target=serve, args=(channel, manager), daemon=True).start()

# SPDX-License-Identifier: Apache-2.0
"""The file locks of a volume: two clients of one server, and the lock table."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.base.errors import ProtocolError
from millpond.fs.coherence.delegation_table import DEVICE
from millpond.fs.coherence.device_client import DeviceDelegationBreaker
from millpond.fs.coherence.device_server import serve
from millpond.fs.coherence.lease_file import LEASE_SECONDS
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.filelocks.local import LocalLocks, RoutedLocks
from millpond.fs.filelocks.remote import RemoteLocks
from millpond.fs.filelocks.service import LockService
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import ROOT, Locking, Node, Waiting
from millpond.fs.vfs.lock_types import OFFSET_MAX, Family, Lock, LockOwner, Mode
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

from ..waiting import eventually
from . import caching_client
from .caching_client import Client, brisk
from .support import SOON, Doing, Server, errno_of, listening

WRITE, READ, UNLOCK = Mode.WRITE, Mode.READ, Mode.UNLOCK
FAMILIES = pytest.mark.parametrize("family", Family)
LOST = pytest.mark.expected_log("a file lock was lost")
BIG = (1 << 64) - 1
"""An owner's number, as kernels have them."""


def lock(mode: Mode, start: int = 0, end: int = OFFSET_MAX, owner: int = BIG) -> Lock:
    return Lock(LockOwner(0, owner), mode, start, end, 77)


class Told:
    """A request that waits."""

    def __init__(self, ticket: int = 5) -> None:
        self.error: int | None = None
        self._event = threading.Event()
        self.waiting = Waiting(ticket, self._tell)

    def _tell(self, error: int) -> None:
        assert not self._event.is_set()
        self.error = error
        self._event.set()

    def answer(self) -> int | None:
        assert self._event.wait(4 * SOON)
        return self.error


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "f").write_bytes(bytes(100))
    return tmp_path


@pytest.fixture
def served(top: Path) -> Iterator[Server]:
    with caching_client.shared(top, LEASE_SECONDS) as made:
        yield made


@pytest.fixture
def one(served: Server) -> Iterator[Client]:
    made = Client(served)
    yield made
    made.close()


@pytest.fixture
def other(served: Server) -> Iterator[Client]:
    made = Client(served)
    yield made
    made.close()


def ask(client: Client, family: Family, wanted: Lock, told: Told | None = None) -> int | None:
    return client.tree.locks.lock(client.find(b"f"), family, wanted, told.waiting if told else None)


@FAMILIES
def test_one_excludes_the_other(one: Client, other: Client, family: Family) -> None:
    assert ask(one, family, lock(WRITE)) == 0
    assert ask(other, family, lock(WRITE)) == errno.EAGAIN
    assert ask(other, family, lock(UNLOCK)) == 0  # of which nobody hears
    assert ask(one, family, lock(READ)) == 0
    assert ask(other, family, lock(READ)) == 0
    assert ask(one, family, lock(WRITE)) == errno.EAGAIN
    other.tree.locks.release(other.find(b"f"), family, BIG)
    assert ask(one, family, lock(WRITE)) == 0
    assert ask(one, family, lock(UNLOCK)) == 0
    assert ask(other, family, lock(WRITE)) == 0


@LOST
@FAMILIES
@pytest.mark.parametrize("how", ["unlocks", "closes", "leaves", "is gone"])
def test_who_waits_gets_it(one: Client, other: Client, family: Family, how: str) -> None:
    assert ask(one, family, lock(WRITE)) == 0
    told = Told()
    assert ask(other, family, lock(WRITE), told) is None
    assert told.error is None
    if how == "unlocks":
        assert ask(one, family, lock(UNLOCK)) == 0
    elif how == "closes":
        one.tree.locks.release(one.find(b"f"), family, BIG)
    elif how == "leaves":
        one.tree.close()
    else:
        one.recalls.stop()
    assert told.answer() == 0
    if how in ("unlocks", "closes"):
        assert ask(one, family, lock(WRITE)) == errno.EAGAIN


@FAMILIES
def test_who_gives_up_waits_no_longer(one: Client, other: Client, family: Family) -> None:
    assert ask(one, family, lock(WRITE)) == 0
    told, more = Told(), Told(6)
    assert ask(other, family, lock(WRITE), told) is None
    assert ask(other, family, lock(WRITE, owner=3), more) is None
    other.tree.locks.cancel(5)
    other.tree.locks.cancel(5)
    assert told.answer() == errno.EINTR
    one.tree.locks.release(one.find(b"f"), family, BIG)
    assert more.answer() == 0
    other.tree.locks.cancel(6)
    assert more.error == 0
    assert ask(one, family, lock(WRITE)) == errno.EAGAIN


def test_what_is_in_the_way(one: Client, other: Client) -> None:
    assert ask(one, Family.POSIX, lock(WRITE, 10, 19)) == 0
    mine, others = (
        each.tree.locks.first_conflict(each.find(b"f"), lock(READ, owner=1)) for each in (one, other)
    )
    assert mine and others
    assert (others.mode, others.start, others.end, others.pid) == (WRITE, 10, 19, 0)
    assert mine.pid == 77
    assert one.tree.locks.first_conflict(one.find(b"f"), lock(WRITE)) is None  # its own
    assert errno_of(one.tree.locks.first_conflict, one.find(b"f"), lock(UNLOCK)) == errno.EINVAL


def test_a_deadlock_is_found(one: Client, other: Client) -> None:
    assert ask(one, Family.POSIX, lock(WRITE, 0, 0)) == 0
    assert ask(other, Family.POSIX, lock(WRITE, 1, 1)) == 0
    told, never = Told(), Told()
    assert ask(one, Family.POSIX, lock(WRITE, 1, 1), told) is None
    assert ask(other, Family.POSIX, lock(WRITE, 0, 0), never) == errno.EDEADLK
    other.tree.locks.release(other.find(b"f"), Family.POSIX, BIG)
    assert told.answer() == 0 and never.error is None


def test_a_close_asks_nobody_if_there_is_nothing_to_unlock(one: Client, served: Server) -> None:
    node = one.find(b"f")
    assert ask(one, Family.POSIX, lock(WRITE)) == 0
    assert ask(one, Family.POSIX, lock(UNLOCK)) == 0
    asked: list[r.LockRequest] = []

    def note(_node: Node | None, request: Callable[[int], r.LockRequest]) -> r.LockReply:
        asked.append(request(0))
        return r.LocksAnswered((), ())

    one.tree.locks._ask = note
    for family in Family:
        one.tree.locks.release(node, family, BIG)
    assert one.tree.locks.lock(node, Family.POSIX, lock(UNLOCK), None) == 0
    assert not [request for request in asked if not isinstance(request, r.AwaitLocks)]


@FAMILIES
def test_a_server_that_forgot_all_is_asked_again(
    one: Client, other: Client, served: Server, family: Family
) -> None:
    assert ask(one, family, lock(WRITE)) == 0
    assert ask(other, family, lock(WRITE)) == errno.EAGAIN
    told = Told()
    assert ask(other, family, lock(WRITE), told) is None
    served.forget()
    served.cut()
    one.await_lease()
    eventually(lambda: len(_ranges(served)) == 1, "the lock is asked for again")
    assert told.error is None
    one.tree.locks.release(one.find(b"f"), family, BIG)
    end_grace(other.tree.locks)
    assert told.answer() == 0


def end_grace(locks: Locking) -> None:
    """Have it ask for what is new in an instant, while it lets others ask again for what they had."""
    assert isinstance(locks, RemoteLocks)
    eventually(lambda: locks._grace_end > time.monotonic() + 1, "it lets others ask first")
    locks._grace_end = time.monotonic() + 0.2


def _ranges(served: Server) -> list[tuple[int, int]]:
    """The start and the end of each lock that the server knows of."""
    return [(each.start, each.end) for _, _, each in served.sessions.delegations.files._table.locks()]


@LOST
@FAMILIES
def test_what_somebody_else_has_got_meanwhile_is_lost(
    one: Client, other: Client, served: Server, family: Family
) -> None:
    node = one.find(b"f")
    assert ask(one, family, lock(WRITE)) == 0
    one.recalls.stop()  # as if it were gone
    assert ask(other, family, lock(WRITE)) == 0
    eventually(lambda: errno_of(one.tree.locks.require, node) == errno.EIO, "the loss of the lock is known")
    assert one.tree.locks.lock(node, family, lock(READ), None) == errno.EIO
    assert one.tree.locks.lock(node, family, lock(UNLOCK), None) == 0
    one.tree.locks.release(node, family, BIG)
    one.tree.locks.require(node)
    end_grace(one.tree.locks)
    assert Doing(one.tree.locks.lock, node, family, lock(READ), None).result() == errno.EAGAIN


def test_a_request_that_nobody_answers_fails_and_leaves_nothing(one: Client, served: Server) -> None:
    node = one.find(b"f")
    assert one.tree.locks.lock(node, Family.POSIX, lock(WRITE, 0, 0), None) == 0
    ask = one.tree.locks._ask

    def lost(*question: Any) -> r.LockReply:
        ask(*question)
        raise OSError(errno.EIO, "the reply was lost")

    one.tree.locks._ask = lost
    assert errno_of(one.tree.locks.lock, node, Family.POSIX, lock(WRITE, 5, 9), None) == errno.EIO
    one.tree.locks._ask = ask
    eventually(lambda: _ranges(served) == [(0, 0)], "the server has the lock of before alone")


H, J = 1, 2


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


def test_files_of_ones_own(top: Path) -> None:
    own, shared = LocalLocks(), LocalLocks()
    locks: Locking = RoutedLocks(lambda node: node == 2, shared, own)
    for node in (Node(2), Node(3)):
        told, late = Told(), Told(6)
        assert locks.lock(node, Family.POSIX, lock(WRITE), None) == 0
        assert (own if node == 3 else shared).first_conflict(node, lock(READ, owner=1))
        assert not (own if node == 2 else shared).first_conflict(node, lock(READ, owner=1))
        assert locks.first_conflict(node, lock(READ, owner=1))
        assert locks.lock(node, Family.POSIX, lock(READ, owner=1), told.waiting) is None
        assert locks.lock(node, Family.POSIX, lock(READ, owner=1), late.waiting) is None
        locks.cancel(5)
        assert told.error == errno.EINTR and late.error is None
        locks.require(node)
        locks.release(node, Family.POSIX, BIG)
        assert late.error == 0


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

# SPDX-License-Identifier: Apache-2.0
"""The file locks of a volume: two clients of one server."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.lock_types import Family

from ..waiting import eventually
from .caching_client import Client
from .lock_clients import (
    BIG,
    FAMILIES,
    LOST,
    READ,
    UNLOCK,
    WRITE,
    Told,
    ask,
    end_grace,
    lock,
    one,
    other,
    served,
    top,
)
from .support import Doing, Server, errno_of

__all__ = ["one", "other", "served", "top"]


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

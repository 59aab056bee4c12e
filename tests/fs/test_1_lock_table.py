# SPDX-License-Identifier: Apache-2.0
"""The table of file locks, rule by rule."""

from __future__ import annotations

import errno

import pytest

from millpond.fs.filelocks.table import LockAnswer, LockOutcome, LockTable, replaced
from millpond.fs.vfs.lock_types import OFFSET_MAX, Family, Lock, LockOwner, Mode

from .support import errno_of

HOST, DEVICE = 1, 0
A, B, C = LockOwner(HOST, 10), LockOwner(DEVICE, 10), LockOwner(DEVICE, 1 << 63)
POSIX, FLOCK = Family.POSIX, Family.FLOCK
READ, WRITE, UNLOCK = Mode
DONE, WAITS, BLOCKED = LockOutcome(0), LockOutcome(None), LockOutcome(errno.EAGAIN)
FILE, OTHER = 7, 8


@pytest.fixture
def table() -> LockTable:
    return LockTable()


def ranges(table: LockTable, owner: LockOwner, family: Family = POSIX) -> list[tuple[Mode, int, int]]:
    return [
        (lock.mode, lock.start, lock.end)
        for inode, of, lock in table.locks()
        if (inode, of, lock.owner) == (FILE, family, owner)
    ]


def test_readers_share_and_writers_do_not(table: LockTable) -> None:
    assert table.setlk(FILE, POSIX, Lock(A, READ, 0, 9)) == DONE
    assert table.setlk(FILE, POSIX, Lock(B, READ, 5, 14)) == DONE
    assert table.setlk(FILE, POSIX, Lock(C, WRITE, 9, 9)) == BLOCKED
    assert table.setlk(FILE, POSIX, Lock(A, WRITE, 0, 5)) == BLOCKED
    assert table.setlk(FILE, POSIX, Lock(A, WRITE, 0, 4)) == DONE
    assert table.setlk(FILE, POSIX, Lock(C, READ, 4, 4)) == BLOCKED
    assert table.setlk(FILE, POSIX, Lock(C, WRITE, 15)) == DONE
    assert table.setlk(OTHER, POSIX, Lock(C, WRITE)) == DONE
    assert ranges(table, A) == [(WRITE, 0, 4), (READ, 5, 9)]


def test_owners_with_one_number_on_both_sides_are_two(table: LockTable) -> None:
    assert table.setlk(FILE, POSIX, Lock(A, WRITE)) == DONE
    assert table.setlk(FILE, POSIX, Lock(B, WRITE)) == BLOCKED


@pytest.mark.parametrize(
    ("new", "after"),
    [
        (Lock(A, READ, 12, 17), [(READ, 10, 19), (READ, 30, 39)]),
        (Lock(A, READ, 20, 29), [(READ, 10, 39)]),
        (Lock(A, READ, 21, 29), [(READ, 10, 19), (READ, 21, 39)]),
        (Lock(A, READ, 0, 8), [(READ, 0, 8), (READ, 10, 19), (READ, 30, 39)]),
        (Lock(A, READ, 0, 9), [(READ, 0, 19), (READ, 30, 39)]),
        (Lock(A, READ), [(READ, 0, OFFSET_MAX)]),
        (Lock(A, WRITE, 12, 17), [(READ, 10, 11), (WRITE, 12, 17), (READ, 18, 19), (READ, 30, 39)]),
        (Lock(A, WRITE, 10, 19), [(WRITE, 10, 19), (READ, 30, 39)]),
        (Lock(A, WRITE, 15, 34), [(READ, 10, 14), (WRITE, 15, 34), (READ, 35, 39)]),
        (Lock(A, WRITE, 20, 29), [(READ, 10, 19), (WRITE, 20, 29), (READ, 30, 39)]),
        (Lock(A, UNLOCK, 12, 17), [(READ, 10, 11), (READ, 18, 19), (READ, 30, 39)]),
        (Lock(A, UNLOCK, 15, 34), [(READ, 10, 14), (READ, 35, 39)]),
        (Lock(A, UNLOCK, 19), [(READ, 10, 18)]),
        (Lock(A, UNLOCK, 20, 29), [(READ, 10, 19), (READ, 30, 39)]),
        (Lock(A, UNLOCK), []),
    ],
)
def test_split_and_merged(new: Lock, after: list[tuple[Mode, int, int]]) -> None:
    before = [Lock(A, READ, 10, 19), Lock(A, READ, 30, 39)]
    assert [(lock.mode, lock.start, lock.end) for lock in replaced(before, new)] == after


def test_merging_by_a_change_of_mode() -> None:
    before = [Lock(A, READ, 0, 4), Lock(A, WRITE, 5, 9), Lock(A, READ, 10)]
    assert replaced(before, Lock(A, READ, 5, 9)) == [Lock(A, READ)]


def test_bytes_that_no_file_has() -> None:
    for start, end in ((-1, 5), (5, 4), (0, OFFSET_MAX + 1)):
        assert errno_of(Lock, A, READ, start, end) == errno.EINVAL
    assert Lock(A, READ, OFFSET_MAX, OFFSET_MAX).start == OFFSET_MAX


def test_getlk_tells_what_is_in_the_way(table: LockTable) -> None:
    held = Lock(A, READ, 10, 19, pid=42)
    table.setlk(FILE, POSIX, held)
    assert table.getlk(FILE, Lock(B, WRITE)) == held
    assert table.getlk(FILE, Lock(B, READ)) is None
    assert table.getlk(FILE, Lock(B, WRITE, 20)) is None
    assert table.getlk(FILE, Lock(A, WRITE)) is None
    assert table.getlk(OTHER, Lock(B, WRITE)) is None
    assert errno_of(table.getlk, FILE, Lock(B, UNLOCK)) == errno.EINVAL


def test_getlk_tells_of_the_owner_who_has_had_locks_longest(table: LockTable) -> None:
    for owner, byte in ((A, 4), (B, 2), (A, 0)):
        table.setlk(FILE, POSIX, Lock(owner, READ, byte, byte))
    assert table.getlk(FILE, Lock(C, WRITE)) == Lock(A, READ, 0, 0)
    table.setlk(FILE, POSIX, Lock(A, UNLOCK))
    table.setlk(FILE, POSIX, Lock(A, READ, 0, 0))
    assert table.getlk(FILE, Lock(C, WRITE)) == Lock(B, READ, 2, 2)


def test_waiters_are_let_through_in_order(table: LockTable) -> None:
    table.setlk(FILE, POSIX, Lock(A, WRITE, 0, 9))
    assert table.setlk(FILE, POSIX, Lock(B, WRITE, 0, 4), 1) == WAITS
    assert table.setlk(FILE, POSIX, Lock(C, READ, 0, 0), 2) == WAITS
    assert table.setlk(FILE, POSIX, Lock(C, READ, 5, 5), 3) == WAITS
    assert [lock.owner for _, _, lock in table.waiting()] == [B, C, C]
    assert table.setlk(FILE, POSIX, Lock(A, UNLOCK, 1, 9)) == LockOutcome(0, (LockAnswer(DEVICE, 3, 0),))
    assert table.setlk(FILE, POSIX, Lock(A, UNLOCK)) == LockOutcome(0, (LockAnswer(DEVICE, 1, 0),))
    assert table.release(FILE, POSIX, B) == (LockAnswer(DEVICE, 2, 0),)
    assert ranges(table, C) == [(READ, 0, 0), (READ, 5, 5)]


def test_readers_behind_a_waiting_writer_need_not_wait(table: LockTable) -> None:
    table.setlk(FILE, POSIX, Lock(A, READ))
    assert table.setlk(FILE, POSIX, Lock(B, WRITE), 1) == WAITS
    assert table.setlk(FILE, POSIX, Lock(C, READ)) == DONE


def test_a_downgrade_lets_readers_through(table: LockTable) -> None:
    table.setlk(FILE, POSIX, Lock(A, WRITE))
    table.setlk(FILE, POSIX, Lock(B, READ, 0, 4), 1)
    table.setlk(FILE, POSIX, Lock(C, WRITE, 5, 9), 2)
    assert table.setlk(FILE, POSIX, Lock(A, READ)) == LockOutcome(0, (LockAnswer(DEVICE, 1, 0),))


def test_who_comes_through_with_a_weaker_lock_lets_others_through(table: LockTable) -> None:
    table.setlk(FILE, POSIX, Lock(A, WRITE, 0, 0))
    table.setlk(FILE, POSIX, Lock(B, WRITE, 1, 1))
    assert table.setlk(FILE, POSIX, Lock(C, READ, 1, 1), 1) == WAITS
    assert table.setlk(FILE, POSIX, Lock(B, READ, 0, 1), 2) == WAITS
    freed = table.setlk(FILE, POSIX, Lock(A, UNLOCK))
    assert freed == LockOutcome(0, (LockAnswer(DEVICE, 2, 0), LockAnswer(DEVICE, 1, 0)))


def test_locks_stay_while_their_owner_waits_for_a_stronger_one(table: LockTable) -> None:
    table.setlk(FILE, POSIX, Lock(A, READ))
    table.setlk(FILE, POSIX, Lock(B, READ))
    assert table.setlk(FILE, POSIX, Lock(A, WRITE), 1) == WAITS
    assert ranges(table, A) == [(READ, 0, OFFSET_MAX)]
    assert table.setlk(FILE, POSIX, Lock(B, WRITE), 1) == LockOutcome(errno.EDEADLK)
    assert table.release(FILE, POSIX, B) == (LockAnswer(HOST, 1, 0),)
    assert ranges(table, A) == [(WRITE, 0, OFFSET_MAX)]


def test_a_deadlock_of_three_over_two_files(table: LockTable) -> None:
    table.setlk(FILE, POSIX, Lock(A, WRITE, 0, 0))
    table.setlk(FILE, POSIX, Lock(B, WRITE, 1, 1))
    table.setlk(OTHER, POSIX, Lock(C, WRITE))
    assert table.setlk(FILE, POSIX, Lock(A, WRITE, 1, 1), 1) == WAITS
    assert table.setlk(OTHER, POSIX, Lock(B, READ), 1) == WAITS
    assert table.setlk(FILE, POSIX, Lock(C, READ, 0, 0), 2) == LockOutcome(errno.EDEADLK)
    assert table.setlk(FILE, POSIX, Lock(C, READ, 0, 0)) == BLOCKED
    assert table.cancel(HOST, 1)
    assert table.setlk(FILE, POSIX, Lock(C, READ, 0, 0), 2) == WAITS


def test_flock_knows_no_deadlocks(table: LockTable) -> None:
    for file, owner in ((FILE, A), (OTHER, B)):
        table.setlk(file, FLOCK, Lock(owner, WRITE))
    assert table.setlk(OTHER, FLOCK, Lock(A, WRITE), 1) == WAITS
    assert table.setlk(FILE, FLOCK, Lock(B, WRITE), 1) == WAITS


def test_a_request_is_given_up(table: LockTable) -> None:
    table.setlk(FILE, POSIX, Lock(A, WRITE))
    table.setlk(FILE, POSIX, Lock(B, WRITE), 5)
    assert table.setlk(FILE, POSIX, Lock(C, WRITE), 5) == LockOutcome(errno.EINVAL)
    assert not table.cancel(HOST, 5)
    assert table.cancel(DEVICE, 5)
    assert not table.cancel(DEVICE, 5)
    assert table.release(FILE, POSIX, A) == ()
    assert table.setlk(FILE, POSIX, Lock(C, WRITE), 5) == DONE


def test_a_close_unlocks_one_file_and_one_family(table: LockTable) -> None:
    for file in (FILE, OTHER):
        for family in Family:
            table.setlk(file, family, Lock(A, WRITE))
    table.setlk(FILE, POSIX, Lock(B, READ), 1)
    table.setlk(FILE, FLOCK, Lock(B, READ), 2)
    assert table.release(FILE, POSIX, A) == (LockAnswer(DEVICE, 1, 0),)
    assert table.release(FILE, FLOCK, A) == (LockAnswer(DEVICE, 2, 0),)
    assert {(inode, lock.owner) for inode, _, lock in table.locks()} == {(FILE, B), (OTHER, A)}
    assert table.release(FILE, POSIX, A) == ()


def test_a_holder_ends(table: LockTable) -> None:
    other = LockOwner(HOST, 11)
    table.setlk(FILE, POSIX, Lock(A, WRITE, 0, 4))
    table.setlk(FILE, POSIX, Lock(other, WRITE, 5))
    table.setlk(OTHER, FLOCK, Lock(other, READ))
    table.setlk(FILE, POSIX, Lock(B, WRITE), 1)
    table.setlk(OTHER, FLOCK, Lock(C, WRITE), 2)
    table.setlk(FILE, POSIX, Lock(A, WRITE), 3)
    assert set(table.end(HOST)) == {
        LockAnswer(HOST, 3, errno.EIO),
        LockAnswer(DEVICE, 1, 0),
        LockAnswer(DEVICE, 2, 0),
    }
    assert {lock.owner for _, _, lock in table.locks()} == {B, C}
    assert table.end(HOST) == ()


def test_the_families_do_not_see_each_other(table: LockTable) -> None:
    assert table.setlk(FILE, POSIX, Lock(A, WRITE)) == DONE
    assert table.setlk(FILE, FLOCK, Lock(B, WRITE)) == DONE
    assert table.getlk(FILE, Lock(B, WRITE)) == Lock(A, WRITE)
    assert table.getlk(FILE, Lock(A, WRITE)) is None


def test_flock_is_of_the_whole_file(table: LockTable) -> None:
    assert table.setlk(FILE, FLOCK, Lock(A, READ, 5, 5)) == DONE
    assert ranges(table, A, FLOCK) == [(READ, 0, OFFSET_MAX)]
    assert table.setlk(FILE, FLOCK, Lock(B, WRITE, 6, 6)) == BLOCKED
    assert table.setlk(FILE, FLOCK, Lock(A, UNLOCK, 9, 9)) == DONE
    assert table.setlk(FILE, FLOCK, Lock(B, WRITE)) == DONE


def test_a_change_of_flock_gives_the_old_lock_up_first(table: LockTable) -> None:
    for owner in (A, B):
        table.setlk(FILE, FLOCK, Lock(owner, READ))
    assert table.setlk(FILE, FLOCK, Lock(A, READ)) == DONE
    assert table.setlk(FILE, FLOCK, Lock(A, WRITE)) == BLOCKED
    assert ranges(table, A, FLOCK) == []
    assert table.setlk(FILE, FLOCK, Lock(B, WRITE)) == DONE


def test_two_who_wait_for_a_stronger_flock_do_not_block_each_other(table: LockTable) -> None:
    for owner in (A, B):
        table.setlk(FILE, FLOCK, Lock(owner, READ))
    assert table.setlk(FILE, FLOCK, Lock(A, WRITE), 1) == WAITS
    assert table.setlk(FILE, FLOCK, Lock(B, WRITE), 1) == DONE
    assert table.setlk(FILE, FLOCK, Lock(B, READ)) == DONE
    assert table.release(FILE, FLOCK, B) == (LockAnswer(HOST, 1, 0),)


def test_a_holder_has_so_many_locks() -> None:
    table = LockTable(most_locks=3)
    assert table.setlk(FILE, POSIX, Lock(A, READ, 0, 9)) == DONE
    assert table.setlk(OTHER, FLOCK, Lock(A, READ)) == DONE
    assert table.setlk(FILE, POSIX, Lock(A, WRITE, 5, 5)) == LockOutcome(errno.ENOLCK)
    assert table.setlk(FILE, POSIX, Lock(A, UNLOCK, 5, 5)) == DONE
    assert table.setlk(FILE, POSIX, Lock(A, UNLOCK, 3, 3)) == LockOutcome(errno.ENOLCK)
    assert ranges(table, A) == [(READ, 0, 4), (READ, 6, 9)]
    assert table.setlk(FILE, POSIX, Lock(B, READ, 5, 5)) == DONE
    assert table.setlk(FILE, POSIX, Lock(A, UNLOCK)) == DONE
    assert table.setlk(FILE, POSIX, Lock(A, WRITE, 50, 50)) == DONE


def test_who_has_too_many_locks_when_he_is_let_through() -> None:
    table = LockTable(most_locks=1)
    table.setlk(FILE, POSIX, Lock(A, WRITE))
    assert table.setlk(FILE, POSIX, Lock(B, WRITE), 1) == WAITS
    assert table.setlk(OTHER, POSIX, Lock(B, WRITE)) == DONE
    assert table.release(FILE, POSIX, A) == (LockAnswer(DEVICE, 1, errno.ENOLCK),)
    assert ranges(table, B) == []


def test_a_holder_has_so_many_waiting() -> None:
    table = LockTable(most_waiters=2)
    table.setlk(FILE, POSIX, Lock(A, WRITE))
    assert [table.setlk(FILE, POSIX, Lock(owner, READ), t).error for t, owner in enumerate((B, C, B))] == [
        None,
        None,
        errno.ENOLCK,
    ]
    assert table.setlk(FILE, POSIX, Lock(LockOwner(HOST, 11), READ), 1) == WAITS
    assert table.cancel(DEVICE, 0)
    assert table.setlk(FILE, POSIX, Lock(B, READ), 9) == WAITS

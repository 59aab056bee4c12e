# SPDX-License-Identifier: Apache-2.0
"""Exclusive directory delegations in the table and the manager: their holders, and the clients that wait."""

from __future__ import annotations

import errno
import os

import pytest

from millpond.fs.coherence.delegation_table import DEVICE, DelegationTable, Holder, Inode, WriteIntent
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.coherence.shared_bitmap import SharedBitmap, SharedBitmapView
from millpond.fs.vfs.inode_api import WouldBlock

from .support import Doing, errno_of, lasts

ONE, OTHER = Holder(1), Holder(2)
D, E = Inode(10), Inode(11)


@pytest.fixture
def shown() -> SharedBitmap:
    return SharedBitmap()


@pytest.fixture
def marks(shown: SharedBitmap) -> SharedBitmapView:
    return SharedBitmapView(os.dup(shown.descriptor()))


@pytest.fixture
def table(shown: SharedBitmap) -> DelegationTable:
    return DelegationTable(shown, SharedBitmap())


def test_what_nobody_else_keeps_is_granted_exclusively(
    table: DelegationTable, marks: SharedBitmapView
) -> None:
    table.grant_read(ONE, D)
    assert (
        table.grant_exclusive(ONE, D) == 2
        and table.holds_exclusive(ONE, D, 2)
        and not table.holds_exclusive(ONE, D, 1)
    )
    assert marks.has(D) and not marks.has(E)
    assert table.exclusive_holder(OTHER, D) == ONE and table.exclusive_holder(ONE, D) is None
    assert table.grant_read(OTHER, D) == 0 == table.grant_exclusive(OTHER, D)
    assert table.grant_read(ONE, D) == 3 and table.holds_exclusive(ONE, D, 2)
    table.return_delegation(ONE, D, 3)
    assert not table.holds_exclusive(ONE, D, 2) and not marks.has(D) and table.grant_read(OTHER, D)


def test_what_others_keep_or_change_is_not(table: DelegationTable) -> None:
    table.grant_read(OTHER, D)
    assert table.grant_exclusive(ONE, D) == 0
    change = WriteIntent(DEVICE)
    assert table.begin(change, E, alone=True)
    assert table.grant_exclusive(ONE, E) == 0
    table.end(change)
    assert table.grant_exclusive(ONE, E)
    assert table.begin(change, E, alone=True) and table.conflicts(change) == {ONE: {E}}
    table.end(change)
    table.leave(ONE)


def test_whose_lease_ends_has_nothing_exclusively(table: DelegationTable, marks: SharedBitmapView) -> None:
    number = table.grant_exclusive(ONE, D)
    table.expire(ONE)
    assert not marks.has(D) and not table.holds_exclusive(ONE, D, number) and table.exclusive_count == 0
    assert table.grant_exclusive(ONE, D) > number  # a late word by the earlier grant does not count


def test_names_that_are_being_told_hold_up_others(table: DelegationTable) -> None:
    table.grant_exclusive(ONE, D)
    table.begin_flush([D])
    assert (
        not table.is_flushing(ONE, [D])
        and table.is_flushing(OTHER, [D, E])
        and not table.is_flushing(OTHER, [E])
    )
    table.expire(ONE)
    assert table.is_flushing(OTHER, [D]) and table.grant_exclusive(OTHER, D) == 0
    table.end_flush([D])
    assert not table.is_flushing(OTHER, [D]) and table.grant_exclusive(OTHER, D)


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def manager(clock: Time) -> DelegationManager:
    return DelegationManager(10.0, clock)


def client(manager: DelegationManager) -> Holder:
    holder = manager.join()
    manager.renew_lease(holder)
    return holder


def give_up(manager: DelegationManager, holder: Holder) -> None:
    inodes, upto = manager.next_recall(holder, 5.0)
    manager.return_delegations(holder, inodes, upto, ())


def test_who_only_looks_waits_until_it_is_given_up(manager: DelegationManager, clock: Time) -> None:
    one = client(manager)
    assert manager.grant_exclusive(one, 5)
    manager.recall_directory(one, 5)  # its own
    manager.recall_directory(DEVICE, 6)
    looking = Doing(manager.recall_directory, DEVICE, 5)
    give_up(manager, one)
    looking.result()
    assert manager.grant_exclusive(one, 5) == 0  # others want it just now
    clock.now += 1.1
    manager.renew_lease(one)
    assert manager.grant_exclusive(one, 5)


def test_who_may_not_wait_is_told_so(manager: DelegationManager) -> None:
    one = client(manager)
    manager.grant_exclusive(one, 5)
    looking = Doing(manager.recall_directory, DEVICE, 5, may_wait=False)
    with pytest.raises(WouldBlock):
        looking.result()


def test_nobody_waits_longer_than_the_lease(manager: DelegationManager, clock: Time) -> None:
    one = client(manager)
    number = manager.grant_exclusive(one, 5)
    looking = Doing(manager.recall_directory, DEVICE, 5)
    clock.now += 9.9
    assert lasts(lambda: not looking.done)
    clock.now += 0.2
    looking.result()
    with pytest.raises(OSError) as raised, manager.flushing(one, {5: number}):
        pass
    assert raised.value.errno == errno.ESTALE


def test_a_word_of_who_lost_it_in_the_middle_is_waited_for(manager: DelegationManager, clock: Time) -> None:
    one, other = client(manager), client(manager)
    number = manager.grant_exclusive(one, 5)
    with manager.flushing(one, {5: number}):
        clock.now += 10.1
        manager.renew_lease(other)
        looking, changing = (
            Doing(manager.recall_directory, DEVICE, 5),
            Doing(lambda: manager.write_intent(other, 5).__enter__()),
        )
        assert lasts(lambda: not (looking.done or changing.done))
    looking.result()
    changing.result()


def test_a_client_without_a_lease_gets_nothing_exclusively(manager: DelegationManager, clock: Time) -> None:
    one = client(manager)
    clock.now += 10.1
    assert manager.grant_exclusive(one, 5) == 0 and errno_of(manager.recall_directory, DEVICE, 5) is None

"""The table of locks and its master: who has a directory exclusively, and who has to wait for him."""

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
    return SharedBitmapView(os.dup(shown.shared()))


@pytest.fixture
def table(shown: SharedBitmap) -> DelegationTable:
    return DelegationTable(shown)


def test_what_nobody_else_keeps_is_granted_exclusively(
    table: DelegationTable, marks: SharedBitmapView
) -> None:
    table.share(ONE, D)
    assert table.take(ONE, D) == 2 and table.has_taken(ONE, D, 2) and not table.has_taken(ONE, D, 1)
    assert marks.has(D) and not marks.has(E)
    assert table.excluded_by(OTHER, D) == ONE and table.excluded_by(ONE, D) is None
    assert table.share(OTHER, D) == 0 == table.take(OTHER, D)
    assert table.share(ONE, D) == 3 and table.has_taken(ONE, D, 2)
    table.recalled(ONE, D, 3)
    assert not table.has_taken(ONE, D, 2) and not marks.has(D) and table.share(OTHER, D)


def test_what_others_keep_or_change_is_not(table: DelegationTable) -> None:
    table.share(OTHER, D)
    assert table.take(ONE, D) == 0
    change = WriteIntent(DEVICE)
    assert table.begin(change, E, alone=True)
    assert table.take(ONE, E) == 0
    table.end(change)
    assert table.take(ONE, E)
    assert table.begin(change, E, alone=True) and table.in_the_way(change) == {ONE: {E}}
    table.end(change)
    table.leave(ONE)


def test_whose_lease_ends_has_nothing_exclusively(table: DelegationTable, marks: SharedBitmapView) -> None:
    number = table.take(ONE, D)
    table.lapse(ONE)
    assert not marks.has(D) and not table.has_taken(ONE, D, number) and table.exclusives == 0
    assert table.take(ONE, D) > number  # a late word by the earlier grant does not count


def test_names_that_are_being_told_hold_up_others(table: DelegationTable) -> None:
    table.take(ONE, D)
    table.begin_telling([D])
    assert not table.is_told(ONE, [D]) and table.is_told(OTHER, [D, E]) and not table.is_told(OTHER, [E])
    table.lapse(ONE)
    assert table.is_told(OTHER, [D]) and table.take(OTHER, D) == 0
    table.end_telling([D])
    assert not table.is_told(OTHER, [D]) and table.take(OTHER, D)


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def master(clock: Time) -> DelegationManager:
    return DelegationManager(10.0, clock)


def client(master: DelegationManager) -> Holder:
    holder = master.join()
    master.heard(holder)
    return holder


def give_up(master: DelegationManager, holder: Holder) -> None:
    inodes, upto = master.next_recall(holder, 5.0)
    master.recalled(holder, inodes, upto, ())


def test_who_only_looks_waits_until_it_is_given_up(master: DelegationManager, clock: Time) -> None:
    one = client(master)
    assert master.take(one, 5)
    master.settle(one, 5)  # its own
    master.settle(DEVICE, 6)
    looking = Doing(master.settle, DEVICE, 5)
    give_up(master, one)
    looking.result()
    assert master.take(one, 5) == 0  # others want it just now
    clock.now += 1.1
    master.heard(one)
    assert master.take(one, 5)


def test_who_may_not_wait_is_told_so(master: DelegationManager) -> None:
    one = client(master)
    master.take(one, 5)
    looking = Doing(master.settle, DEVICE, 5, may_wait=False)
    with pytest.raises(WouldBlock):
        looking.result()


def test_nobody_waits_longer_than_the_lease(master: DelegationManager, clock: Time) -> None:
    one = client(master)
    number = master.take(one, 5)
    looking = Doing(master.settle, DEVICE, 5)
    clock.now += 9.9
    assert lasts(lambda: not looking.done)
    clock.now += 0.2
    looking.result()
    with pytest.raises(OSError) as raised, master.telling(one, {5: number}):
        pass
    assert raised.value.errno == errno.ESTALE


def test_a_word_of_who_lost_it_in_the_middle_is_waited_for(master: DelegationManager, clock: Time) -> None:
    one, other = client(master), client(master)
    number = master.take(one, 5)
    with master.telling(one, {5: number}):
        clock.now += 10.1
        master.heard(other)
        looking, changing = (
            Doing(master.settle, DEVICE, 5),
            Doing(lambda: master.change(other, 5).__enter__()),
        )
        assert lasts(lambda: not (looking.done or changing.done))
    looking.result()
    changing.result()


def test_a_client_without_a_lease_gets_nothing_exclusively(master: DelegationManager, clock: Time) -> None:
    one = client(master)
    clock.now += 10.1
    assert master.take(one, 5) == 0 and errno_of(master.settle, DEVICE, 5) is None

# SPDX-License-Identifier: Apache-2.0
"""The delegation table without waiting clients: grants, and conflicts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.fs.coherence.delegation_table import DEVICE, DelegationTable, Holder, Inode, WriteIntent
from millpond.fs.coherence.shared_bitmap import SharedBitmap

from ..effort import scaled

ONE, OTHER = Holder(1), Holder(2)
F, G = Inode(10), Inode(11)


@pytest.fixture
def table() -> DelegationTable:
    return DelegationTable(SharedBitmap())


def begun(table: DelegationTable, holder: Holder, *inodes: Inode, alone: bool = False) -> WriteIntent:
    change = WriteIntent(holder)
    for inode in inodes:
        assert table.begin(change, inode, alone=alone)
    return change


def test_grants_are_numbered_for_each_holder(table: DelegationTable) -> None:
    assert [table.grant_read(ONE, F), table.grant_read(ONE, G), table.grant_read(ONE, F)] == [1, 2, 3]
    assert table.grant_read(OTHER, F) == 1
    assert (table.last_grant(ONE), table.last_grant(OTHER), table.last_grant(Holder(9))) == (3, 1, 0)
    assert (table.count(ONE), table.count(OTHER), table.count(Holder(9))) == (2, 1, 0)
    table.expire(ONE)
    assert table.grant_read(ONE, F) == 4  # a number is never used twice, or a late reply would count


def test_nothing_is_granted_while_others_change_it(table: DelegationTable) -> None:
    change = begun(table, OTHER, F)
    assert table.grant_read(ONE, F) == 0 and table.grant_read(ONE, G) == 1
    assert table.grant_read(OTHER, F) == 1  # its own change
    another = begun(table, DEVICE, F)
    assert table.grant_read(OTHER, F) == 0
    table.end(another)
    assert table.grant_read(OTHER, F) == 2
    table.end(change)
    assert table.grant_read(ONE, F) == 2
    table.end(change)  # has ended


def test_whoever_keeps_it_is_in_the_way_of_others(table: DelegationTable) -> None:
    for inode in (F, G):
        table.grant_read(ONE, inode)
    table.grant_read(OTHER, G)
    assert table.conflicts(begun(table, DEVICE, F, G)) == {ONE: {F, G}, OTHER: {G}}
    mine = begun(table, ONE, F, G)
    assert table.conflicts(mine) == {OTHER: {G}}
    table.return_delegation(OTHER, G, table.last_grant(OTHER))
    assert table.conflicts(mine) == {}


def test_what_was_granted_since_is_not_recalled(table: DelegationTable) -> None:
    early, late = table.grant_read(ONE, F), table.grant_read(ONE, F)
    table.return_delegation(ONE, F, early)
    assert table.holds(ONE, F)
    table.return_delegation(ONE, F, late)
    assert not table.holds(ONE, F)
    table.return_delegation(ONE, F, late)
    table.return_delegation(ONE, Inode(99), late)
    table.return_delegation(Holder(9), F, late)


def test_a_directory_is_changed_by_one_at_a_time(table: DelegationTable) -> None:
    first = begun(table, ONE, F, alone=True)
    second = WriteIntent(ONE)
    assert not table.begin(second, F, alone=True)  # also by the same holder: it has threads
    assert table.begin(second, F, alone=False)
    assert table.begin(first, F, alone=True)  # it is itself
    assert not table.begin(second, F, alone=True)
    table.end(first)
    assert table.begin(second, F, alone=True)
    assert second.inodes == second.alone == {F}
    table.end(second)
    assert (second.inodes, second.alone) == (set(), set())


def test_what_the_devices_kernel_writes_is_granted_to_nobody(table: DelegationTable) -> None:
    assert table.begin_writing(F) and table.begin_writing(F)
    assert table.is_written(F) and not table.is_written(G)
    assert table.grant_read(ONE, F) == 0 and not table.opened(ONE, F)
    table.end_writing(F)
    assert table.grant_read(ONE, F) == 0
    table.end_writing(F)
    assert table.grant_read(ONE, F) == 1 and table.opened(ONE, F)
    table.end_writing(F)  # nobody writes it
    table.end_writing(Inode(99))
    assert not table.is_written(F)


def test_the_devices_kernel_does_not_write_what_others_keep_or_have_open(table: DelegationTable) -> None:
    table.grant_read(ONE, F)
    assert not table.begin_writing(F)
    table.return_delegation(ONE, F, 1)
    assert table.opened(ONE, F) and table.opened(ONE, F) and table.opened(OTHER, F)
    for holder in (ONE, OTHER, OTHER, Holder(9)):  # closed more often than it was opened
        table.closed(holder, F)
        assert not table.begin_writing(F)
    table.closed(ONE, F)
    table.closed(ONE, Inode(99))
    assert table.begin_writing(F)


def test_a_refused_writer_leaves_nothing(table: DelegationTable) -> None:
    table.grant_read(ONE, F)
    assert not table.begin_writing(F)
    table.leave(ONE)
    assert not table.is_written(F) and idle(table)


def test_who_forgets_a_file_neither_keeps_it_nor_has_it_open(table: DelegationTable) -> None:
    table.grant_read(ONE, F)
    table.opened(ONE, F)
    table.opened(ONE, F)
    table.forget(ONE, F)
    table.forget(ONE, G)
    assert not table.holds(ONE, F) and table.begin_writing(F)


def test_a_lapsed_lease_ends_what_is_kept_but_not_what_is_open(table: DelegationTable) -> None:
    for inode in (F, G):
        table.grant_read(ONE, inode)
        table.opened(ONE, inode)
    table.expire(ONE)
    assert table.count(ONE) == 0 and table.conflicts(begun(table, DEVICE, F, G)) == {}
    assert not table.begin_writing(F)
    table.leave(ONE)
    assert table.begin_writing(F)
    table.expire(Holder(9))
    table.leave(Holder(9))


def test_what_a_lapsed_holder_still_has_is_late_once_others_change_it(table: DelegationTable) -> None:
    for inode in (F, G):
        table.grant_read(ONE, inode)
        table.grant_read(OTHER, inode)
    table.end(begun(table, OTHER, G))
    under_way = begun(table, DEVICE, F)
    table.expire(ONE)
    table.end(under_way)
    table.end(begun(table, ONE, F, G))
    assert table.is_stale(ONE, F) and not table.is_stale(ONE, G) and not table.is_stale(OTHER, F)
    table.expire(ONE)
    table.grant_read(ONE, F)
    table.expire(ONE)
    assert table.is_stale(ONE, F)
    table.end(begun(table, OTHER, G))
    assert table.is_stale(ONE, G)
    table.reconnected(ONE)
    table.end(begun(table, OTHER, F, G))
    assert not table.is_stale(ONE, F) and not table.is_stale(ONE, G)
    table.expire(OTHER)
    table.leave(OTHER)
    assert idle(table)


def test_what_is_open_without_a_word_is_what_was_said_last(table: DelegationTable) -> None:
    for _ in range(2):
        table.report_open(ONE, F, is_open=True)
    table.report_open(OTHER, F, is_open=True)
    assert not table.begin_writing(F)
    table.report_open(ONE, F, is_open=False)
    assert not table.begin_writing(F)
    table.forget(OTHER, F)
    table.report_open(OTHER, G, is_open=False)
    assert table.begin_writing(F)
    table.report_open(ONE, F, is_open=True)  # from now on, for the next who would write it
    table.end_writing(F)
    assert not table.begin_writing(F)
    table.leave(ONE)
    assert idle(table)


def idle(table: DelegationTable) -> bool:
    return not (table._files or any(table._held.values()) or table._expired)


holders, inodes = st.sampled_from([ONE, OTHER, DEVICE]), st.sampled_from([F, G, Inode(12)])


class Histories(RuleBasedStateMachine):
    """Any history: whoever keeps what another changes stands in its way, and at the end nothing is left."""

    def __init__(self) -> None:
        super().__init__()
        self.table = DelegationTable(SharedBitmap())
        self.changes: list[WriteIntent] = []
        self.granted: dict[tuple[Holder, Inode], int] = {}
        self.writers: list[Inode] = []

    @rule(holder=holders, inode=inodes)
    def share(self, holder: Holder, inode: Inode) -> None:
        before = self.table.last_grant(holder)
        others = any(inode in c.inodes and c.holder != holder for c in self.changes)
        number = self.table.grant_read(holder, inode)
        assert number == (0 if others or inode in self.writers else before + 1)
        if number:
            self.granted[holder, inode] = number

    @rule(holder=holders, inode=inodes, alone=st.booleans())
    def begin(self, holder: Holder, inode: Inode, alone: bool) -> None:
        change = WriteIntent(holder)
        free = not alone or not any(inode in c.alone for c in self.changes)
        assert self.table.begin(change, inode, alone=alone) == free
        if free:
            self.changes.append(change)

    @rule(number=st.integers(0, 9), inode=inodes)
    @precondition(lambda self: self.changes)
    def add(self, number: int, inode: Inode) -> None:
        assert self.table.begin(self.changes[number % len(self.changes)], inode, alone=False)

    @rule(number=st.integers(0, 9))
    @precondition(lambda self: self.changes)
    def end(self, number: int) -> None:
        self.table.end(self.changes.pop(number % len(self.changes)))

    @rule(holder=holders, inode=inodes, back=st.integers(0, 3))
    def recalled(self, holder: Holder, inode: Inode, back: int) -> None:
        upto = self.table.last_grant(holder) - back
        self.table.return_delegation(holder, inode, upto)
        if self.granted.get((holder, inode), 1 << 60) <= upto:
            del self.granted[holder, inode]

    @rule(inode=inodes)
    def write(self, inode: Inode) -> None:
        kept = any(kept == inode for _, kept in self.granted)
        assert self.table.begin_writing(inode) == (not kept)
        if not kept:
            self.writers.append(inode)

    @rule(number=st.integers(0, 9))
    @precondition(lambda self: self.writers)
    def written(self, number: int) -> None:
        self.table.end_writing(self.writers.pop(number % len(self.writers)))

    @rule(holder=holders)
    def lapse(self, holder: Holder) -> None:
        self.table.expire(holder)
        self.granted = {key: number for key, number in self.granted.items() if key[0] != holder}

    @rule(holder=holders)
    def returned(self, holder: Holder) -> None:
        self.table.reconnected(holder)

    @invariant()
    def who_is_in_the_way(self) -> None:
        for change in self.changes:
            found = {(h, i) for h, kept in self.table.conflicts(change).items() for i in kept}
            assert found == {(h, i) for h, i in self.granted if i in change.inodes and h != change.holder}
        for holder in (ONE, OTHER, DEVICE):
            assert self.table.count(holder) == sum(1 for h, _ in self.granted if h == holder)

    def teardown(self) -> None:
        for change in self.changes:
            self.table.end(change)
        for inode in self.writers:
            self.table.end_writing(inode)
        for holder in (ONE, OTHER, DEVICE):
            self.table.leave(holder)
        assert idle(self.table)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=scaled(quick=30, full=100))


@given(st.lists(st.tuples(st.sampled_from([ONE, OTHER]), st.booleans()), max_size=12))
def test_what_is_open_is_counted_for_each_holder(events: list[tuple[Holder, bool]]) -> None:
    table, counts = DelegationTable(SharedBitmap()), {ONE: 0, OTHER: 0}
    for holder, opens in events:
        if opens:
            table.opened(holder, F)
        else:
            table.closed(holder, F)
        counts[holder] = counts[holder] + 1 if opens else max(0, counts[holder] - 1)
        assert idle(table) == (not any(counts.values()))

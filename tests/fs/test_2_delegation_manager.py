# SPDX-License-Identifier: Apache-2.0
"""The delegation manager: the order and the length of waits, by a clock that only the test advances."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from millpond.fs.coherence.delegation_table import DEVICE, Holder, Inode, WriteIntent
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.vfs.inode_api import WouldBlock

from ..waiting import eventually
from .support import SOON, Doing, errno_of

D, E, F, G = Inode(1), Inode(2), Inode(10), Inode(11)
LEASE = 10.0


class Clocked(DelegationManager):
    """With a clock that stands still."""

    def __init__(self) -> None:
        self.time = 1000.0
        super().__init__(LEASE, lambda: self.time)

    def pass_by(self, seconds: float) -> None:
        with self._changed:
            self.time += seconds
            self._changed.notify_all()

    def client(self) -> Holder:
        """One whose lease has begun."""
        holder = self.join()
        self.renew_lease(holder)
        return holder

    @property
    def idle(self) -> bool:
        return not (self._table._files or any(self._table._held.values()))


@pytest.fixture
def master() -> Clocked:
    return Clocked()


@pytest.fixture
def one(master: Clocked) -> Holder:
    return master.client()


@pytest.fixture
def other(master: Clocked) -> Holder:
    return master.client()


def changed(
    master: DelegationManager, holder: Holder, *directories: int, inodes: tuple[int, ...] = ()
) -> None:
    with master.write_intent(holder, *directories, inodes=inodes):
        pass


def recalled(master: DelegationManager, holder: Holder) -> set[Inode]:
    """What the client is asked to give up, and gives up."""
    inodes, upto = master.next_recall(holder, SOON)
    master.renew_lease(holder)
    master.return_delegations(holder, inodes, upto, ())
    return set(inodes)


def test_nothing_is_granted_without_a_lease(master: Clocked, one: Holder) -> None:
    silent = master.join()
    assert master.grant_read(silent, F) == 0 and master.grant_data(silent, F) == 0
    assert not master.has_lease(silent) and not master.has_lease(Holder(99))
    assert master.grant_read(one, F) == 1 and master.grant_data(one, F) == 2
    master.pass_by(LEASE)
    assert not master.has_lease(one) and master.grant_read(one, F) == 0
    master.renew_lease(one)
    assert master.grant_read(one, F) == 3
    master.expire(one)
    assert master.grant_read(one, F) == 0 and master.count(one) == 0
    for call in (master.renew_lease, master.expire, master.leave):
        call(Holder(99))


def test_nobody_waits_where_nobody_keeps_anything(master: Clocked, one: Holder) -> None:
    master.grant_read(one, F)
    for holder in (one, DEVICE):
        changed(master, holder, D, E, inodes=(G,))
    changed(master, one, D, inodes=(F,))  # its own
    master.leave(one)
    assert master.idle


@pytest.mark.parametrize("changer", ["the device", "another client"])
def test_a_change_waits_for_a_recall(master: Clocked, one: Holder, other: Holder, changer: str) -> None:
    for inode in (D, F, G):
        master.grant_read(one, inode)
    doing = Doing(changed, master, other if changer == "another client" else DEVICE, D, inodes=(F,))
    asked = recalled(master, one)
    if asked != {D, F}:  # the directory first, and then the file
        asked |= recalled(master, one)
    doing.result()
    assert asked == {D, F} and master.count(one) == 1
    assert master.grant_read(one, F) == 4


def test_it_waits_for_all(master: Clocked, one: Holder, other: Holder) -> None:
    for holder in (one, other):
        master.grant_read(holder, F)
    doing = Doing(changed, master, DEVICE, D, inodes=(F,))
    assert recalled(master, one) == {F}
    assert not doing.done
    assert recalled(master, other) == {F}
    doing.result()


def test_it_is_granted_again_only_after_the_change(master: Clocked, one: Holder) -> None:
    master.grant_read(one, F)
    begun, go_on = threading.Event(), threading.Event()

    def change() -> None:
        with master.write_intent(DEVICE, inodes=(F,)):
            begun.set()
            assert go_on.wait(SOON)

    doing = Doing(change)
    inodes, upto = master.next_recall(one, SOON)
    assert master.grant_read(one, F) == 0  # recalled, not given up
    assert master.grant_data(one, F) == 0  # nor does it wait for itself
    master.return_delegations(one, inodes, upto, ())
    assert begun.wait(SOON)
    assert master.grant_read(one, F) == 0
    reading = Doing(master.grant_data, one, F)
    impatient = Doing(master.grant_data, one, F, may_wait=False)
    with pytest.raises(WouldBlock):
        impatient.result()
    assert not reading.done
    go_on.set()
    doing.result()
    assert reading.result() == 2


def test_who_cannot_wait_is_told_so_and_has_begun_nothing(master: Clocked, one: Holder) -> None:
    master.grant_read(one, F)
    with pytest.raises(WouldBlock):
        Doing(changed, master, DEVICE, D, inodes=(F,), may_wait=False).result()
    with pytest.raises(WouldBlock):
        Doing(changed, master, DEVICE, F, may_wait=False).result()
    assert master.grant_read(one, D) == 2 and master.grant_read(one, F) == 3
    with master.write_intent(DEVICE, E), pytest.raises(WouldBlock):  # others change a directory
        Doing(changed, master, one, E, may_wait=False).result()
    assert master.next_recall(one, 0)[0] == set()


def test_a_change_waits_no_longer_than_the_lease(master: Clocked, one: Holder, other: Holder) -> None:
    for holder in (one, other):
        master.grant_read(holder, F)
        master.opened(holder, F)
    doing = Doing(changed, master, DEVICE, inodes=(F,))
    assert recalled(master, other) == {F}
    assert master.next_recall(one, SOON)[0] == {F}  # and never an answer
    master.pass_by(LEASE - 0.1)
    master.renew_lease(other)
    time.sleep(0.05)
    assert not doing.done
    master.pass_by(0.1)
    doing.result()
    assert (master.count(one), master.count(other)) == (0, 0)
    assert master.next_recall(one, 0)[0] == set()
    assert master.grant_read(other, F) and not master.grant_read(one, F)
    assert not master.begin_writing(F)  # what was open may still be


def test_who_answers_other_things_keeps_his_lease_but_not_the_change_waiting(
    master: Clocked, one: Holder
) -> None:
    """One that lives, but never gives up what it is asked for: three leases, then the change fails."""
    master.grant_read(one, F)
    doing = Doing(changed, master, DEVICE, inodes=(F,))
    assert master.next_recall(one, SOON)[0] == {F}
    for _ in range(7):
        master.pass_by(LEASE / 2)
        master.renew_lease(one)
    assert errno_of(doing.result) == errno.ETIMEDOUT
    assert master.grant_read(one, F) == 2
    doing = Doing(changed, master, DEVICE, inodes=(F,))  # he is asked again
    assert recalled(master, one) == {F}
    doing.result()


def test_a_client_that_is_gone_is_not_waited_for(master: Clocked, one: Holder, other: Holder) -> None:
    for holder in (one, other):
        master.grant_read(holder, F)
    doing = Doing(changed, master, DEVICE, inodes=(F,))
    assert master.next_recall(one, SOON)[0] == {F}
    master.expire(one)
    assert not doing.done
    assert master.next_recall(other, SOON)[0] == {F}
    master.leave(other)
    doing.result()
    assert master.next_recall(other, SOON) == (frozenset(), 0)
    master.return_delegations(other, [F], 1, [F])  # too late
    master.leave(one)
    assert master.idle


def test_a_recall_says_up_to_which_grant(master: Clocked, one: Holder) -> None:
    master.grant_read(one, F)
    master.grant_read(one, G)
    doing = Doing(changed, master, DEVICE, inodes=(F,))
    inodes, upto = master.next_recall(one, SOON)
    assert (set(inodes), upto) == ({F}, 2)
    assert master.grant_read(one, G) == 3  # meanwhile
    master.return_delegations(one, inodes, upto, ())
    doing.result()
    assert master.count(one) == 1
    assert master.next_recall(one, 0) == (frozenset(), 3)


def test_a_file_added_in_the_middle_is_waited_for(master: Clocked, one: Holder) -> None:
    master.grant_read(one, F)

    def change() -> None:
        with master.write_intent(DEVICE, D) as announced:
            announced.recall(F, G)
            assert master.grant_read(one, F) == 0

    doing = Doing(change)
    assert recalled(master, one) == {F}
    doing.result()
    assert master.grant_read(one, F) == 2


def test_directories_are_changed_by_one_at_a_time(master: Clocked, one: Holder, other: Holder) -> None:
    inside: list[Holder] = []

    def change(holder: Holder, *directories: int) -> None:
        for _ in range(200):
            with master.write_intent(holder, *directories, inodes=(F,)):
                inside.append(holder)
                assert len(inside) == 1
                inside.pop()

    places = ((D, E), (E, D), (D, D), (E, D), (D,))  # renames here and there cannot wait for each other
    doing = [Doing(change, holder, *where) for where in places for holder in (one, other, DEVICE)]
    for each in doing:
        each.result()
    assert master.idle


def test_who_waits_too_long_for_a_directory_gives_up(master: Clocked, one: Holder) -> None:
    with master.write_intent(DEVICE, E):
        doing = Doing(changed, master, one, E, D)
        eventually(lambda: master._table.has_intent(D), "the change has begun")
        master.pass_by(3 * LEASE)
        assert errno_of(doing.result) == errno.ETIMEDOUT
    assert master.idle


def test_who_waits_too_long_to_read_gives_up(master: Clocked, one: Holder) -> None:
    with master.write_intent(DEVICE, inodes=(F,)):
        doing = Doing(master.grant_data, one, F)
        for _ in range(40):
            master.pass_by(LEASE / 4)
            master.renew_lease(one)
        assert errno_of(doing.result) == errno.ETIMEDOUT
    assert master.grant_data(one, F) == 1


def test_who_left_while_he_waited_to_read_is_granted_nothing(master: Clocked, one: Holder) -> None:
    with master.write_intent(DEVICE, inodes=(F,)):
        doing = Doing(master.grant_data, one, F)
        time.sleep(0.05)  # it waits by now
        master.leave(one)
        assert doing.result() == 0
    changed(master, DEVICE, inodes=(F,))
    assert master.idle


def test_what_the_devices_kernel_writes(master: Clocked, one: Holder) -> None:
    master.opened(one, F)
    with master.write_intent(DEVICE, inodes=(F, G)):
        assert not master.begin_writing(F) and master.begin_writing(G)
    assert not master.opened(one, G)
    assert master.grant_read(one, G) == 0 and master.grant_data(one, G) == 0
    changed(master, one, inodes=(G,))  # both may
    master.end_writing(G)
    assert master.grant_read(one, G) == 1
    doing = Doing(changed, master, DEVICE, inodes=(G,))
    inodes, upto = master.next_recall(one, SOON)
    master.return_delegations(one, inodes, upto, [G])  # opened without a word
    doing.result()
    assert not master.begin_writing(G)
    master.closed(one, G)  # which was not opened so
    assert not master.begin_writing(G)
    master.report_closed(one, G)
    master.closed(one, F)
    for inode in (F, G):
        assert master.begin_writing(inode)
        master.end_writing(inode)
    master.grant_read(one, F)
    master.opened(one, F)
    master.forget(one, F)
    assert master.idle


def test_a_change_that_fails_is_over(master: Clocked, one: Holder) -> None:
    with pytest.raises(KeyError), master.write_intent(one, D, inodes=(F,)):
        raise KeyError
    assert master.idle
    change = WriteIntent(DEVICE)
    master.add(change, [D], alone=True)
    master.add(change, [D], alone=True)
    master.end(change)
    master.end(change)
    assert master.idle

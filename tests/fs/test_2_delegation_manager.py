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

    def __init__(self, *, device: bool = False) -> None:
        self.time = 1000.0
        super().__init__(LEASE, lambda: self.time, device=device)

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
        table = self._table
        return not (table._files or any(table._held.values()) or any(table._expired.values()))


@pytest.fixture
def manager() -> Clocked:
    return Clocked()


@pytest.fixture
def one(manager: Clocked) -> Holder:
    return manager.client()


@pytest.fixture
def other(manager: Clocked) -> Holder:
    return manager.client()


def changed(
    manager: DelegationManager, holder: Holder, *directories: int, inodes: tuple[int, ...] = ()
) -> None:
    with manager.write_intent(holder, *directories, inodes=inodes):
        pass


def recalled(manager: DelegationManager, holder: Holder) -> set[Inode]:
    """What the client is asked to give up, and gives up."""
    inodes, upto = manager.next_recall(holder, SOON)
    manager.renew_lease(holder)
    manager.return_delegations(holder, inodes, upto, ())
    return set(inodes)


def test_nothing_is_granted_without_a_lease(manager: Clocked, one: Holder) -> None:
    silent = manager.join()
    assert manager.grant_read(silent, F) == 0 and manager.grant_data(silent, F) == 0
    assert not manager.has_lease(silent) and not manager.has_lease(Holder(99))
    assert manager.grant_read(one, F) == 1 and manager.grant_data(one, F) == 2
    manager.pass_by(LEASE)
    assert not manager.has_lease(one) and manager.grant_read(one, F) == 0
    manager.renew_lease(one)
    assert manager.grant_read(one, F) == 3
    manager.expire(one)
    assert manager.grant_read(one, F) == 0 and manager.lease_of(one)[1] == 0
    for call in (manager.renew_lease, manager.expire, manager.leave):
        call(Holder(99))


def test_nobody_waits_where_nobody_keeps_anything(manager: Clocked, one: Holder) -> None:
    manager.grant_read(one, F)
    for holder in (one, DEVICE):
        changed(manager, holder, D, E, inodes=(G,))
    changed(manager, one, D, inodes=(F,))  # its own
    manager.leave(one)
    assert manager.idle


@pytest.mark.parametrize("changer", ["the device", "another client"])
def test_a_change_waits_for_a_recall(manager: Clocked, one: Holder, other: Holder, changer: str) -> None:
    for inode in (D, F, G):
        manager.grant_read(one, inode)
    doing = Doing(changed, manager, other if changer == "another client" else DEVICE, D, inodes=(F,))
    asked = recalled(manager, one)
    if asked != {D, F}:  # the directory first, and then the file
        asked |= recalled(manager, one)
    doing.result()
    assert asked == {D, F} and manager.lease_of(one)[1] == 1
    assert manager.grant_read(one, F) == 4


def test_it_waits_for_all(manager: Clocked, one: Holder, other: Holder) -> None:
    for holder in (one, other):
        manager.grant_read(holder, F)
    doing = Doing(changed, manager, DEVICE, D, inodes=(F,))
    assert recalled(manager, one) == {F}
    assert not doing.done
    assert recalled(manager, other) == {F}
    doing.result()


def test_it_is_granted_again_only_after_the_change(manager: Clocked, one: Holder) -> None:
    manager.grant_read(one, F)
    begun, go_on = threading.Event(), threading.Event()

    def change() -> None:
        with manager.write_intent(DEVICE, inodes=(F,)):
            begun.set()
            assert go_on.wait(SOON)

    doing = Doing(change)
    inodes, upto = manager.next_recall(one, SOON)
    assert manager.grant_read(one, F) == 0  # recalled, not given up
    assert manager.grant_data(one, F) == 0  # nor does it wait for itself
    manager.return_delegations(one, inodes, upto, ())
    assert begun.wait(SOON)
    assert manager.grant_read(one, F) == 0
    reading = Doing(manager.grant_data, one, F)
    impatient = Doing(manager.grant_data, one, F, may_wait=False)
    with pytest.raises(WouldBlock):
        impatient.result()
    assert not reading.done
    go_on.set()
    doing.result()
    assert reading.result() == 2


def test_who_cannot_wait_is_told_so_and_has_begun_nothing(manager: Clocked, one: Holder) -> None:
    manager.grant_read(one, F)
    with pytest.raises(WouldBlock):
        Doing(changed, manager, DEVICE, D, inodes=(F,), may_wait=False).result()
    with pytest.raises(WouldBlock):
        Doing(changed, manager, DEVICE, F, may_wait=False).result()
    assert manager.grant_read(one, D) == 2 and manager.grant_read(one, F) == 3
    with manager.write_intent(DEVICE, E), pytest.raises(WouldBlock):  # others change a directory
        Doing(changed, manager, one, E, may_wait=False).result()
    assert manager.next_recall(one, 0)[0] == set()


def test_a_change_waits_no_longer_than_the_lease(manager: Clocked, one: Holder, other: Holder) -> None:
    for holder in (one, other):
        manager.grant_read(holder, F)
        manager.opened(holder, F)
    doing = Doing(changed, manager, DEVICE, inodes=(F,))
    assert recalled(manager, other) == {F}
    assert manager.next_recall(one, SOON)[0] == {F}  # and never an answer
    manager.pass_by(LEASE - 0.1)
    manager.renew_lease(other)
    time.sleep(0.05)
    assert not doing.done
    manager.pass_by(0.1)
    doing.result()
    assert (manager.lease_of(one)[1], manager.lease_of(other)[1]) == (0, 0)
    assert manager.next_recall(one, 0)[0] == set()
    assert manager.grant_read(other, F) and not manager.grant_read(one, F)
    assert not manager.begin_writing(F)  # what was open may still be


def test_who_answers_other_things_keeps_his_lease_but_not_the_change_waiting(
    manager: Clocked, one: Holder
) -> None:
    """One that lives, but never gives up what it is asked for: three leases, then the change fails."""
    manager.grant_read(one, F)
    doing = Doing(changed, manager, DEVICE, inodes=(F,))
    assert manager.next_recall(one, SOON)[0] == {F}
    for _ in range(7):
        manager.pass_by(LEASE / 2)
        manager.renew_lease(one)
    assert errno_of(doing.result) == errno.ETIMEDOUT
    assert manager.grant_read(one, F) == 2
    doing = Doing(changed, manager, DEVICE, inodes=(F,))  # he is asked again
    assert recalled(manager, one) == {F}
    doing.result()


def test_a_client_that_is_gone_is_not_waited_for(manager: Clocked, one: Holder, other: Holder) -> None:
    for holder in (one, other):
        manager.grant_read(holder, F)
    doing = Doing(changed, manager, DEVICE, inodes=(F,))
    assert manager.next_recall(one, SOON)[0] == {F}
    manager.expire(one)
    assert not doing.done
    assert manager.next_recall(other, SOON)[0] == {F}
    manager.leave(other)
    doing.result()
    assert manager.next_recall(other, SOON) == (frozenset(), 0)
    manager.return_delegations(other, [F], 1, [F])  # too late
    manager.leave(one)
    assert manager.idle


def test_a_recall_says_up_to_which_grant(manager: Clocked, one: Holder) -> None:
    manager.grant_read(one, F)
    manager.grant_read(one, G)
    doing = Doing(changed, manager, DEVICE, inodes=(F,))
    inodes, upto = manager.next_recall(one, SOON)
    assert (set(inodes), upto) == ({F}, 2)
    assert manager.grant_read(one, G) == 3  # meanwhile
    manager.return_delegations(one, inodes, upto, ())
    doing.result()
    assert manager.lease_of(one)[1] == 1
    assert manager.next_recall(one, 0) == (frozenset(), 3)


def test_a_recall_of_a_write_delegation_ends_though_the_writer_goes_on(
    manager: Clocked, one: Holder, other: Holder
) -> None:
    assert manager.grant_write(one, 10)
    looking = Doing(manager.recall_writer, other, 10)
    inodes, upto = manager.next_recall(one, SOON)
    assert not manager.grant_read(one, 10)  # with the reply to a write
    manager.return_delegations(one, inodes, upto, ())
    assert looking.result() and manager.grant_read(other, 10) and manager.grant_read(one, 10)


def test_a_file_added_in_the_middle_is_waited_for(manager: Clocked, one: Holder) -> None:
    manager.grant_read(one, F)

    def change() -> None:
        with manager.write_intent(DEVICE, D) as announced:
            announced.recall(F, G)
            assert manager.grant_read(one, F) == 0

    doing = Doing(change)
    assert recalled(manager, one) == {F}
    doing.result()
    assert manager.grant_read(one, F) == 2


def test_directories_are_changed_by_one_at_a_time(manager: Clocked, one: Holder, other: Holder) -> None:
    inside: list[Holder] = []

    def change(holder: Holder, *directories: int) -> None:
        for _ in range(200):
            with manager.write_intent(holder, *directories, inodes=(F,)):
                inside.append(holder)
                assert len(inside) == 1
                inside.pop()

    places = ((D, E), (E, D), (D, D), (E, D), (D,))  # renames here and there cannot wait for each other
    doing = [Doing(change, holder, *where) for where in places for holder in (one, other, DEVICE)]
    for each in doing:
        each.result()
    assert manager.idle


def test_who_waits_too_long_for_a_directory_gives_up(manager: Clocked, one: Holder) -> None:
    with manager.write_intent(DEVICE, E):
        doing = Doing(changed, manager, one, E, D)
        eventually(lambda: D in manager._table._files, "the change has begun")
        manager.pass_by(3 * LEASE)
        assert errno_of(doing.result) == errno.ETIMEDOUT
    assert manager.idle


def test_who_waits_too_long_to_read_gives_up(manager: Clocked, one: Holder) -> None:
    with manager.write_intent(DEVICE, inodes=(F,)):
        doing = Doing(manager.grant_data, one, F)
        for _ in range(40):
            manager.pass_by(LEASE / 4)
            manager.renew_lease(one)
        assert errno_of(doing.result) == errno.ETIMEDOUT
    assert manager.grant_data(one, F) == 1


def test_who_left_while_he_waited_to_read_is_granted_nothing(manager: Clocked, one: Holder) -> None:
    with manager.write_intent(DEVICE, inodes=(F,)):
        doing = Doing(manager.grant_data, one, F)
        time.sleep(0.05)  # it waits by now
        manager.leave(one)
        assert doing.result() == 0
    changed(manager, DEVICE, inodes=(F,))
    assert manager.idle


def test_what_the_devices_kernel_writes(manager: Clocked, one: Holder) -> None:
    manager.opened(one, F)
    with manager.write_intent(DEVICE, inodes=(F, G)):
        assert not manager.begin_writing(F) and manager.begin_writing(G)
    assert not manager.opened(one, G)
    assert manager.grant_read(one, G) == 0 and manager.grant_data(one, G) == 0
    changed(manager, one, inodes=(G,))  # both may
    manager.end_writing(G)
    assert manager.grant_read(one, G) == 1
    doing = Doing(changed, manager, DEVICE, inodes=(G,))
    inodes, upto = manager.next_recall(one, SOON)
    manager.return_delegations(one, inodes, upto, [G])  # opened without a word
    doing.result()
    assert not manager.begin_writing(G)
    manager.closed(one, G)  # which was not opened so
    assert not manager.begin_writing(G)
    manager.report_closed(one, G)
    manager.closed(one, F)
    for inode in (F, G):
        assert manager.begin_writing(inode)
        manager.end_writing(inode)
    manager.grant_read(one, F)
    manager.opened(one, F)
    manager.forget(one, F)
    assert manager.idle


def test_nothing_is_granted_while_the_devices_mount_is_lost() -> None:
    """Its kernel may go on writing, and nobody knows what."""
    manager, mount = Clocked(device=True), "a mount"
    one = manager.client()
    manager.report_device(mount)
    assert manager.begin_writing(F) and manager.grant_read(one, G) and not manager.is_written(G)
    manager.lose_device(mount)
    manager.end_writing(F)
    assert manager.grant_read(one, F) == manager.grant_data(one, F) == manager.grant_write(one, D) == 0
    assert manager.is_written(F)  # for all that is known
    waiting = Doing(manager.await_device)
    with pytest.raises(WouldBlock):
        Doing(manager.await_device, may_wait=False).result()
    assert not (waiting.done or manager.opened(one, F))
    manager.report_device("the mount again")
    waiting.result()
    assert manager.opened(one, F)
    manager.lose_device(mount)  # its earlier connection
    assert manager.grant_read(one, F)


def test_what_the_devices_kernel_writes_already_is_recalled(
    manager: Clocked, one: Holder, other: Holder
) -> None:
    for client in (one, other):
        assert manager.grant_read(client, F) and manager.grant_read(client, G)
    assert manager.begin_writing(F, already=True)
    assert recalled(manager, one) == recalled(manager, other) == {F}
    assert not manager._table.holds(one, F) and manager._table.holds(one, G)
    assert manager.grant_read(one, F) == 0


def test_a_change_that_fails_is_over(manager: Clocked, one: Holder) -> None:
    with pytest.raises(KeyError), manager.write_intent(one, D, inodes=(F,)):
        raise KeyError
    assert manager.idle
    change = WriteIntent(DEVICE)
    manager.add(change, [D], alone=True)
    manager.add(change, [D], alone=True)
    manager.end(change)
    manager.end(change)
    assert manager.idle

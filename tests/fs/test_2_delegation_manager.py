# SPDX-License-Identifier: Apache-2.0
"""The delegation manager: what no history of the model has: deadlocks, the boot, a full file of leases."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.coherence.delegation_table import DEVICE, Holder, Inode
from millpond.fs.coherence.lease_file import SIZE, PersistentLeases, open_leases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.coherence.shared_bitmap import SharedBitmapView

from .support import Doing, errno_of, lasts

D, E, F = Inode(1), Inode(2), Inode(10)
LEASE = 10.0


def test_directories_are_changed_by_one_at_a_time() -> None:
    manager, inside = DelegationManager(LEASE), list[Holder]()
    one, other = manager.join(), manager.join()

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


def test_nobody_waits_for_longer_than_three_leases() -> None:
    """Though a client lives that never gives up what it is asked for, or another change goes on."""
    now = [1000.0]
    manager = DelegationManager(LEASE, lambda: now[0])
    one = manager.join()
    manager.renew_lease(one)
    assert manager.grant_read(one, F)

    def change(holder: Holder, *directories: int, inodes: tuple[int, ...] = ()) -> None:
        with manager.write_intent(holder, *directories, inodes=inodes):
            pass

    with manager.write_intent(DEVICE, E):
        waiting = [Doing(change, one, E, D), Doing(change, DEVICE, inodes=(F,))]
        waiting.append(Doing(manager.grant_data, one, E))
        assert lasts(lambda: not any(each.done for each in waiting))
        for _ in range(7):
            now[0] += LEASE / 2
            manager.renew_lease(one)
        assert [errno_of(each.result) for each in waiting] == [errno.ETIMEDOUT] * 3


def test_the_devices_mount_is_waited_for() -> None:
    now = [1000.0]
    manager = DelegationManager(LEASE, lambda: now[0], device=True)
    waiting = Doing(manager.await_device)
    assert lasts(lambda: not waiting.done)
    manager.report_device("a mount")
    waiting.result()
    manager.lose_device("a mount")
    waiting = Doing(manager.await_device)
    now[0] += 3.0  # it is not expected any more
    waiting.result()


def test_the_mount_sees_of_which_files_hosts_may_have_removed_names() -> None:
    manager = DelegationManager(LEASE)
    with manager.write_intent(manager.join(), D, inodes=(F,)):
        pass
    marks = SharedBitmapView(os.dup(manager.bitmap.descriptor()))  # it moves to memory that is shared
    with manager.write_intent(DEVICE, D, inodes=(F,)), manager.write_intent(manager.join(), inodes=(E,)):
        pass  # which removes no name of a host
    assert marks.removals(0) == (1, {F})
    with manager.write_intent(manager.join(), D, inodes=(F,)) as recall:
        recall(Inode(F + 1))
        assert marks.removals(1) == (1, set())
    assert marks.removals(1) == (3, {F, F + 1})
    with manager.write_intent(manager.join(), D, inodes=tuple(range(F, F + 5000))):
        pass
    assert marks.removals(3) == (5003, None)  # too many: any may be meant
    assert marks.removals(5003) == (5003, set())


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    made = open_leases(tmp_path / "leases")
    yield made
    os.close(made)


def leases(file: int, now: float = 1000.0, boot: bytes = b"the boot before.") -> PersistentLeases:
    return PersistentLeases(file, LEASE, lambda: now, lambda: boot)


@pytest.mark.parametrize("since", [100.0, 1000.0, 1005.0])
def test_leases_of_before_the_machine_was_started_are_none(file: int, since: float) -> None:
    """The machine may have been up for as long as it had been when the leases were granted."""
    leases(file).renew(b"a client's name.")
    assert leases(file).has_former(None)
    assert not leases(file, since, b"16 bytes, a boot").has_former(None)


def test_places_in_the_file_are_used_again(file: int) -> None:
    first = leases(file)
    for number in range(SIZE):
        first.renew(b"%16d" % number)
        first.end(b"%16d" % (number - 1))
    again = leases(file)
    assert again.has_former(None)
    again.end(b"%16d" % (SIZE - 1))
    assert not again.has_former(None) and not leases(file).has_former(None)

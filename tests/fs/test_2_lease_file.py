# SPDX-License-Identifier: Apache-2.0
"""Leases that an earlier server granted: nothing changes before they have expired."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millpond.fs.coherence.delegation_table import DEVICE, Holder
from millpond.fs.coherence.lease_file import SIZE, PersistentLeases, open_leases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.coherence.shared_bitmap import SharedBitmapView
from millpond.fs.vfs.inode_api import WouldBlock

from .support import SOON, Doing, lasts

LEASE = 10.0
ONE, OTHER = b"the name of one.", b"and of the other"
F, G = 10, 11


@dataclass
class Machine:
    """What lasts while servers come and go; the time goes only when a test says so."""

    file: int
    time: float = 1000.0
    boot: bytes = b"the boot before."
    servers: list[DelegationManager] = field(default_factory=list)

    def started(self) -> DelegationManager:
        """A server, started anew."""
        leases = PersistentLeases(self.file, LEASE, lambda: self.time, lambda: self.boot)
        return DelegationManager(LEASE, lambda: self.time, leases=leases)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    file = open_leases(tmp_path / "leases")
    yield Machine(file)
    os.close(file)


def attending(manager: DelegationManager, name: bytes) -> Holder:
    holder = manager.join(name)
    manager.begin_lease(holder, lambda: False)
    return holder


def changed(manager: DelegationManager) -> None:
    with manager.write_intent(DEVICE, inodes=(F,)):
        pass


def waits(manager: DelegationManager) -> bool:
    try:
        Doing(changed, manager, may_wait=False).result()
    except WouldBlock:
        return True
    return False


def test_a_change_waits_for_leases_of_before(machine: Machine) -> None:
    before = machine.started()
    assert not waits(before)
    one = attending(before, ONE)
    machine.time += 5
    attending(before, OTHER)
    before.renew_lease(one)
    machine.time += 9
    after = machine.started()
    assert waits(after)
    doing = Doing(changed, after)
    time.sleep(0.05)
    assert not doing.done
    machine.time += 1
    doing.result()
    assert not waits(after)


def test_it_waits_for_nobody_who_has_come_back_or_was_gone(machine: Machine) -> None:
    before = machine.started()
    _, _, gone = [attending(before, name) for name in (ONE, OTHER, b"and of a third ")]
    before.expire(gone)
    after = machine.started()
    doing = Doing(changed, after)
    back = attending(after, ONE)
    assert waits(after) and not doing.done
    attending(after, OTHER)
    doing.result(SOON)
    assert not waits(after)
    after.leave(back)
    later = machine.started()
    assert waits(later)
    attending(later, OTHER)
    assert not waits(later)


def test_it_waits_again_for_a_lease_of_its_own(machine: Machine) -> None:
    attending(machine.started(), ONE)
    after = machine.started()
    attending(after, ONE)
    machine.time += 9
    assert waits(machine.started())


@pytest.mark.parametrize("since", [100.0, 1000.0, 1005.0])
def test_leases_of_before_the_machine_was_started_are_none(machine: Machine, since: float) -> None:
    """The machine may have been up for as long as it had been when the leases were granted."""
    attending(machine.started(), ONE)
    machine.time, machine.boot = since, b"16 bytes, a boot"
    assert not waits(machine.started())


def looks(manager: DelegationManager, holder: Holder) -> bool | None:
    """Whether a file that is looked at had another writer; None if it is not known before something ends."""
    try:
        return bool(Doing(manager.recall_writer, holder, F, may_wait=False).result())
    except WouldBlock:
        return None


def marked(manager: DelegationManager) -> bool:
    """Whether the device's mount asks before it looks at a file."""
    return SharedBitmapView(os.dup(manager.bitmap.descriptor())).has(F)


def test_a_look_waits_for_those_who_may_have_gathered_writes_before(machine: Machine) -> None:
    """The next server does not know who was the writer of which file."""
    attending(machine.started(), ONE)
    after = machine.started()
    other = attending(after, OTHER)
    assert looks(after, other) is None and looks(after, DEVICE) is None and marked(after)
    assert not after.grant_read(other, F) and after.grant_reads(other, [F, G]) == [0, 0]
    assert not after.grant_data(other, F)  # it is read, and not cached
    looking = Doing(after.recall_writer, other, F)
    assert looks(after, after.join(ONE)) is False  # for nobody but himself
    attending(after, ONE)
    assert looking.result(SOON) and looks(after, DEVICE) is False and not marked(after)
    assert after.grant_read(other, F) and after.grant_reads(other, [F, G])[1] and after.grant_data(other, F)


def test_a_look_waits_no_longer_than_the_leases_of_before(machine: Machine) -> None:
    attending(machine.started(), ONE)
    after = machine.started()
    looking = Doing(after.recall_writer, DEVICE, F)
    machine.time += LEASE / 2
    assert lasts(lambda: not looking.done)
    machine.time += LEASE / 2
    assert looking.result(SOON) and not marked(after)


def test_places_are_used_again(machine: Machine) -> None:
    leases = PersistentLeases(machine.file, LEASE, lambda: machine.time)
    for number in range(SIZE):
        leases.renew(b"%16d" % number)
        leases.end(b"%16d" % (number - 1))
    again = PersistentLeases(machine.file, LEASE, lambda: machine.time)
    assert again.has_former(None)
    again.end(b"%16d" % (SIZE - 1))
    assert not again.has_former(None) and not PersistentLeases(
        machine.file, LEASE, lambda: machine.time
    ).has_former(None)


def test_who_comes_back_does_not_wait_for_himself(machine: Machine) -> None:
    """He may have to change something before he can drop what he keeps."""
    attending(machine.started(), ONE)
    after = machine.started()
    with after.write_intent(after.join(ONE), inodes=(F,)):
        pass
    assert waits(after)

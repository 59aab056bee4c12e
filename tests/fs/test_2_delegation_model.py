# SPDX-License-Identifier: Apache-2.0
"""Random histories of delegations, changes, looks, leases and restarts of the server, against a model."""

from __future__ import annotations

import errno
import os

from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import invariant, precondition, rule

from millpond.fs.coherence.delegation_table import Holder, Inode

from ..effort import scaled
from .delegation_model import (
    DIRECTORY,
    FILE,
    LEASE,
    NAMES,
    NEWEST,
    NOBODY,
    WAITS,
    Attempt,
    Client,
    DelegationModel,
    at_once,
    files,
    inodes,
    names,
    numbers,
    who,
)


class Histories(DelegationModel):
    """What clients, the device's mount, the clock and the server do."""

    @rule(name=names)
    @precondition(lambda self: not all(self.active(name) and self.lives(name) for name in NAMES))
    def come_back(self, name: bytes) -> None:
        """A client begins a lease that it has not."""
        if not (self.active(name) and self.lives(name)):
            self.come(name)

    def come(self, name: bytes) -> None:
        """A client begins a lease: it is new, or comes back and has dropped all that it had."""
        if not self.is_present(name):
            self.clients[name] = Client(self.manager.join(name))
        client = self.clients[name]
        client.is_gone = False
        self.manager.begin_lease(client.holder, lambda: client.is_gone)
        client.has.clear()
        client.revoked.clear()
        self.heard(name)
        client.restores_until = client.restores_until or self.now + LEASE  # until it has, however often
        self.settle()

    @rule(name=names)
    @precondition(lambda self: self.former)
    def join(self, name: bytes) -> None:
        """A client of the server before connects, and has no lease yet."""
        if name in self.former and not self.is_present(name):
            self.clients[name].holder = self.manager.join(name)

    def heard(self, name: bytes) -> None:
        self.clients[name].lease_end = self.on_file[name] = self.now + LEASE
        self.former.discard(name)

    @rule(name=names, what=some.sampled_from(["come", "leave", "vanish", "restart", "outlast", "device"]))
    def disturb(self, name: bytes, what: str) -> None:
        {
            "come": lambda: self.come(name),
            "leave": lambda: self.go(name, leaves=True),
            "vanish": lambda: self.vanish(name),
            "restart": self.restart,
            "outlast": self.restart_and_wait,
            "device": lambda: self.lose_device(name),
        }[what]()

    @rule(name=names, inode=inodes, changes=some.booleans())
    def expire(self, name: bytes, inode: Inode, changes: bool) -> None:
        self.read(name, [inode], together=False)
        self.go(name, leaves=False)
        if changes:
            self.change_at_once(name, inode, name)

    def go(self, name: bytes, *, leaves: bool) -> None:
        if name not in self.known() or any(a.by == name and a.kind != "read" for a in self.attempts):
            return
        client = self.clients[name]
        if leaves:  # with a file that it has open
            self.manager.return_delegations(client.holder, [FILE], 0, [FILE])
            self.manager.opened(client.holder, FILE)
        (self.manager.leave if leaves else self.manager.expire)(client.holder)
        self.on_file.pop(name, None)
        self.revoke(name)
        client.lease_end = 0.0
        client.has.clear()
        self.settle()
        if leaves:
            del self.clients[name]
            self.settle()
            self.write(FILE, "begin")

    def vanish(self, name: bytes) -> None:
        """A client's process ends, and nobody waits for it."""
        self.read(name, [FILE], together=False)
        if (client := self.active(name)) and not any(a.by == name for a in self.attempts):
            client.is_gone = True
            client.has.clear()
            self.settle()
            self.start("change", None, FILE)

    def lose_device(self, name: bytes) -> None:
        """The connection of the device's mount ends, and it comes again with what its kernel writes."""
        self.manager.lose_device("another mount")
        assert self.manager.device[0]
        self.manager.lose_device(None)
        self.has_device = False
        self.settle()
        self.read(name, [FILE], together=True)
        self.open_or_close(name, FILE, opens=True)
        self.the_manager_knows_the_same()
        self.manager.report_device(None)
        self.has_device = True

    def restart(self) -> None:
        """The server is killed; the next one knows of leases alone."""
        for attempt in list(self.attempts):
            self.stop(attempt)
        for name, client in self.clients.items():
            self.clients[name] = Client(Holder(0), client.lease_end, has=client.has)
        self.start_server()

    def restart_and_wait(self) -> None:
        """No client comes back before its lease of the server before is over."""
        self.restart()
        self.start("change", None, FILE)
        for seconds in (LEASE - 1, 1.0):
            self.wait(seconds, set(), late=False)

    @rule(seconds=some.sampled_from([1.0, 4.0, LEASE - 1]), silent=some.sets(names), late=some.booleans())
    def wait(self, seconds: float, silent: set[bytes], late: bool) -> None:
        """Time goes on; all but some clients are heard of at the end of it, also if it is late."""
        self.now += seconds
        for name, client in self.clients.items():
            lives = self.lives(name)
            if not lives:
                client.has.clear()
            if self.active(name) and name not in silent and (lives or late):
                self.manager.renew_lease(client.holder)
                self.heard(name)
        self.settle()

    @rule(
        name=names, wanted=some.lists(inodes, min_size=1, max_size=3, unique=True), together=some.booleans()
    )
    def read(self, name: bytes, wanted: list[Inode], together: bool) -> None:
        wanted = [*map(self.at, wanted)]
        if client := self.active(name):
            if together:
                found = self.manager.grant_reads(client.holder, wanted)
            else:
                found = [self.manager.grant_read(client.holder, inode) for inode in wanted]
            for inode, number in zip(wanted, found, strict=True):
                self.granted(name, inode, number)

    def granted(self, name: bytes, inode: Inode, number: object) -> bool:
        client, may = self.clients[name], self.may_grant(name, inode)
        assert number == (client.last + 1 if may else 0)
        if may:
            client.last += 1
            client.kept[inode] = client.last
            client.has.add(inode)
        return may

    @rule(name=names, inode=files, patient=some.booleans())
    def read_data(self, name: bytes, inode: Inode, patient: bool) -> None:
        """A client reads a file, after changes that have begun."""
        inode = self.at(inode)
        if not (client := self.active(name)):
            return
        if patient:
            if not any(a.by == name and a.kind == "read" for a in self.attempts):
                self.start("read", name, inode)
            return
        found = at_once(lambda: self.manager.grant_data(client.holder, inode))
        if self.read_waits(name, inode):
            assert found == WAITS
        else:
            self.granted(name, inode, found)

    @rule(name=names)
    @precondition(lambda self: not self.writers)
    def make(self, name: bytes) -> None:
        """A client makes a file and gathers writes to it."""
        if client := self.active(name):
            self.next_file += 1
            inode = Inode(self.next_file)
            if self.granted(name, inode, self.manager.grant_write(client.holder, inode)):
                self.writers[inode] = name

    @rule(which=numbers)
    @precondition(lambda self: self.writers)
    def send(self, which: int) -> None:
        """A client has sent what it had gathered, and gathers no more."""
        inode = list(self.writers)[which % len(self.writers)]
        if client := self.active(self.writers[inode]):
            for holder in (NOBODY, client.holder):
                self.manager.end_write(holder, inode)
            del self.writers[inode]
            self.looked_at.discard(inode)
            self.settle()

    @rule(name=names)
    @precondition(lambda self: any(client.asked for client in self.clients.values()))
    def hear(self, name: bytes) -> None:
        if client := self.active(name):
            client.heard = self.manager.next_recall(client.holder, 0)
            assert client.heard == (client.asked, client.last)

    @rule(which=numbers, inode=inodes, has_open=some.booleans(), closes=some.booleans())
    @precondition(lambda self: any(client.asked for client in self.clients.values()))
    def answer(self, which: int, inode: Inode, has_open: bool, closes: bool) -> None:
        """A client gives up what it was asked for; what it was granted since it keeps. The device's kernel
        wants to write the file at once.
        """
        asked = [name for name, client in self.clients.items() if client.asked]
        name = asked[which % len(asked)]
        if not (client := self.active(name)):
            return
        if not client.heard:
            self.hear(name)
        assert client.heard
        self.read(name, [inode], together=False)
        (given, upto), client.heard = client.heard, None
        if self.lives(name):
            self.manager.renew_lease(client.holder)
            self.heard(name)
        self.manager.return_delegations(client.holder, given, upto, given if has_open else ())
        for one in given:
            client.asked.discard(one)
            (client.said_open.add if has_open else client.said_open.discard)(one)
            if client.kept.get(one, 0) <= upto:
                self.drop(name, one)
        self.settle()
        for one in given - {DIRECTORY}:
            self.write(one, "begin")
            if closes:
                self.forget(name, one, whole=False)

    @rule(name=names, inode=inodes, back=some.integers(0, 2))
    def give_back(self, name: bytes, inode: Inode, back: int) -> None:
        """A client returns what it does not use, up to one of its grants."""
        inode = self.at(inode)
        if client := self.active(name):
            self.manager.return_unused(client.holder, [(inode, client.last - back)])
            if client.kept.get(inode, 0) <= client.last - back:
                self.drop(name, inode)
            self.settle()

    @rule(name=names, inode=files, opens=some.booleans())
    def open_or_close(self, name: bytes, inode: Inode, opens: bool) -> None:
        inode = self.at(inode)
        if not (client := self.active(name)):
            return
        if opens:
            may = self.has_device and not self.by_kernel[inode]
            assert self.manager.opened(client.holder, inode) == may
            client.open[inode] += may
        else:
            self.manager.closed(client.holder, inode)
            client.open[inode] = max(0, client.open[inode] - 1)

    @rule(name=names, inode=files, whole=some.booleans())
    def forget(self, name: bytes, inode: Inode, whole: bool) -> None:
        """A client closes what it had said to have open, or forgets the file."""
        inode = self.at(inode)
        if client := self.active(name):
            client.said_open.discard(inode)
            if whole:
                self.manager.forget(client.holder, inode)
                client.open[inode] = 0
                self.drop(name, inode)
            else:
                self.manager.report_open(client.holder, inode, False)
            self.settle()
            self.write(inode, "begin")

    @rule(by=who, inode=inodes, readers=some.sets(names))
    def change(self, by: bytes | None, inode: Inode, readers: set[bytes]) -> None:
        for name in sorted(readers):
            self.read(name, [inode], together=False)
        self.start("change", by, self.at(inode))

    @rule(by=who, inode=inodes, reader=names)
    def change_at_once(self, by: bytes | None, inode: Inode, reader: bytes) -> None:
        self.read(reader, [inode], together=False)
        inode = self.at(inode)
        if not self.is_present(by):
            return

        def change() -> None:
            with self.manager.write_intent(self.holder(by), *{inode} & {DIRECTORY}, inodes=(inode,)):
                pass

        waits = self.formers(by) or self.is_taken(inode)
        if not waits:
            self.note_change(inode, by)
            waits = self.ask({name: {inode} for name in self.keepers(inode, by)})
            self.note_change(inode, by)  # what was just revoked, too
        assert at_once(change) == (WAITS if waits else None)

    @rule(which=numbers, inode=files)
    @precondition(lambda self: any(attempt.has_begun.is_set() for attempt in self.attempts))
    def add(self, which: int, inode: Inode) -> None:
        """A change finds that it changes another file, too."""
        inode = self.at(inode)
        attempt = self.attempts[which % len(self.attempts)]
        if attempt.has_begun.is_set() and inode not in attempt.inodes:
            attempt.add(inode, self.now)
            self.settle()

    @rule(by=who, inode=files, patient=some.booleans(), maker=names)
    def look(self, by: bytes | None, inode: Inode, patient: bool, maker: bytes) -> None:
        if not self.writers:
            self.make(maker)
        inode = self.at(inode)
        if patient:
            self.start("look", by, inode)
        elif self.is_present(by):
            found = at_once(lambda: self.manager.recall_writer(self.holder(by), inode))
            is_another = self.writers.get(inode, by) != by
            waits = self.formers(by) or self.look_waits(by, inode)
            assert found == (WAITS if waits else is_another)

    @rule(by=who, restored=some.booleans())
    def lock(self, by: bytes | None, restored: bool) -> None:
        """Nobody locks a file while others may have to reclaim their locks."""
        if by and restored and (client := self.active(by)):
            self.manager.restored_locks(client.holder)
            client.restores_until = 0.0
        if self.is_present(by):
            others = [client for name, client in self.clients.items() if name != by and client.holder]
            waits = self.formers(by) or any(client.restores_until > self.now for client in others)
            locking = at_once(lambda: self.manager.await_locks(self.holder(by)))
            assert locking == (WAITS if waits else None)

    @rule(which=numbers, gives_up=some.booleans())
    @precondition(lambda self: self.attempts)
    def end(self, which: int, gives_up: bool) -> None:
        """A change is done, or whoever waits for it has gone."""
        attempt = self.attempts[which % len(self.attempts)]
        has_begun = attempt.has_begun.is_set()
        if has_begun or gives_up:
            assert self.stop(attempt) == (None if has_begun else errno.ECONNABORTED)
            self.settle()

    def stop(self, attempt: Attempt) -> int | None:
        attempt.is_gone = True
        self.manager.forget(NOBODY, 0)
        self.attempts.remove(attempt)
        return attempt.end()

    @rule(inode=files, how=some.sampled_from(["end", "begin", "begin", "already"]))
    def write(self, inode: Inode, how: str) -> None:
        """The device's kernel begins or ends to write a file."""
        inode = self.at(inode)
        if how == "end":
            self.manager.end_writing(inode)
            self.by_kernel[inode] = max(0, self.by_kernel[inode] - 1)
            self.settle()
            return
        keepers = self.keepers(inode)
        is_open = any(c.open[inode] or inode in c.said_open for c in self.clients.values())
        may = how == "already" or not (keepers or is_open)
        assert self.manager.begin_writing(inode, already=how == "already") == may
        if may:
            self.by_kernel[inode] += 1
            self.note_change(inode, None, of_all=True)
        for name in keepers if how == "already" else ():
            self.clients[name].asked.add(inode)
        self.settle()

    @invariant()
    def the_manager_knows_the_same(self) -> None:
        written = [inode for inode, writers in self.by_kernel.items() if writers]
        assert self.manager.device == (self.has_device, len(written))
        for inode in (DIRECTORY, FILE, self.at(NEWEST), *self.writers):
            assert self.marks.has(inode) == (self.marks_all or inode in self.writers)
            assert self.manager.is_written(inode) == (not self.has_device or inode in written)
        for name in self.known():
            client = self.clients[name]
            assert self.manager.has_lease(client.holder) == self.lives(name)
            age, kept = self.manager.lease_of(client.holder)
            assert age == (LEASE - (client.lease_end - self.now) if self.lives(name) else None)
            assert kept == len(client.kept)
            for inode in (DIRECTORY, FILE, self.at(NEWEST)):
                late = client.revoked.get(inode, False)
                assert self.manager.is_stale(client.holder, inode) == late

    def teardown(self) -> None:
        for attempt in list(self.attempts):
            self.stop(attempt)
        os.close(self.file)
        self._folder.cleanup()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=scaled(quick=150, full=1000), stateful_step_count=60)

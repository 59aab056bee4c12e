# SPDX-License-Identifier: Apache-2.0
"""Random histories of delegations, changes, looks, leases and restarts of the server, against a model.

Nobody sees a file that another may have changed: a change, or a look at a new file, begins once no client
with a lease has what is in its way, and then at once.
"""

from __future__ import annotations

import errno
import os
import queue
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millpond.fs.coherence.delegation_table import DEVICE, Holder, Inode
from millpond.fs.coherence.lease_file import PersistentLeases, open_leases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.coherence.shared_bitmap import SharedBitmapView
from millpond.fs.vfs.inode_api import WouldBlock, abandoned, may_block

from ..effort import scaled
from .support import SOON, Doing, errno_of

LEASE, WAITED = 10.0, 30.0
DIRECTORY, FILE, NEWEST = Inode(1), Inode(10), Inode(0)
NAMES = (b"the name of one.", b"and of the other")
NOBODY = Holder(99)
WAITS = "it waits"

names, who, numbers = some.sampled_from(NAMES), some.sampled_from((None, *NAMES)), some.integers(0, 9)
inodes, files = some.sampled_from((DIRECTORY, FILE, NEWEST)), some.sampled_from((FILE, NEWEST))


@dataclass
class Client:
    """What a client has, as it counts itself, and what the manager knows of it."""

    holder: Holder
    lease_end: float = 0.0
    restores_until: float = 0.0
    is_gone: bool = False
    has: set[Inode] = field(default_factory=set)
    kept: dict[Inode, int] = field(default_factory=dict)
    revoked: dict[Inode, bool] = field(default_factory=dict)
    asked: set[Inode] = field(default_factory=set)
    open: Counter[Inode] = field(default_factory=Counter)
    said_open: set[Inode] = field(default_factory=set)
    heard: tuple[frozenset[Inode], int] | None = None
    last: int = 0


class Attempt:
    """A change, a look or a read in a thread of its own; a change holds what it has begun until its end."""

    def __init__(self, kind: str, by: bytes | None, holder: Holder, inode: Inode, now: float) -> None:
        self.kind, self.by, self.holder, self.inodes, self.since = kind, by, holder, [inode], now
        self.registered = set[Inode]()
        self.is_compared = self.is_gone = False
        self.waits, self._progress = 0, threading.Condition()
        self.has_begun, self._more = threading.Event(), queue.Queue[Inode | None]()
        self._doing: Doing | None = None

    def start(self, manager: DelegationManager) -> None:
        calls = {"change": self._change, "look": self._look, "read": self._read}
        self._doing = Doing(calls[self.kind], manager)
        self.settle(0)

    def _look(self, manager: DelegationManager) -> bool:
        abandoned.set(self._about_to_wait)
        return manager.recall_writer(self.holder, self.inodes[0])

    def _read(self, manager: DelegationManager) -> int:
        abandoned.set(self._about_to_wait)
        return manager.grant_data(self.holder, self.inodes[0])

    def _change(self, manager: DelegationManager) -> None:
        abandoned.set(self._about_to_wait)
        directories = (DIRECTORY,) if DIRECTORY in self.inodes else ()
        with manager.write_intent(self.holder, *directories, inodes=tuple(self.inodes)) as recall:
            self.has_begun.set()
            while inode := self._more.get(timeout=20 * SOON):
                recall(inode)
                self.has_begun.set()

    def add(self, inode: Inode, now: float) -> None:
        """Have the change take in another file."""
        self.has_begun.clear()
        self.is_compared, self.since, before = False, now, self.waits
        self.inodes.append(inode)
        self._more.put(inode)
        self.settle(before)

    def end(self) -> int | None:
        """The errno with which it ends."""
        self._more.put(None)
        return errno_of(self.result)

    def result(self) -> object:
        assert self._doing
        return self._doing.result()

    def _about_to_wait(self) -> bool:
        with self._progress:
            self.waits += 1
            self._progress.notify_all()
        return self.is_gone

    @property
    def is_over(self) -> bool:
        return self.has_begun.is_set() or (self._doing is not None and self._doing.done)

    def settle(self, before: int) -> None:
        """Return once it waits for the manager's next change of state, has begun or has ended."""
        with self._progress:
            for _ in range(5000):
                if self._progress.wait_for(lambda: self.waits > before or self.is_over, 0.001):
                    return
        raise AssertionError("it neither waits nor goes on")


def at_once(call: Callable[[], object]) -> object:
    """What it returns to a thread that must not wait."""
    token = may_block.set(False)
    try:
        return call()
    except WouldBlock:
        return WAITS
    finally:
        may_block.reset(token)


class Histories(RuleBasedStateMachine):
    """Two clients and the device's mount, whose holder has no name and holds nothing."""

    @initialize()
    def begin(self) -> None:
        self.now, self.next_file = 1000.0, 100
        self._folder = tempfile.TemporaryDirectory()
        self.file = open_leases(Path(self._folder.name, "leases"))
        self.clients: dict[bytes, Client] = {}
        self.on_file: dict[bytes, float] = {}
        self.start_server()
        for name in NAMES:
            self.come(name)

    def start_server(self) -> None:
        leases = PersistentLeases(self.file, LEASE, lambda: self.now, lambda: b"16 bytes, a boot")
        self.manager = DelegationManager(LEASE, lambda: self.now, leases=leases)
        self.marks = SharedBitmapView(os.dup(self.manager.bitmap.descriptor()))
        self.former = {name for name, end in self.on_file.items() if end > self.now}
        self.marks_all, self.has_device = bool(self.former), True
        self.attempts: list[Attempt] = []
        self.writers: dict[Inode, bytes] = {}
        self.looked_at, self.by_kernel = set[Inode](), Counter[Inode]()

    # What the model knows

    def formers(self, but: bytes | None) -> bool:
        self.former = {name for name in self.former if self.on_file[name] > self.now}
        return bool(self.former - {but})

    def lives(self, name: bytes) -> bool:
        client = self.clients.get(name)
        return client is not None and client.lease_end > self.now

    def is_present(self, name: bytes | None) -> bool:
        """Whether it may ask this server for something."""
        return name is None or (name in self.clients and bool(self.clients[name].holder))

    def known(self) -> list[bytes]:
        """The clients that have a lease of this server, or had one."""
        return [name for name in self.clients if name not in self.former and self.is_present(name)]

    def active(self, name: bytes) -> Client | None:
        client = self.clients.get(name)
        return client if client and name in self.known() and not client.is_gone else None

    def at(self, inode: Inode) -> Inode:
        """A file, or the one that was made last."""
        return Inode(self.next_file) if inode == NEWEST else inode

    def holder(self, by: bytes | None) -> Holder:
        return DEVICE if by is None else self.clients[by].holder

    def changes(self, inode: Inode, but: bytes | None) -> list[Attempt]:
        return [a for a in self.attempts if inode in a.registered and a.by != but]

    def may_have(self, name: bytes) -> bool:
        return self.has_device and self.lives(name) and not self.formers(name)

    def may_grant(self, name: bytes, inode: Inode) -> bool:
        return (
            self.may_have(name)
            and not self.changes(inode, name)
            and inode not in self.looked_at
            and not self.by_kernel[inode]
            and self.writers.get(inode, name) == name
        )

    def keepers(self, inode: Inode, but: bytes | None = None) -> list[bytes]:
        return [name for name in self.known() if name != but and inode in self.clients[name].kept]

    def drop(self, name: bytes, inode: Inode) -> None:
        client = self.clients[name]
        client.kept.pop(inode, None)
        client.has.discard(inode)
        if self.writers.get(inode) == name:
            del self.writers[inode]
            self.looked_at.discard(inode)

    def revoke(self, name: bytes) -> None:
        client = self.clients[name]
        for inode in list(client.kept):
            is_late = bool(self.changes(inode, name))
            client.revoked[inode] = is_late or client.revoked.get(inode, False)
            self.drop(name, inode)
        client.asked.clear()

    def note_change(self, inode: Inode, by: bytes | None, *, of_all: bool = False) -> None:
        for name, client in self.clients.items():
            if (of_all or name != by) and inode in client.revoked:
                client.revoked[inode] = True

    def is_taken(self, inode: Inode) -> bool:
        return inode == DIRECTORY and any(inode in a.registered for a in self.attempts)

    def ask(self, others: dict[bytes, set[Inode]]) -> bool:
        """Recall what these have. Returns whether any of them has to be waited for."""
        for name, wanted in others.items():
            if self.lives(name) and not self.clients[name].is_gone:
                self.clients[name].asked |= wanted
            else:
                self.revoke(name)
        return any(self.lives(name) and not self.clients[name].is_gone for name in others)

    def in_the_way(self, attempt: Attempt) -> bool:
        """Perform what the attempt does in the manager. Returns whether it goes on waiting."""
        if attempt.kind == "read":
            return self.read_waits(attempt.by or b"", attempt.inodes[0])
        if self.formers(attempt.by):
            return True
        if attempt.kind == "look":
            return self.look_waits(attempt.by, attempt.inodes[0])
        for inode in attempt.inodes:
            if inode not in attempt.registered:
                if self.is_taken(inode):
                    return True
                attempt.registered.add(inode)
                self.note_change(inode, attempt.by)
        others: dict[bytes, set[Inode]] = {}
        for inode in attempt.inodes:
            for name in self.keepers(inode, attempt.by):
                others.setdefault(name, set()).add(inode)
        return self.ask(others)

    def read_waits(self, name: bytes, inode: Inode) -> bool:
        if self.may_grant(name, inode) or not self.may_have(name):
            return False
        return not (self.by_kernel[inode] or inode in self.clients[name].kept)

    def look_waits(self, by: bytes | None, inode: Inode) -> bool:
        self.marks_all = self.marks_all and self.formers(None)
        writer = self.writers.get(inode, by)
        if writer == by or writer is None:
            return False
        self.looked_at.add(inode)
        return self.ask({writer: {inode}})

    # What goes on

    def settle(self) -> None:
        """Have all that waits look again, as often as one may have changed something for another."""
        for _ in range(3):
            waiting = [(a, a.waits) for a in self.attempts if not a.is_over]
            self.manager.forget(NOBODY, 0)
            for attempt, before in waiting:
                attempt.settle(before)
        for _ in range(2):
            for attempt in [a for a in self.attempts if not a.is_compared]:
                self.compare(attempt)

    def compare(self, attempt: Attempt) -> None:
        """See whether an attempt that had not begun is where the model has it."""
        if attempt not in self.attempts:
            return
        waits = self.in_the_way(attempt)
        if waits and self.now < attempt.since + WAITED:
            assert not attempt.is_over, "it began though something was in its way"
            return
        assert attempt.is_over, "it waits, and nothing is in its way"
        attempt.is_compared = True
        if waits:
            assert errno_of(attempt.result) == errno.ETIMEDOUT
        elif attempt.kind == "read":
            self.granted(attempt.by or b"", attempt.inodes[0], attempt.result())
        else:
            self.see_that_nobody_has(attempt)
        if waits or attempt.kind != "change":
            self.attempts.remove(attempt)

    def see_that_nobody_has(self, attempt: Attempt) -> None:
        looks = attempt.kind == "look"
        for name, client in self.clients.items():
            for inode in attempt.inodes:
                unseen = self.writers.get(inode) == name if looks else inode in client.has
                assert name == attempt.by or not (self.lives(name) and unseen), "another still has it"

    def start(self, kind: str, by: bytes | None, inode: Inode) -> None:
        rivals = [a for a in self.attempts if DIRECTORY in a.inodes and inode == DIRECTORY]
        if len(self.attempts) < 4 and len(rivals) < 2 - self.formers(None) and self.is_present(by):
            attempt = Attempt(kind, by, self.holder(by), inode, self.now)
            self.attempts.append(attempt)
            attempt.start(self.manager)
            self.settle()

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
            waits = bool(self.keepers(inode, by))
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
            writer = self.writers.get(inode, by)
            if waits := self.formers(by) or writer != by:
                self.looked_at |= set() if self.formers(by) else {inode}
            if not self.formers(by):
                self.marks_all = self.marks_all and self.formers(None)
            assert found == (WAITS if waits else False)

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

    @rule(inode=files, how=some.sampled_from(["end", "begin", "begin", "already", "try"]))
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
        if how == "try":
            may = None if self.formers(None) or keepers else not is_open
            assert self.manager.try_writing(inode) == may
        else:
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

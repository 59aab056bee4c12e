# SPDX-License-Identifier: Apache-2.0
"""A model of delegations, changes, looks, leases and restarts of the server.

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

from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize

from millpond.fs.coherence.delegation_table import DEVICE, Holder, Inode
from millpond.fs.coherence.lease_file import PersistentLeases, open_leases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.coherence.shared_bitmap import SharedBitmapView
from millpond.fs.vfs.inode_api import abandoned

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
    """What it returns to whoever is gone as soon as it would wait."""
    token = abandoned.set(lambda: True)
    try:
        return call()
    except OSError as error:
        assert error.errno == errno.ECONNABORTED
        return WAITS
    finally:
        abandoned.reset(token)


class DelegationModel(RuleBasedStateMachine):
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
        for attempt in [a for a in self.attempts if not a.is_compared]:
            self.in_the_way(attempt)  # revokes what an earlier attempt waits for
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

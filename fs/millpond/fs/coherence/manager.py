# SPDX-License-Identifier: Apache-2.0
"""Edge (threads, the clock): the delegation manager: grants delegations, recalls them for changes, and waits
for the clients' answers or the end of their leases.

Each answer of a client renews its lease. The client counts the lease from when it sent the answer, the
manager from when the answer came: the holder always stops first. A change waits for the clients that have to
return a delegation, at most until their leases have expired.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from millpond.fs.coherence.delegation_table import DEVICE, DelegationTable, Holder, Inode, WriteIntent
from millpond.fs.coherence.lease_file import LEASE_SECONDS, PersistentLeases
from millpond.fs.coherence.shared_bitmap import SharedBitmap
from millpond.fs.vfs.inode_api import abandoned
from millpond.fs.vfs.path_api import os_error

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 3.0  # then the device's mount is not expected any more
_MAX_WAIT_LEASES = 3  # leases; a longer wait is for others that wait themselves


@dataclass(slots=True)
class _Client:
    name: bytes | None = None
    last_heard: float = -math.inf
    is_gone: Callable[[], bool] = lambda: False
    recalls: set[Inode] = field(default_factory=set)


P = ParamSpec("P")
R = TypeVar("R")


def _locked(of_table: Callable[Concatenate[DelegationTable, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method of the manager that calls one of its table, with the lock, and wakes all that wait."""

    @functools.wraps(of_table)
    def call(self: DelegationManager, /, *arguments: P.args, **more: P.kwargs) -> R:
        with self._changed:
            self._changed.notify_all()
            return of_table(self._table, *arguments, **more)

    return call


class DelegationManager:
    """Delegations, leases and recalls of one volume. Threads may call at once. ``clock`` is in seconds. With
    ``device``, nothing is granted before the device's mount has reported which files its kernel writes; with
    ``leases``, nothing is changed, looked up or granted before the clients of an earlier server are back, or
    their leases have expired (a grace period).
    """

    def __init__(
        self,
        lease: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        *,
        device: bool = False,
        leases: PersistentLeases | None = None,
    ) -> None:
        self.lease, self._clock, self._leases = lease, clock, leases
        self._device_reported = not device
        self._expected = clock() + _REPORT_SECONDS
        self._presence: object = None
        self.bitmap = SharedBitmap()
        self._changed = threading.Condition()
        self._table = DelegationTable(self.bitmap)
        self._clients: dict[Holder, _Client] = {}
        self._numbers = itertools.count(DEVICE + 1)
        self._restoring: dict[Holder, float] = {}
        self._marks_all = self._former_leases_last(DEVICE)
        if self._marks_all:  # it is not known which files were delegated to be written
            self.bitmap.add_all()

    end_write = _locked(DelegationTable.end_write)
    end_writing = _locked(DelegationTable.end_writing)
    is_stale = _locked(DelegationTable.is_stale)
    forget = _locked(DelegationTable.forget)
    closed = _locked(DelegationTable.closed)
    report_open = _locked(DelegationTable.report_open)

    def join(self, name: bytes | None = None) -> Holder:
        """Register a new client; ``name`` finds its lease from an earlier server. Returns its holder
        number.
        """
        with self._changed:
            holder = Holder(next(self._numbers))
            self._clients[holder] = _Client(name)
            return holder

    def leave(self, holder: Holder) -> None:
        """Remove a client that holds nothing and will not come back."""
        with self._changed:
            self._table.leave(holder)
            self._erase_lease(self._clients.pop(holder, None))
            self._restoring.pop(holder, None)
            self._changed.notify_all()

    def _erase_lease(self, client: _Client | None) -> None:
        if self._leases and client and client.name:
            self._leases.end(client.name)

    def begin_lease(self, holder: Holder, is_gone: Callable[[], bool]) -> None:
        """Start a client's lease: its callback channel is connected, and it has dropped all of an earlier
        lease. ``is_gone`` returns whether the client has closed the channel, which it does only when it holds
        nothing any more or its process has ended.
        """
        with self._changed:
            self._table.reconnected(holder)
            if client := self._clients.get(holder):
                client.is_gone = is_gone
                self._restoring.setdefault(holder, self._clock() + self.lease)  # until it has, or is late
            self.renew_lease(holder)
            self._changed.notify_all()

    def renew_lease(self, holder: Holder) -> None:
        """Start a client's lease anew, after an answer."""
        with self._changed:
            client = self._clients.get(holder)
            if client is not None:
                if self._leases and client.name:
                    self._leases.renew(client.name)
                client.last_heard = self._clock()

    def expire(self, holder: Holder) -> None:
        """End the lease of a client that is gone or has returned everything; it may reconnect."""
        with self._changed:
            if client := self._clients.get(holder):
                client.last_heard = -math.inf
                self._erase_lease(client)
            self._expire(holder)

    def has_lease(self, holder: Holder) -> bool:
        """Return whether the client's lease is valid."""
        client = self._clients.get(holder)
        return client is not None and client.last_heard + self.lease > self._clock()

    def lease_of(self, holder: Holder) -> tuple[float | None, int]:
        """Return the seconds since the client was last heard, None if its lease has expired, and how many
        delegations it holds.
        """
        with self._changed:
            client, kept = self._clients.get(holder), self._table.count(holder)
            age = math.inf if client is None else self._clock() - client.last_heard
            return (age if age < self.lease else None), kept

    @property
    def device(self) -> tuple[bool, int]:
        """Whether the device's mount has reported, and how many files its kernel writes by passthrough."""
        with self._changed:
            return self._device_reported, self._table.written

    def report_device(self, presence: object = None) -> None:
        """Note that the device's mount has reported which files its kernel writes by passthrough, over the
        connection ``presence``.
        """
        with self._changed:
            self._device_reported, self._presence = True, presence
            self._changed.notify_all()

    def lose_device(self, presence: object) -> None:
        """Note that this connection of the device's mount has ended: if it has no other, nothing is granted
        until the mount has reported again what its kernel goes on writing.
        """
        with self._changed:
            if presence is self._presence:
                self._device_reported, self._expected = False, self._clock() + _REPORT_SECONDS

    def share_bitmap(self) -> None:
        """Move the bitmap to memory that can be passed to the device's mount. Raises OSError."""
        with self._changed:
            self.bitmap.descriptor()

    def grant_read(self, holder: Holder, inode: Inode) -> int:
        """Grant a read delegation. Returns the grant's number, 0 for a refusal."""
        with self._changed:
            return self._grant_read(holder, inode)

    def _grant_read(self, holder: Holder, inode: Inode) -> int:
        return self._table.grant_read(holder, inode) if self._may_grant(holder) else 0

    def _may_grant(self, holder: Holder) -> bool:
        return self._device_reported and self.has_lease(holder) and not self._former_leases_last(holder)

    def grant_reads(self, holder: Holder, inodes: Sequence[Inode]) -> list[int]:
        """Grant a read delegation of each inode. Returns the grants' numbers, 0 for a refusal."""
        with self._changed:
            grant, may = self._table.grant_read, self._may_grant(holder)
            return [grant(holder, inode) for inode in inodes] if may else [0] * len(inodes)

    def return_unused(self, holder: Holder, grants: Iterable[tuple[int, int]]) -> None:
        """Return the client's delegations of these inodes, if granted by a number up to the given one."""
        with self._changed:
            for inode, upto in grants:
                self._table.return_delegation(holder, inode, upto)
            self._changed.notify_all()

    def grant_data(self, holder: Holder, inode: Inode) -> int:
        """Grant a read delegation after write intents that have begun, unless they wait for this client, or
        the device's kernel writes the file. Returns the grant's number, 0 for a refusal. Raises OSError.
        """
        end = self._clock() + _MAX_WAIT_LEASES * self.lease
        with self._changed:
            while not (number := self._grant_read(holder, inode)):
                if not self._may_grant(holder):
                    return 0
                if self._table.is_written(inode) or self._table.holds(holder, inode):
                    return 0
                self._wait(end)
            return number

    def grant_write(self, holder: Holder, inode: Inode) -> int:
        """Grant a write delegation of a new file, before anybody else can find it. Returns the grant's
        number, 0 for a refusal.
        """
        with self._changed:
            return self._table.grant_write(holder, inode) if self._may_grant(holder) else 0

    def recall_writer(self, holder: Holder, inode: Inode) -> bool:
        """Recall another client's write delegation of a file that is about to be looked at, and wait. False:
        there certainly was none. Raises OSError.
        """
        end = self._clock() + _MAX_WAIT_LEASES * self.lease
        waited = self._await_former_holders(holder, end)
        if self._table.other_writer(holder, inode) is None:
            return waited
        with self._changed:
            while other := self._table.other_writer(holder, inode):
                self._table.recall_write(inode)
                self._recall_and_wait({other: {inode}}, end)
        return True

    def _await_former_holders(self, holder: Holder, end: float) -> bool:
        """Wait until nobody else may hold a delegation from an earlier server, with gathered writes. False:
        nobody did. Raises OSError.
        """
        if not self._marks_all and not self._former_leases_last(holder):
            return False
        with self._changed:
            waits = self._former_leases_last(holder)
            while self._former_leases_last(holder):
                self._wait(end)
            if self._marks_all and not self._former_leases_last(DEVICE):
                self._marks_all = False
                self.bitmap.remove_all()
            return waits

    def is_written(self, inode: Inode) -> bool:
        """Return whether the device's kernel writes the file by passthrough, or may, since the device's mount
        has not reported.
        """
        with self._changed:
            return not self._device_reported or self._table.is_written(inode)

    def opened(self, holder: Holder, inode: Inode) -> bool:
        """Note that the client opens a file and caches it. False if it may not: the device's kernel writes
        the file by passthrough, or no device's mount has reported. Never waits: the file may be a new one.
        """
        with self._changed:
            return self._device_reported and self._table.opened(holder, inode)

    def await_device(self) -> None:
        """Wait until the device's mount has reported, or is not expected any more. Raises OSError."""
        with self._changed:
            while not self._device_reported and self._clock() < self._expected:
                self._wait(self._expected, late=math.inf)

    @contextlib.contextmanager
    def write_intent(
        self, holder: Holder, *directories: int, inodes: tuple[int, ...] = (), reclaim: bool = False
    ) -> Iterator[Callable[..., None]]:
        """Hold a write intent on these directories, which no other intent changes meanwhile, and on other
        files. Yields what adds more of these to it. With ``reclaim`` no client of an earlier server is waited
        for: the holder alone had a delegation of the file by it. Raises OSError.
        """
        change = WriteIntent(holder)
        try:
            for found, alone in ((sorted({*directories}), True), (inodes, False)):
                if found:
                    self.add(change, found, alone=alone, reclaim=reclaim)
            yield lambda *more: self.add(change, more, alone=False)
        finally:
            self.end(change)

    def add(
        self, change: WriteIntent, inodes: Collection[Inode], *, alone: bool, reclaim: bool = False
    ) -> None:
        """Add inodes to a write intent, and wait until no other client holds a delegation of them; those to
        be ``alone`` in order, or two intents would deadlock.
        """
        end = self._clock() + _MAX_WAIT_LEASES * self.lease
        with self._changed:
            while not reclaim and self._former_leases_last(change.holder):
                self._wait(end)
            for inode in inodes:
                while not self._table.begin(change, inode, alone=alone):
                    self._wait(end)
            while others := self._table.conflicts(change):
                self._recall_and_wait(others, end)

    def await_locks(self, holder: Holder) -> None:
        """Wait until others have reclaimed their file locks after a loss of their leases, or of an earlier
        server. Raises OSError.
        """
        end = self._clock() + _MAX_WAIT_LEASES * self.lease
        with self._changed:
            while self.others_reclaim(holder):
                self._wait(end)

    def others_reclaim(self, holder: Holder) -> bool:
        """Return whether others may still have file locks to reclaim."""
        now = self._clock()
        late = any(end > now and other != holder for other, end in list(self._restoring.items()))
        return late or self._former_leases_last(holder)

    def restored_locks(self, holder: Holder) -> None:
        """Note that a client has reclaimed all file locks that it can."""
        with self._changed:
            self._restoring.pop(holder, None)
            self._changed.notify_all()

    def _former_leases_last(self, holder: Holder) -> bool:
        """Return whether another client may hold a delegation from an earlier server."""
        client = self._clients.get(holder, _Client())
        return self._leases is not None and self._leases.has_former(client.name)

    def _recall_and_wait(self, others: Mapping[Holder, set[Inode]], end: float) -> None:
        """Recall these delegations, and wait for a while; revoke those of clients that are gone."""
        over = min(self._recall(holder, inodes) for holder, inodes in others.items())
        if not self._expire_if_gone(others):
            self._wait(min(end, over, self._clock() + _POLL_SECONDS), late=end)
            self._expire_if_gone(others)

    def _expire_if_gone(self, holders: Iterable[Holder]) -> bool:
        gone = [one for one in holders if not self.has_lease(one) or self._clients[one].is_gone()]
        for holder in gone:
            self._expire(holder)
        return bool(gone)

    def _recall(self, holder: Holder, inodes: set[Inode]) -> float:
        """Queue a recall for the client. Returns when its lease ends."""
        client = self._clients[holder]
        if not inodes <= client.recalls:
            client.recalls |= inodes
            self._changed.notify_all()
        return client.last_heard + self.lease

    def _wait(self, until: float, late: float | None = None) -> None:
        """Wait for a change of state, until ``until``. Raises OSError: ETIMEDOUT after ``late``."""
        now = self._clock()
        if now >= (until if late is None else late):
            raise os_error(errno.ETIMEDOUT)
        if abandoned.get()():
            raise os_error(errno.ECONNABORTED)
        self._changed.wait(min(max(0.0, until - now) + 0.001, _POLL_SECONDS))

    def _expire(self, holder: Holder) -> None:
        self._table.expire(holder)
        if client := self._clients.get(holder):
            client.recalls.clear()
        self._changed.notify_all()

    def end(self, change: WriteIntent) -> None:
        """End a write intent, whether the change was done or not."""
        with self._changed:
            if change.alone and change.holder != DEVICE:  # it may have removed names of the others
                self.bitmap.note_removals(change.inodes - change.alone)
            self._table.end(change)
            self._changed.notify_all()

    def next_recall(self, holder: Holder, seconds: float) -> tuple[frozenset[Inode], int]:
        """Wait for recalls of a client, ``seconds`` at most. Returns the inodes, and the client's last grant.
        The caller sends them once, and ``return_delegations`` must follow.
        """
        with self._changed:
            client = self._clients.get(holder)
            if client is None:
                return frozenset(), 0
            self._changed.wait_for(lambda: client.recalls or holder not in self._clients, seconds)
            return frozenset(client.recalls), self._table.last_grant(holder)

    def return_delegations(
        self, holder: Holder, inodes: Collection[Inode], upto: int, is_open: Collection[int]
    ) -> None:
        """Return a client's delegations of these inodes, granted by numbers up to ``upto``; ``is_open`` are
        the ones that it has open locally, cached.
        """
        with self._changed:
            if not (client := self._clients.get(holder)):
                return
            client.recalls.difference_update(inodes)
            for inode in inodes:
                self._table.report_open(holder, inode, inode in is_open)
                self._table.return_delegation(holder, inode, upto)
            self._changed.notify_all()

    def begin_writing(self, inode: Inode, *, already: bool = False) -> bool:
        """Note that the device's kernel is to write the file by passthrough. False if a client holds a
        delegation of it or has it open. Called within a write intent on the file, unless the kernel writes it
        ``already``: then it is recalled, and not waited for.
        """
        with self._changed:
            for holder in self._table.readers(inode) if already else ():
                self._recall(holder, {inode})
            return self._table.begin_writing(inode, already=already)

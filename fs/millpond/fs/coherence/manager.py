"""Edge (threads, the clock): the lock master: grants, recalls them for whoever changes a file, and waits.

A client holds what it was granted for as long as its lease, which each of its answers renews. It counts from
when it sent them, the master from when they came: the holder always stops first. A change waits for those who
must give something up, at most until their leases have run out.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from millpond.fs.coherence.delegation_table import DEVICE, DelegationTable, Holder, Inode, WriteIntent
from millpond.fs.coherence.lease_file import LEASE_SECONDS, PersistentLeases
from millpond.fs.coherence.shared_bitmap import SharedBitmap
from millpond.fs.filelocks.service import LockService
from millpond.fs.vfs.inode_api import WouldBlock, abandoned, may_block
from millpond.fs.vfs.path_api import os_error

_LOOK_SECONDS = 0.2
_ARRIVAL_SECONDS = 3.0  # after which the device's mount is not expected any more
_PATIENCE = 3  # leases: who waits longer waits for others that wait
_CONTENDED_SECONDS = 0.25  # for which a directory that others wanted is granted to nobody exclusively
_MOST_CONTENDED = 1024


@dataclass(slots=True)
class _Client:
    name: bytes | None = None
    heard: float = -math.inf
    is_gone: Callable[[], bool] = lambda: False
    recalls: set[Inode] = field(default_factory=set)


class AnnouncedChange:
    """A change that has begun. ``revoke`` adds files to it."""

    def __init__(self, master: DelegationManager, change: WriteIntent) -> None:
        self._master, self._change = master, change

    def revoke(self, *inodes: int) -> None:
        """Return once nobody else keeps these, too. Raises WouldWait and OSError."""
        self._master.add(self._change, [Inode(inode) for inode in inodes], alone=False)


class DelegationManager:
    """Of one volume's locks. Threads may call at once. ``clock`` is in seconds. With ``device``, nothing is
    granted before the device's mount has told which files its kernel writes; with ``leases``, nothing changed
    before those of an earlier master are over. ``files`` are the file locks.
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
        self._knows_the_device = not device
        self._expected = clock() + _ARRIVAL_SECONDS
        self.marks = SharedBitmap()
        self._table = DelegationTable(self.marks)
        self._contended: dict[Inode, float] = {}
        self._moved = threading.Condition()
        self._clients: dict[Holder, _Client] = {}
        self._numbers = itertools.count(DEVICE + 1)
        self.files = LockService(self._has_lapsed)

    def join(self, name: bytes | None = None) -> Holder:
        """A new client, whom an earlier master may have known by its name."""
        with self._moved:
            holder = Holder(next(self._numbers))
            self._clients[holder] = _Client(name)
            return holder

    def leave(self, holder: Holder) -> None:
        """It keeps nothing and will not come back."""
        with self._moved:
            self._table.leave(holder)
            self._end_lease(self._clients.pop(holder, None))
            self._moved.notify_all()
        self.files.end(holder)

    def _has_lapsed(self, holder: int) -> bool:
        """Whether nobody need wait for it. The device has no lease: its connection ends with its mount."""
        client = self._clients.get(Holder(holder))
        return holder != DEVICE and (not self.may_hold(Holder(holder)) or client is None or client.is_gone())

    def _end_lease(self, client: _Client | None) -> None:
        if self._leases and client and client.name:
            self._leases.end(client.name)

    def attend(self, holder: Holder, is_gone: Callable[[], bool]) -> None:
        """It can be told what to give up from now on, and has given up all of an earlier lease: its lease
        begins. ``is_gone`` says when it, who closes the connection only when it keeps nothing any more, or
        its process is.
        """
        with self._moved:
            self._table.returned(holder)
            if client := self._clients.get(holder):
                client.is_gone = is_gone
            self.heard(holder)
            self._moved.notify_all()

    def heard(self, holder: Holder) -> None:
        """It has answered: its lease begins anew."""
        with self._moved:
            client = self._clients.get(holder)
            if client is not None:
                if self._leases and client.name:
                    self._leases.renew(client.name)
                client.heard = self._clock()

    def gone(self, holder: Holder) -> None:
        """It lives no more, or says that it keeps nothing; it may come back."""
        with self._moved:
            if client := self._clients.get(holder):
                client.heard = -math.inf
                self._end_lease(client)
            self._lapse(holder)

    def may_hold(self, holder: Holder) -> bool:
        """Whether its lease lasts."""
        client = self._clients.get(holder)
        return client is not None and client.heard + self.lease > self._clock()

    def lease_of(self, holder: Holder) -> tuple[float | None, int]:
        """The seconds since the holder was heard, None if its lease is over, and how many files it keeps."""
        with self._moved:
            client, kept = self._clients.get(holder), self._table.count(holder)
            age = math.inf if client is None else self._clock() - client.heard
            return (age if age < self.lease else None), kept

    @property
    def device(self) -> tuple[bool, int]:
        """Whether the device's mount has told what its kernel writes, and how many files that are."""
        with self._moved:
            return self._knows_the_device, self._table.written

    @property
    def exclusives(self) -> int:
        """How many directories are held exclusively."""
        with self._moved:
            return self._table.exclusives

    def shared_marks(self) -> int:
        """The descriptor of the marks, for the device's mount. Raises OSError."""
        with self._moved:
            return self.marks.shared()

    def device_is_present(self) -> None:
        """The device's mount has told what its kernel writes."""
        with self._moved:
            self._knows_the_device = True
            self._moved.notify_all()

    def count(self, holder: Holder) -> int:
        """How many files it keeps."""
        with self._moved:
            return self._table.count(holder)

    def share(self, holder: Holder, inode: int) -> int:
        """Grant that it keeps what it is told next of this file; the grant's number, 0 for a refusal."""
        with self._moved:
            return self._share(holder, Inode(inode))

    def _share(self, holder: Holder, inode: Inode) -> int:
        may = self._knows_the_device and self.may_hold(holder)
        return self._table.share(holder, inode) if may else 0

    def share_data(self, holder: Holder, inode: int) -> int:
        """The same after a change that has begun, unless the change waits for this client, or the device's
        kernel writes the file. Raises WouldWait and OSError.
        """
        end = self._clock() + _PATIENCE * self.lease
        with self._moved:
            while not (number := self._share(holder, Inode(inode))):
                if not (self._knows_the_device and self.may_hold(holder)):
                    return 0
                if self._table.is_written(Inode(inode)) or self._table.keeps(holder, Inode(inode)):
                    return 0
                self._wait(end)
            return number

    def take(self, holder: Holder, inode: int) -> int:
        """Grant a directory exclusively; the grant's number, 0 for a refusal. It waits for nobody."""
        directory = Inode(inode)
        with self._moved:
            if not (self._knows_the_device and self.may_hold(holder)) or self._others_outlast(holder):
                return 0
            if self._clock() < self._contended.get(directory, -math.inf):
                return 0
            return self._table.take(holder, directory)

    def untake(self, holder: Holder, inode: int) -> None:
        """It is not to be exclusive after all."""
        with self._moved:
            self._table.untake(holder, Inode(inode))
            self._moved.notify_all()

    def recall(self, holder: Holder, inodes: Iterable[int]) -> None:
        """Have it give these up before long, though nobody waits for them."""
        with self._moved:
            if holder in self._clients:
                self._recall(holder, {Inode(inode) for inode in inodes})

    def has_taken(self, holder: Holder, inode: int, number: int) -> bool:
        """Whether it is the holder's exclusively, by this grant."""
        with self._moved:
            return self._table.has_taken(holder, Inode(inode), number)

    @contextlib.contextmanager
    def telling(self, holder: Holder, grants: Mapping[int, int]) -> Iterator[None]:
        """Around names that the holder tells, of directories that are his by these grants. Raises OSError:
        ESTALE if one is not: others may know better by now.
        """
        inodes = [Inode(inode) for inode in grants]
        with self._moved:
            if not all(self._table.has_taken(holder, inode, grants[inode]) for inode in inodes):
                raise os_error(errno.ESTALE)
            self._table.begin_telling(inodes)
        try:
            yield
        finally:
            with self._moved:
                self._table.end_telling(inodes)
                self._moved.notify_all()

    def settle(self, holder: Holder, inode: int) -> bool:
        """Return once nobody else has this directory exclusively; False if nobody has any. Raises WouldWait
        and OSError.
        """
        directory, table = Inode(inode), self._table
        if not table.exclusives and not table.is_told(holder, (directory,)):
            return False
        end = self._clock() + _PATIENCE * self.lease
        with self._moved:
            while other := table.excluded_by(holder, directory):
                self._contend(directory)
                self._give_way({other: {directory}}, end)
            while table.is_told(holder, (directory,)):
                self._wait(end)
        return True

    def _contend(self, directory: Inode) -> None:
        """Others want it, too: it is granted to nobody exclusively for a while."""
        now = self._clock()
        if len(self._contended) >= _MOST_CONTENDED:
            self._contended = {inode: end for inode, end in self._contended.items() if end > now}
        if len(self._contended) < _MOST_CONTENDED:
            self._contended[directory] = now + _CONTENDED_SECONDS

    def is_written(self, inode: int) -> bool:
        """Whether the device's kernel writes it."""
        with self._moved:
            return self._table.is_written(Inode(inode))

    def is_late(self, holder: Holder, inode: int) -> bool:
        """Whether others have changed what it kept when its lease ended, which it has not given up since."""
        with self._moved:
            return self._table.is_late(holder, Inode(inode))

    def forget(self, holder: Holder, inode: int) -> None:
        """It has forgotten the file."""
        with self._moved:
            self._table.forget(holder, Inode(inode))
            self._moved.notify_all()

    def opened(self, holder: Holder, inode: int) -> bool:
        """It opens the file, to keep what it reads; False if it may not: the device's kernel writes it, or
        there is no device's mount that would tell. Raises WouldWait.
        """
        self.await_device()
        with self._moved:
            return self._knows_the_device and self._table.opened(holder, Inode(inode))

    def await_device(self) -> None:
        """Return once the device's mount has told what its kernel writes, or is not expected any more. Raises
        WouldWait and OSError.
        """
        with self._moved:
            while not self._knows_the_device and self._clock() < self._expected:
                self._wait(self._expected, late=math.inf)

    def closed(self, holder: Holder, inode: int) -> None:
        """It has closed the file once."""
        with self._moved:
            self._table.closed(holder, Inode(inode))

    def says_closed(self, holder: Holder, inode: int) -> None:
        """It has closed what it had opened without a word."""
        with self._moved:
            self._table.says_open(holder, Inode(inode), is_open=False)

    @contextlib.contextmanager
    def change(
        self, holder: Holder, *directories: int, inodes: tuple[int, ...] = ()
    ) -> Iterator[AnnouncedChange]:
        """Around a change of these directories, which nobody else changes meanwhile, and of other files.
        Raises WouldWait and OSError.
        """
        change = WriteIntent(holder)
        try:
            self.add(change, [Inode(inode) for inode in sorted(set(directories))], alone=True)
            self.add(change, [Inode(inode) for inode in inodes], alone=False)
            yield AnnouncedChange(self, change)
        finally:
            self.end(change)

    def add(self, change: WriteIntent, inodes: Collection[Inode], *, alone: bool) -> None:
        """A change is to be of these, too; ``alone`` in order, or two would wait for each other. Returns
        once nobody else keeps them.
        """
        end = self._clock() + _PATIENCE * self.lease
        with self._moved:
            while self._others_outlast(change.holder):
                self._wait(end)
            for inode in inodes:
                if self._table.exclusives and self._table.excluded_by(change.holder, inode):
                    self._contend(inode)
                while not self._table.begin(change, inode, alone=alone):
                    self._wait(end)
            self._clear_the_way(change, end)

    def _others_outlast(self, holder: Holder) -> bool:
        """Whether another client may go by what an earlier master granted it."""
        client = self._clients.get(holder)
        return self._leases is not None and self._leases.outlast(client.name if client else None)

    def _clear_the_way(self, change: WriteIntent, end: float) -> None:
        while others := self._table.in_the_way(change):
            self._give_way(others, end)
        while self._table.is_told(change.holder, change.inodes):
            self._wait(end)

    def _give_way(self, others: Mapping[Holder, set[Inode]], end: float) -> None:
        """Wait for a while until these have given up that."""
        if not may_block.get():
            raise WouldBlock
        over = min(self._recall(holder, inodes) for holder, inodes in others.items())
        if not self._lapse_if_gone(others):
            self._wait(min(end, over, self._clock() + _LOOK_SECONDS), late=end)
            self._lapse_if_gone(others)

    def _lapse_if_gone(self, holders: Iterable[Holder]) -> bool:
        gone = [one for one in holders if not self.may_hold(one) or self._clients[one].is_gone()]
        for holder in gone:
            self._lapse(holder)
        return bool(gone)

    def _recall(self, holder: Holder, inodes: set[Inode]) -> float:
        """Ask for what the holder keeps; when its lease is over."""
        client = self._clients[holder]
        if not inodes <= client.recalls:
            client.recalls |= inodes
            self._moved.notify_all()
        return client.heard + self.lease

    def _wait(self, until: float, late: float | None = None) -> None:
        """For somebody to give up something. Raises WouldWait; OSError: ETIMEDOUT if it is ``late``."""
        if not may_block.get():
            raise WouldBlock
        now = self._clock()
        if now >= (until if late is None else late):
            raise os_error(errno.ETIMEDOUT)
        if abandoned.get()():
            raise os_error(errno.ECONNABORTED)
        self._moved.wait(min(max(0.0, until - now) + 0.001, _LOOK_SECONDS))

    def _lapse(self, holder: Holder) -> None:
        self._table.lapse(holder)
        if client := self._clients.get(holder):
            client.recalls.clear()
        self._moved.notify_all()

    def end(self, change: WriteIntent) -> None:
        """It is done, or it will not be."""
        with self._moved:
            self._table.end(change)
            self._moved.notify_all()

    def next_recall(self, holder: Holder, seconds: float) -> tuple[frozenset[Inode], int]:
        """What the client has to give up, up to which grant; after so long nothing. The client is asked for
        it once: ``recalled`` must follow.
        """
        with self._moved:
            client = self._clients.get(holder)
            if client is None:
                return frozenset(), 0
            self._moved.wait_for(lambda: client.recalls or holder not in self._clients, seconds)
            return frozenset(client.recalls), self._table.latest(holder)

    def recalled(
        self, holder: Holder, inodes: Collection[Inode], upto: int, is_open: Collection[int]
    ) -> None:
        """The client keeps these no longer, and has opened some of them without a word, to keep what it
        reads."""
        with self._moved:
            client = self._clients.get(holder)
            if client is None:
                return
            client.recalls.difference_update(inodes)
            for inode in inodes:
                self._table.says_open(holder, inode, is_open=inode in is_open)
                self._table.recalled(holder, inode, upto)
            self._moved.notify_all()

    def begin_writing(self, inode: int, *, already: bool = False) -> bool:
        """The device's kernel is to write the file itself; False if a client keeps it, or has it open and
        will. Within a change of it, so that it is not kept for nothing; unless it does so ``already``.
        """
        with self._moved:
            return self._table.begin_writing(Inode(inode), already=already)

    def end_writing(self, inode: int) -> None:
        """The device's kernel has closed it."""
        with self._moved:
            self._table.end_writing(Inode(inode))
            self._moved.notify_all()

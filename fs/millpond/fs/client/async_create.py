"""Edge (a thread, the clock): names that a client makes in directories that it has exclusively, told later.

A regular file is made, and its name taken away again, without a word to the server, as long as nobody else
may look. Names are told in their order: before anything else is changed or asked that may depend on them,
with the first write to one of the files, when a directory is recalled, and in any case before long.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from millpond.base.deadline import Deadline
from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.client.dir_delegations import DirectoryDelegations, moment
from millpond.fs.client.open_files import OpenFile, OpenFiles, Told, may_keep, nothing_told
from millpond.fs.client.pending_creates import ExclusiveDirectory, PendingFile, PendingNames
from millpond.fs.client.rpc import until
from millpond.fs.client.rpc_pool import RpcPool, now
from millpond.fs.proto import async_create as n
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import may_block
from millpond.fs.vfs.path_api import Attributes, Handle, os_error

log = logging.getLogger(__name__)
_TICK_SECONDS = 0.05  # a name is told after one or two
_IDLE_SECONDS = 2.0
_REST_SECONDS = 0.5
_BRIEF_SECONDS = 0.1  # for which attributes are kept that change when the name is told
_JOIN_SECONDS = 5.0
_SYNCED = os.O_SYNC | os.O_DSYNC
_SPECIAL = 0o7000
_LONGEST_NAME = 255  # bytes: longer ones are for the server to refuse
_MOST_FAILURES = 3
_IN_DOUBT = (errno.EIO, errno.ETIMEDOUT)  # the server may have done it, or was not there


@dataclass(frozen=True, slots=True)
class Created:
    """A file that was made and opened here."""

    file: CachedInode
    attributes: Attributes
    handle: Handle


@dataclass(frozen=True, slots=True)
class Removed:
    """A file that has lost its name here, which nobody has open."""

    file: CachedInode
    attributes: Attributes


class AsyncCreate:
    """Of one client. ``may_grant`` says whether it is told what is recalled; ``on_lost`` is called when names
    that somebody was told of will not be, and must be dropped.
    """

    def __init__(self, lanes: RpcPool, files: OpenFiles, may_grant: Callable[[], bool]) -> None:
        self._lanes, self._files = lanes, files
        self._book, self._lock = lanes.book, lanes.lock
        self.names = PendingNames()
        self._working, self._closed = threading.Event(), threading.Event()

        def may() -> bool:
            return may_grant() and not self._closed.is_set()

        self._may_grant = may
        self.granting = DirectoryDelegations(lanes, self.names, self._may_grant, self.settle, self._work)
        self.on_lost: Callable[[], None] = lambda: None
        self._telling, self._failures, self._failing_since = threading.Lock(), 0, 0.0
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Tell all, if it can still be told, and make no more."""
        self._closed.set()
        self._working.set()
        if self._thread:
            self._thread.join(_JOIN_SECONDS)
        try:
            self.settle()
        except OSError as error:
            log.warning("%d new names are lost: %s", len(self.names.untold), error.strerror)

    def stands_for(self, directory: CachedInode, name: bytes) -> CachedInode | Literal[False] | None:
        """With the lock: what a name stands for, None for nothing, False if that is not known."""
        held = self.granting.of(directory) if len(name) <= _LONGEST_NAME else None
        if held and (made := held.untold.get(name)):
            return made.file
        if held and name not in held.names:
            return None
        known = self._book.name(directory, name, now())
        return False if held and known is None else known

    def seconds(self, file: CachedInode, seconds: float) -> float:
        """With the lock: for how long the attributes of a file may be kept, otherwise for ``seconds``."""
        if file.node in self.names.files:
            return min(seconds, _BRIEF_SECONDS)
        held = self.names.held.get(file.node)
        if held and held.estimated:
            return max(0.0, min(seconds, held.estimated + _BRIEF_SECONDS - now()))
        return seconds

    def asked(self, file: CachedInode) -> None:
        """With the lock: the attributes of a file are the device's."""
        if held := self.names.held.get(file.node):
            held.estimated = 0.0

    def create(
        self, directory: CachedInode, name: bytes, flags: int, mode: int, deadline: Deadline
    ) -> Created | None:
        """Make and open a file; None if the server has to be asked."""
        if flags & _SYNCED or mode & _SPECIAL or len(name) > _LONGEST_NAME or not self._may_grant():
            return None
        if not self.granting.is_ready(directory, name, deadline):
            return None
        with self._lock:
            held = self.granting.of(directory)
            if held is None or name in held.names or not held.spares:
                return None
            if self._book.has(held.spares[-1].inode):  # it was another file's, or a device says so
                self.granting.give_back([held.spares.pop()], held.memory)
                return None
            made, attributes = self._make(held, name, mode & 0o777)
            opened = p.Opened(made.spare.handle, direct=not may_keep(flags))
            handle = self._files.add(made.file, flags, opened, held.memory)
            return Created(made.file, attributes, handle)

    def _make(self, held: ExclusiveDirectory, name: bytes, mode: int) -> tuple[PendingFile, Attributes]:
        spare, since = held.spares.pop(), self._book.change()
        made_at = moment() + held.clock
        attributes = held.attributes_of(spare, mode, made_at)
        found = p.FoundIs(spare.node, attributes, spare.granted, held.granted, bool(mode & 0o400))
        file = self._book.found(found, held.file, name, since=since, memory=held.memory)
        self._book.use(file)
        self._has_changed(held)
        return self.names.make(held, spare, file, name, mode, made_at), attributes

    def _has_changed(self, held: ExclusiveDirectory) -> None:
        """With the lock: its names were changed here, just now."""
        directory, time = held.file, moment() + held.clock
        held.used = held.estimated = now()
        directory.listing = None
        if directory.attributes:
            directory.attributes = replace(directory.attributes, mtime=time, ctime=time)

    def _work(self) -> None:
        self._working.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="names", daemon=True)
            self._thread.start()

    def unlink(self, directory: CachedInode, name: bytes) -> Removed | None:
        """With the lock: take a name away; None if the server has to be asked."""
        if not self.names.untold or self.granting.of(directory) is None:
            return None
        made = self.names.unmake(directory, name)
        if made is None:
            return None
        self._book.change()
        self._has_changed(made.directory)
        held = made.directory
        return Removed(made.file, held.attributes_of(made.spare, made.mode, moment() + held.clock, links=0))

    def named(self, directory: CachedInode, name: bytes, *, is_there: bool) -> None:
        """With the lock: what the server has just been asked for."""
        if held := self.names.of(directory):
            if is_there:
                held.names.add(name)
            else:
                held.names.discard(name)
        else:  # a listing that is under way may be of before
            directory.unsure += 1

    def forget(self, file: CachedInode, times: int) -> None:
        """With the lock: it is about to be forgotten so often."""
        if file.lookups - times > 1:
            return
        held = self.names.held.get(file.node)
        if held and not held.untold:
            self.names.touched.pop(file.node, None)
            self.granting.end(held)
        if made := self.names.reuse(file):
            reused = made.spare in made.directory.spares
            file.memory = 0 if reused else file.memory
            if not reused and made.closed:
                self._lanes.posted.append((made.directory.memory, p.Release(made.spare.handle)))
            self._book.forget(file.node, 1)

    def let_go(self, directory: CachedInode) -> None:
        """Its names are all told; whether more can be made there, the server has to say anew."""
        with self._lock:
            held = self.names.held.get(directory.node)
            if held and not held.untold:
                self.granting.end(held)

    def spoil(self, file: CachedInode) -> None:
        """It is about to be changed: if it has lost its name, no other can be made of it."""
        with self._lock:
            if made := self.names.spoil(file):
                self._let_go(made)

    def _let_go(self, made: PendingFile) -> None:
        """With the lock: from now on it is a file like others."""
        if made.closed:
            self._lanes.posted.append((made.directory.memory, p.Release(made.spare.handle)))
        self._book.forget(made.file.node, 1)

    def closed(self, opened: OpenFile) -> bool:
        """An open file is closed here; whether the server need not be told yet."""
        if not self.names.held and not self.names.untold:
            return False
        with self._lock:
            return self.names.close(opened.file, opened.remote)

    def settle(self, changed: CachedInode | None = None, deadline: Deadline | None = None) -> Deadline:
        """Return once all names that were made are told, before this file is ``changed``, with the deadline
        of the operation. Raises OSError.
        """
        deadline = deadline or self._lanes.deadline()
        if changed and self.names.held:
            self.spoil(changed)
        if self.names.are_any:
            with until(deadline, self._telling):
                with self._lock:
                    upto = self.names.last
                while self._tell_some(upto, deadline):
                    pass
        return deadline

    def _tell_some(self, upto: int, deadline: Deadline) -> bool:
        """Of those up to this one; False if there were none."""
        with self._lock:
            batch, touched = self.names.begin_telling(upto), self.names.take_touched()
        told: list[PendingFile] = []
        try:
            told = self._told(batch, touched, deadline)
        finally:
            with self._lock:
                self._are_told(told)
        return bool(batch)

    def _told(
        self, batch: Sequence[PendingFile], touched: Sequence[ExclusiveDirectory], deadline: Deadline
    ) -> list[PendingFile]:
        """Those that the server has now; what it will not have is lost. Raises OSError: nobody knows."""
        if not (batch or touched):
            return []
        is_brief = deadline.earlier(self._lanes.timeout / 2) == deadline  # most of it was spent on waiting
        try:
            self._tell(batch, deadline, touched)
        except OSError as error:
            if error.errno in _IN_DOUBT and (is_brief or not self._has_failed_often()):
                with self._lock:
                    self.names.touched.update((held.file.node, held) for held in touched)
                raise
        else:
            self._failures = 0
            return list(batch)
        return self._told_each(batch, deadline)

    def _told_each(self, batch: Sequence[PendingFile], deadline: Deadline) -> list[PendingFile]:
        """The same, one by one: those that were told already are not named again."""
        told: list[PendingFile] = []
        lost: list[OSError] = []
        try:
            for made in batch:
                if refusal := self._refused(made, deadline):
                    lost.append(refusal)
                else:
                    told.append(made)
        finally:  # also if nobody knows of the others
            if lost:
                number, why = len(lost), lost[-1].strerror
                log.warning(
                    "new names are lost that the device was not told in time: %d, the last: %s", number, why
                )
                self.on_lost()
        return told

    def _refused(self, made: PendingFile, deadline: Deadline) -> OSError | None:
        """Tell one name; why it is lost, if it is. Raises OSError: nobody knows."""
        try:
            self._tell([made], deadline)
        except OSError as error:
            if error.errno in _IN_DOUBT and not self._is_hopeless:
                raise
            self._lose(made)
            return error
        return None

    def _has_failed_often(self) -> bool:
        """Though the server is there: nobody shall have to wait for that for ever."""
        self._failures = self._failures + 1 if self._book.lease_end > now() else 0
        if self._failures == 1:
            self._failing_since = now()
        return self._is_hopeless

    @property
    def _is_hopeless(self) -> bool:
        """Not before as long as one operation may take: some fail at once while a connection is refused."""
        since = self._failing_since + self._lanes.timeout
        return self._failures > _MOST_FAILURES and now() >= since

    def _tell(
        self, batch: Sequence[PendingFile], deadline: Deadline, touched: Sequence[ExclusiveDirectory] = ()
    ) -> None:
        """This never waits for others, who may wait for just this: the server waits for nobody when it is
        told names, and remembers their directories, so that none has to be found again by its path, in
        which one may be another's exclusively.
        """
        with self._lanes.turn(deadline) as turn:

            def request() -> n.FlushNames:
                if any(held.memory != turn.memory for held in touched):
                    raise os_error(errno.ESTALE)
                others = (n.Touched(held.remote, held.granted) for held in touched)
                return n.FlushNames(_telling(batch)(turn.memory), tuple(others))

            turn.ask(request, p.Done, repeat=True)  # the server knows which it has had

    def _are_told(self, batch: Sequence[PendingFile]) -> None:
        """With the lock."""
        self.names.end_telling(batch)
        if batch:
            self._book.change()
        for made in batch:
            made.file.attributes, made.file.linked = None, True
            if not made.directory.estimated:
                made.directory.file.attributes = None
            made.file.durability.change()
            made.directory.file.durability.change()
            self._let_go(made)

    def _lose(self, made: PendingFile) -> None:
        """Whoever has it, or its directory, open hears of it when he syncs it."""
        directory = made.directory.file
        with self._lock:
            self.names.lose(made)
            directory.unsure += 1  # it may be there after all
            self._book.change()
            directory.attributes, directory.listing = None, None
            if directory.names.get(made.name) == made.file.node:
                del directory.names[made.name]
            if (made.file.parent, made.file.name) == (directory.node, made.name):
                self._book.place(made.file, None, b"")
            made.file.attributes = None
            made.file.durability.doubts += 1
            directory.durability.doubts += 1
            self._let_go(made)

    def along(self, file: CachedInode, write: Callable[[Told, Deadline], int]) -> int:
        """Write to a file, with the names that are to be told first. Raises OSError and WouldWait."""
        deadline = self._lanes.deadline()
        if self.names.held:
            self.spoil(file)
        if (
            self.names.untold and not may_block.get()
        ):  # who may wait for others must not keep them back so long
            with until(deadline, self._telling):
                done = self._told_along(file, write, deadline)
            if done is not None:
                return done
        return write(nothing_told, self.settle(deadline=deadline))

    def _told_along(
        self, file: CachedInode, write: Callable[[Told, Deadline], int], deadline: Deadline
    ) -> int | None:
        """None if it was not done: perhaps since a name cannot be told."""
        with self._lock:
            batch = self.names.begin_telling()
            made = self.names.files.get(file.node)
        if made is not None and made not in batch:  # naming it sets its times
            return None
        told: list[PendingFile] = []
        try:
            done = write(_telling(batch), deadline)
            told = batch
        except OSError as error:
            if error.errno in _IN_DOUBT:
                raise
            return None
        else:
            return done
        finally:
            with self._lock:
                kept = file.attributes
                self._are_told(told)
                file.attributes = kept  # they came after the names

    def _run(self) -> None:
        last = 0
        while True:
            self._working.wait()
            if self._closed.wait(_TICK_SECONDS):
                return
            last = self._tick(last)

    def _tick(self, last: int) -> int:
        """Tell what was made before the tick before, and all that has come since; the last that was made."""
        with self._lock:
            oldest = self.names.first
        if self.names.touched or 0 < oldest <= last:
            try:
                self.settle()
            except OSError as error:
                log.debug("names cannot be told: %s", error)
                self._closed.wait(_REST_SECONDS)
        with self._lock:
            self._end_idle()
            return self.names.last

    def _end_idle(self) -> None:
        """Directories that were recalled, and those where nothing is made any more."""
        idle = now() - _IDLE_SECONDS
        for held in list(self.names.held.values()):
            if not self.names.concern(held.file) and (held.used < idle or not held.is_valid):
                self.granting.end(held)
        if not self.names.held and not self.names.untold:
            self._working.clear()


def _telling(batch: Sequence[PendingFile]) -> Told:
    """What is told of these; ESTALE if the server knows them no more."""

    def told(memory: int) -> tuple[n.NameUpdate, ...]:
        if any(made.directory.memory != memory for made in batch):
            raise os_error(errno.ESTALE)
        return tuple(made.naming() for made in batch)

    return told

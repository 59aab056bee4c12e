"""Edge: how a client gets directories exclusively and files prepared for them, and gives them back."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from millpond.base.deadline import Deadline
from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.client.pending_creates import FIRST, ExclusiveDirectory, PendingNames, PreallocatedFile
from millpond.fs.client.rpc import seconds_left
from millpond.fs.client.rpc_pool import RpcCall, RpcPool, now
from millpond.fs.proto import async_create as n
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.dirents import unpack_entries
from millpond.fs.vfs.inode_api import Node, WouldBlock, may_block
from millpond.fs.vfs.path_api import os_error

log = logging.getLogger(__name__)
_REFUSED_SECONDS = 0.25  # and then twice as long each time
_LONGEST_REFUSED = 30.0
_MOST_HELD = 256
_ENOUGH = 2  # names made in a directory before it is asked for


def moment() -> int:
    """Nanoseconds of a clock that stands still at no time."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class DirectoryDelegations:
    """For the ``names`` of one client. ``may_grant`` says whether it is told what is recalled; ``settle`` has
    the server know all names that were made; ``on_hold`` is called, with the lock, when it has one more.
    """

    def __init__(
        self,
        lanes: RpcPool,
        names: PendingNames,
        may_grant: Callable[[], bool],
        settle: Callable[[None, Deadline], Deadline],
        on_hold: Callable[[], None],
    ) -> None:
        self._lanes, self._names, self._may_grant = lanes, names, may_grant
        self._settle, self._on_hold = settle, on_hold
        self._book, self._lock = lanes.book, lanes.lock
        self._asking: set[Node] = set()
        self._asked = threading.Condition(lanes.lock)

    def of(self, directory: CachedInode) -> ExclusiveDirectory | None:
        """With the lock: a directory whose names may be gone by."""
        if not self._names.held:
            return None
        held = self._names.of(directory)
        return held if held and self._book.seconds(directory, now()) else None

    def is_ready(self, directory: CachedInode, name: bytes, deadline: Deadline) -> bool:
        """Whether there is a file prepared for the directory, after the server was asked if there is none."""
        with self._lock:
            directory.made += 1
            known = self._known(directory, name)
        if known is not None:
            return known
        with self._alone(directory, deadline):
            with self._lock:  # another thread may just have asked
                known = self._known(directory, name)
            return self._ask(directory, deadline) if known is None else known

    def _known(self, directory: CachedInode, name: bytes) -> bool | None:
        """With the lock: the same, None if the server is to be asked."""
        held = self.of(directory)
        if held is not None:
            return bool(held.spares) if held.spares or name in held.names else None
        return None if directory.made >= _ENOUGH and self._may_ask(directory) else False

    @contextlib.contextmanager
    def _alone(self, directory: CachedInode, deadline: Deadline) -> Iterator[None]:
        """One asks at a time: a second grant would end the first, and names that were made by it be lost.
        Raises WouldWait and OSError.
        """
        with self._asked:
            if directory.node in self._asking and not may_block.get():
                raise WouldBlock  # who asks may have to wait himself
            left = seconds_left(deadline)
            if not self._asked.wait_for(lambda: directory.node not in self._asking, left):
                raise os_error(errno.ETIMEDOUT)
            self._asking.add(directory.node)
        try:
            yield
        finally:
            with self._asked:
                self._asking.discard(directory.node)
                self._asked.notify_all()

    def _ask(self, directory: CachedInode, deadline: Deadline) -> bool:
        held: ExclusiveDirectory | None = None
        try:
            self._settle(None, deadline)
            with self._lock:
                held = self.of(directory)
            return self._prepare(directory, held, deadline)
        except OSError as error:
            if error.errno == errno.ETIMEDOUT:  # who asks has waited long enough
                raise
            log.debug("nothing is prepared: %s", error)
            with self._lock:
                self._refused(directory, held)
            return False

    def expect(self, directory: CachedInode, deadline: Deadline) -> None:
        """Somebody looks for the first time into a directory that was made here: he is likely to fill it."""
        directory.fresh = False
        with self._alone(directory, deadline):
            with self._lock:
                may = self._may_grant() and self.of(directory) is None and self._may_ask(directory)
            if may:
                self._ask(directory, deadline)

    def _may_ask(self, directory: CachedInode) -> bool:
        """Whether it may be granted now; the one that was used longest ago makes room for it."""
        time = now()
        if time < directory.refused_until or directory is self._book.root:
            return False
        if len(self._names.held) >= _MOST_HELD:
            oldest = min(self._names.held.values(), key=lambda held: held.used)
            if self._names.concern(oldest.file):
                return False
            self.end(oldest)
        return self._book.seconds(directory, time) > 0

    def _prepare(self, directory: CachedInode, held: ExclusiveDirectory | None, deadline: Deadline) -> bool:
        """More files, and without ``held`` the directory."""
        granted, count = (held.granted, held.next_count()) if held else (0, FIRST)
        unsure, remote = directory.unsure, 0
        with self._lanes.turn(deadline) as turn:

            def request() -> n.Preallocate:
                nonlocal remote
                remote = turn.remote(directory)
                return n.Preallocate(remote, granted, count)

            reply, listing = turn.ask(
                request, n.Preallocated, repeat=True, limit=0 if held else p.MAX_LISTING
            )
            with self._lock:
                is_whole = unsure == directory.unsure  # or names may be missing
                if held is None and is_whole and reply.nodes:
                    held = self._hold(directory, remote, reply, listing, turn)
                return self._prepared(directory, held, remote, reply, turn.memory)

    def _prepared(
        self,
        directory: CachedInode,
        held: ExclusiveDirectory | None,
        remote: int,
        reply: n.Preallocated,
        memory: int,
    ) -> bool:
        """With the lock: there are more files; whether they are of use."""
        if reply.attributes is None or not reply.granted:
            self._refused(directory, held)
            return False
        places = zip(reply.nodes, reply.handles, reply.inodes, reply.grants, strict=True)
        spares = [PreallocatedFile(*place) for place in places]
        is_held = held is not None and self._names.held.get(directory.node) is held  # not ended meanwhile
        if held is None or not is_held or (held.granted, held.memory) != (reply.granted, memory):
            self.give_back(spares, memory)
            return False
        held.remote = remote  # the server remembers a directory as long as files are prepared for it
        held.prepared(spares, reply.attributes, reply.attributes.mtime - moment())
        return True

    def _refused(self, directory: CachedInode, held: ExclusiveDirectory | None) -> None:
        """With the lock: each name is asked for, for a while."""
        directory.refused_for = min(max(2 * directory.refused_for, _REFUSED_SECONDS), _LONGEST_REFUSED)
        directory.refused_until = now() + directory.refused_for
        if held and not held.untold and not held.spares:
            self.end(held)

    def _hold(
        self, directory: CachedInode, remote: int, reply: n.Preallocated, listing: memoryview, turn: RpcCall
    ) -> ExclusiveDirectory | None:
        """With the lock: it is the client's, unless it was recalled while the answer was under way."""
        if reply.attributes is None:
            return None
        try:
            names = {os.fsencode(entry.name) for entry in unpack_entries(listing)}
        except ProtocolError:
            return None
        if not self._book.learn(directory, None, reply.granted, since=turn.since):
            return None
        if before := self._names.held.get(directory.node):
            self.end(before)
        directory.refused_for = 0.0
        granted, attributes, clock = reply.granted, reply.attributes, reply.attributes.mtime - moment()
        held = ExclusiveDirectory(directory, remote, granted, turn.memory, names, attributes, clock, now())
        self._names.held[directory.node] = held
        self._book.use(directory)
        self._on_hold()
        return held

    def give_back(self, spares: Sequence[PreallocatedFile], memory: int) -> None:
        """With the lock: these files will not be named."""
        if spares:
            self._lanes.posted += [(memory, p.Release(spare.handle)) for spare in spares]
            self._lanes.posted.append((memory, p.Forget(tuple(spare.node for spare in spares))))

    def end(self, held: ExclusiveDirectory) -> None:
        """With the lock: the client makes no more names there without asking."""
        if self._names.held.get(held.file.node) is held:
            del self._names.held[held.file.node]
            self.give_back(held.spares, held.memory)
            held.spares = []
            self._book.forget(held.file.node, 1)

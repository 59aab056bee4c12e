# SPDX-License-Identifier: Apache-2.0
"""Edge: requests exclusive directory delegations and preallocated files from the server, and returns them."""

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
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.pending_creates import FIRST, ExclusiveDirectory, PendingNames, PreallocatedFile
from millpond.fs.client.rpc import seconds_left
from millpond.fs.client.rpc_pool import RpcCall, RpcPool, now
from millpond.fs.proto import async_create as n
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.dirents import unpack_entries
from millpond.fs.vfs.inode_api import Node, WouldBlock, may_block
from millpond.fs.vfs.path_api import os_error

log = logging.getLogger(__name__)
_REFUSED_SECONDS = 0.25  # first back-off; then twice as long each time
_LONGEST_REFUSED = 30.0
_MOST_HELD = 256
_IDLE_SECONDS = 2.0
_MOST_PENDING = 256  # names that the server may lack when more files are preallocated: it has a bound, too
_ENOUGH = 2  # files created in a directory before it is requested


def boottime_ns() -> int:
    """Return the time in nanoseconds of a clock that runs during suspend (CLOCK_BOOTTIME)."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class DirectoryDelegations:
    """The exclusive directory delegations of one client, whose state is ``names``.

    ``may_grant`` returns whether the client receives recalls; ``flush`` sends all pending names to the
    server; ``on_granted`` is called, with the lock, after each new delegation. ``before_grant`` is called
    before one is requested: what is pending under an earlier one of the directory must be sent.
    """

    def __init__(
        self,
        rpc: RpcPool,
        names: PendingNames,
        may_grant: Callable[[], bool],
        flush: Callable[[None, Deadline], Deadline],
        on_granted: Callable[[], None],
    ) -> None:
        self._rpc, self._names, self._may_grant = rpc, names, may_grant
        self._flush, self._on_granted = flush, on_granted
        self._inodes, self._lock = rpc.inodes, rpc.lock
        self.before_grant: Callable[[CachedInode, Deadline], None] = lambda _directory, _deadline: None
        self._requested: set[Node] = set()
        self._request_done = threading.Condition(rpc.lock)

    def of(self, directory: CachedInode) -> ExclusiveDirectory | None:
        """With the lock: return the valid delegation of a directory, or None."""
        if not self._names.held:
            return None
        held = self._names.of(directory)
        return held if held and self._inodes.ttl(directory, now()) else None

    def has_preallocated(self, directory: CachedInode, name: bytes, deadline: Deadline) -> bool:
        """Return whether a preallocated file is left for the directory, after requesting more if there is
        none.
        """
        with self._lock:
            directory.creates += 1
            known = self._answer_at_hand(directory, name)
        if known is not None:
            return known
        with self._one_request(directory, deadline):
            with self._lock:  # another thread may just have requested it
                known = self._answer_at_hand(directory, name)
            return self._request(directory, deadline) if known is None else known

    def _answer_at_hand(self, directory: CachedInode, name: bytes) -> bool | None:
        """With the lock: the same without a request; None if the server has to be asked."""
        held = self.of(directory)
        if held is not None:
            return bool(held.preallocated) if held.preallocated or name in held.names else None
        return None if directory.creates >= _ENOUGH and self._may_request(directory) else False

    @contextlib.contextmanager
    def _one_request(self, directory: CachedInode, deadline: Deadline) -> Iterator[None]:
        """Let one thread at a time request a directory: a second grant would end the first, and lose the
        names created under it.

        Raises WouldBlock and OSError.
        """
        with self._request_done:
            if directory.node in self._requested and not may_block.get():
                raise WouldBlock  # the thread that requests may be waiting for a recall
            left = seconds_left(deadline)
            if not self._request_done.wait_for(lambda: directory.node not in self._requested, left):
                raise os_error(errno.ETIMEDOUT)
            self._requested.add(directory.node)
        try:
            yield
        finally:
            with self._request_done:
                self._requested.discard(directory.node)
                self._request_done.notify_all()

    def _request(self, directory: CachedInode, deadline: Deadline) -> bool:
        held: ExclusiveDirectory | None = None
        try:
            with self._lock:
                held = self.of(directory)
                many = len(self._names.pending) > _MOST_PENDING
            if held is None or many:
                self._flush(None, deadline)
            if held is None:
                self.before_grant(directory, deadline)
            return self._preallocate(directory, held, deadline)
        except OSError as error:
            if error.errno in (errno.ETIMEDOUT, errno.EINTR):  # the operation's time is up
                raise
            log.debug("no files preallocated: %s", error)
            with self._lock:
                self._back_off(directory, held)
            return False

    def request_early(self, directory: CachedInode, deadline: Deadline) -> None:
        """Request a directory that this client has made, when a program first looks into it: it is likely to
        be filled.
        """
        directory.fresh = False
        with self._one_request(directory, deadline):
            with self._lock:
                may = self._may_grant() and self.of(directory) is None and self._may_request(directory)
            if may:
                self._request(directory, deadline)

    def _may_request(self, directory: CachedInode) -> bool:
        """With the lock: return whether a directory may be requested now; ends the least recently used
        delegation if there are too many.
        """
        time = now()
        if time < directory.refused_until or directory is self._inodes.root:
            return False
        if len(self._names.held) >= _MOST_HELD:
            oldest = min(self._names.held.values(), key=lambda held: held.used)
            if self._names.affect(oldest.file) or oldest.gathered:
                return False
            self.end(oldest)
        return self._inodes.ttl(directory, time) > 0

    def _preallocate(
        self, directory: CachedInode, held: ExclusiveDirectory | None, deadline: Deadline
    ) -> bool:
        """Request preallocated files, and the delegation itself if ``held`` is None; return whether they can
        be used.
        """
        granted, count = (held.granted, held.next_count()) if held else (0, FIRST)
        name_doubts, remote = directory.name_doubts, 0
        with self._rpc.call(deadline) as call:

            def request() -> n.Preallocate:
                nonlocal remote
                remote = call.remote(directory)
                return n.Preallocate(remote, granted, count)

            reply, listing = call.ask(
                request, n.Preallocated, idempotent=True, limit=0 if held else p.MAX_LISTING
            )
            with self._lock:
                is_whole = name_doubts == directory.name_doubts  # or names may be missing
                if held is None and is_whole and reply.nodes:
                    held = self._add(directory, remote, reply, listing, call)
                return self._accept(directory, held, remote, reply, call.verifier)

    def _accept(
        self,
        directory: CachedInode,
        held: ExclusiveDirectory | None,
        remote: int,
        reply: n.Preallocated,
        verifier: int,
    ) -> bool:
        """With the lock: add the preallocated files of a reply to the delegation; return whether they can be
        used.
        """
        if reply.attributes is None or not reply.granted:
            self._back_off(directory, held)
            return False
        places = zip(reply.nodes, reply.handles, reply.inodes, reply.grants, strict=True)
        preallocated = [PreallocatedFile(*place, reply.room) for place in places]
        is_held = held is not None and self._names.held.get(directory.node) is held  # not ended meanwhile
        if held is None or not is_held or (held.granted, held.verifier) != (reply.granted, verifier):
            self.release_files(preallocated, verifier)
            return False
        held.remote = remote  # the server keeps the node as long as it has preallocated files for it
        held.add_preallocated(preallocated, reply.attributes, reply.attributes.mtime - boottime_ns())
        return True

    def _back_off(self, directory: CachedInode, held: ExclusiveDirectory | None) -> None:
        """With the lock: request this directory no more for a while, twice as long each time."""
        directory.refused_for = min(max(2 * directory.refused_for, _REFUSED_SECONDS), _LONGEST_REFUSED)
        directory.refused_until = now() + directory.refused_for
        if held and not held.is_needed and not held.preallocated:
            self.end(held)

    def _add(
        self, directory: CachedInode, remote: int, reply: n.Preallocated, listing: memoryview, call: RpcCall
    ) -> ExclusiveDirectory | None:
        """With the lock: add a delegation, unless it was recalled while the reply was under way."""
        if reply.attributes is None:
            return None
        try:
            names = {os.fsencode(entry.name) for entry in unpack_entries(listing)}
        except ProtocolError:
            return None
        if not self._inodes.learn(directory, None, reply.granted, since=call.since):
            return None
        if before := self._names.held.get(directory.node):
            self.end(before)
        directory.refused_for = 0.0
        granted, attributes, clock_offset = (
            reply.granted,
            reply.attributes,
            reply.attributes.mtime - boottime_ns(),
        )
        held = ExclusiveDirectory(
            directory, remote, granted, call.verifier, names, attributes, clock_offset, now()
        )
        self._names.held[directory.node] = held
        self._inodes.use(directory)
        self._on_granted()
        return held

    def release_files(self, preallocated: Sequence[PreallocatedFile], verifier: int) -> None:
        """With the lock: have the server close and forget preallocated files that will not be used."""
        if preallocated:
            self._rpc.posted += [(verifier, p.Release(spare.handle)) for spare in preallocated]
            self._rpc.posted.append((verifier, p.Forget(tuple(spare.node for spare in preallocated))))

    def end_idle(self) -> None:
        """With the lock: end the delegations of directories that were recalled or in which no name has
        changed for a while.
        """
        idle = now() - _IDLE_SECONDS
        for held in list(self._names.held.values()):
            is_over = held.used < idle or not held.is_valid
            if is_over and not self._names.affect(held.file) and not held.gathered:
                self.end(held)

    def end(self, held: ExclusiveDirectory) -> None:
        """With the lock: end a delegation locally and release its preallocated files."""
        if self._names.held.get(held.file.node) is held:
            del self._names.held[held.file.node]
            self.release_files(held.preallocated, held.verifier)
            held.preallocated = []
            self._inodes.forget(held.file.node, 1)

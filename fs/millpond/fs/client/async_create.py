# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread, the clock): creates and unlinks files under an exclusive directory delegation,
asynchronously.

A regular file is created, and its name removed again, without a request to the server, as long as this client
holds the directory's delegation (Ceph's asynchronous dirops). The names are flushed in order: before any
operation that may depend on them, with the first write to one of the files, when the directory is recalled,
and at the latest after two ticks of the flusher thread.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from millpond.base.deadline import Deadline
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.pending_creates import (
    Created,
    ExclusiveDirectory,
    FlushFailures,
    PendingFile,
    PendingNames,
    Removed,
    name_updates,
)
from millpond.fs.client.dir_delegations import DirectoryDelegations, boottime_ns
from millpond.fs.client.name_replay import of_earlier_session, replay
from millpond.fs.client.open_files import NameUpdates, OpenFile, OpenFiles, may_keep, no_name_updates
from millpond.fs.client.rpc import IN_DOUBT, until
from millpond.fs.client.rpc_pool import RpcPool, now
from millpond.fs.proto import async_create as n
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import may_block
from millpond.fs.vfs.path_api import Attributes, os_error

log = logging.getLogger(__name__)
_TICK_SECONDS = 0.05  # a name is flushed after one or two ticks
_REST_SECONDS = 0.5
_BRIEF_SECONDS = 0.1  # the TTL of attributes that the flush of a name will change
_JOIN_SECONDS = 5.0
_SYNCED = os.O_SYNC | os.O_DSYNC
_SPECIAL = 0o7000
_LONGEST_NAME = 255  # bytes: longer ones are for the server to refuse
_MANY = 32  # files with contents that are sent before the tick, while programs make more


class AsyncCreate:
    """The asynchronous creates and unlinks of one client. ``may_grant`` returns whether the client receives
    recalls and so may hold delegations. ``on_lost`` is called when names that the kernel may have cached will
    never reach the server, so that the kernel drops them; ``on_contents_lost``, with the lock, for a file
    whose contents will not, and ``on_stored`` with the contents of one that the server has.
    """

    def __init__(self, rpc: RpcPool, files: OpenFiles, may_grant: Callable[[], bool]) -> None:
        self._rpc, self._files = rpc, files
        self._inodes, self._lock = rpc.inodes, rpc.lock
        self.names = PendingNames()
        self._working, self._many, self._closed = threading.Event(), threading.Event(), threading.Event()

        def may() -> bool:
            return may_grant() and not self._closed.is_set()

        self._may_grant = may
        self.delegations = DirectoryDelegations(
            rpc, self.names, self._may_grant, self.flush, self._start_flusher
        )
        self.on_lost: Callable[[], None] = lambda: None
        self.on_contents_lost: Callable[[CachedInode], None] = lambda _file: None
        self.on_stored: Callable[[CachedInode, bytes], None] = lambda _file, _contents: None
        self._flushing, self._failures = threading.Lock(), FlushFailures(rpc.silence)
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Flush all pending names, if the server can still be reached, and accept no more."""
        self._closed.set()
        self._working.set()
        self._many.set()
        if self._thread:
            self._thread.join(_JOIN_SECONDS)
        try:
            self.flush()
        except OSError as error:
            log.warning("%d new names are lost: %s", len(self.names.pending), error.strerror)

    def resolve(self, directory: CachedInode, name: bytes) -> CachedInode | Literal[False] | None:
        """With the lock: return the inode of a name, None if the name does not exist, False if the cache
        cannot tell.
        """
        held = self.delegations.of(directory) if len(name) <= _LONGEST_NAME else None
        if held and (made := held.pending.get(name)):
            return made.file
        if held and name not in held.names:
            return None
        known = self._inodes.lookup(directory, name, now())
        return False if held and known is None else known

    def attribute_ttl(self, file: CachedInode, seconds: float) -> float:
        """With the lock: return for how many seconds a file's attributes may be cached: at most ``seconds``,
        and briefly while the flush of a name will change them.
        """
        if file.node in self.names.files:
            return min(seconds, _BRIEF_SECONDS)
        held = self.names.held.get(file.node)
        if held and held.estimated:
            return max(0.0, min(seconds, held.estimated + _BRIEF_SECONDS - now()))
        return seconds

    def confirm_attributes(self, file: CachedInode) -> None:
        """With the lock: note that the cached attributes of a file came from the device, not from an
        estimate.
        """
        if held := self.names.held.get(file.node):
            held.estimated = 0.0

    def create(
        self, directory: CachedInode, name: bytes, flags: int, mode: int, deadline: Deadline
    ) -> Created | None:
        """Create and open a file locally. Returns None if the server has to be asked."""
        if flags & _SYNCED or mode & _SPECIAL or len(name) > _LONGEST_NAME or not self._may_grant():
            return None
        if not self.delegations.has_preallocated(directory, name, deadline):
            return None
        with self._lock:
            held = self.delegations.of(directory)
            if held is None or name in held.names or not held.preallocated:
                return None
            if self._inodes.by_inode(
                held.preallocated[-1].inode
            ):  # the inode number is in use: the device reused it, or lies
                self.delegations.release_files([held.preallocated.pop()], held.verifier)
                return None
            made, attributes = self._create(held, name, mode & 0o777)
            opened = p.Opened(made.spare.handle, direct=not may_keep(flags))
            handle = self._files.add(made.file, flags, opened, held.verifier)
            self._inodes.use(made.file)  # the kernel's lookup, beside the one of the pending name
            return Created(made.file, attributes, handle)

    def _create(self, held: ExclusiveDirectory, name: bytes, mode: int) -> tuple[PendingFile, Attributes]:
        spare, since = held.preallocated.pop(), self._inodes.change()
        made_at = boottime_ns() + held.clock_offset
        attributes = held.attributes_of(spare, mode, made_at)
        found = p.FoundIs(spare.node, attributes, spare.granted, held.granted, bool(mode & 0o400))
        file = self._inodes.insert(found, held.file, name, since=since, verifier=held.verifier)
        self._inodes.use(file)
        self._touch(held)
        return self.names.create(held, spare, file, name, mode, made_at), attributes

    def fill(self, made: PendingFile, contents: bytes) -> None:
        """With the lock: have the contents of a file flushed with its name."""
        self.names.fill(made, contents)
        if self.names.with_contents >= _MANY:
            self._many.set()

    def _touch(self, held: ExclusiveDirectory) -> None:
        """With the lock: set the directory's times to now, since one of its names has just been changed
        locally.
        """
        directory, time = held.file, boottime_ns() + held.clock_offset
        held.used = held.estimated = now()
        directory.listing = None
        if directory.attributes:
            directory.attributes = replace(directory.attributes, mtime=time, ctime=time)

    def _start_flusher(self) -> None:
        self._working.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="names", daemon=True)
            self._thread.start()

    def unlink(self, directory: CachedInode, name: bytes) -> Removed | None:
        """With the lock: remove a name locally. Returns None if the server has to be asked."""
        if not self.names.pending or self.delegations.of(directory) is None:
            return None
        made = self.names.cancel(directory, name)
        if made is None:
            return None
        self._inodes.change()
        self._touch(made.directory)
        held = made.directory
        return Removed(
            made.file, held.attributes_of(made.spare, made.mode, boottime_ns() + held.clock_offset, links=0)
        )

    def note_name(self, directory: CachedInode, name: bytes, *, is_there: bool) -> None:
        """With the lock: record that the server has just made (``is_there``) or removed a name."""
        if held := self.names.of(directory):
            if is_there:
                held.names.add(name)
            else:
                held.names.discard(name)
        else:  # a listing under way may predate the change
            directory.name_doubts += 1

    def forget(self, file: CachedInode, times: int) -> None:
        """With the lock: prepare for the kernel's FORGET of ``times`` lookups of a file.

        The last one ends the delegation of a directory without pending names, and recycles the preallocated
        inode of a file that was unlinked before its name was flushed.
        """
        if file.lookups - times > 1:
            return
        held = self.names.held.get(file.node)
        if held and not held.is_needed:
            self.names.touched.pop(file.node, None)
            self.delegations.end(held)
        if made := self.names.reuse(file):
            reused = made.spare in made.directory.preallocated
            file.verifier = 0 if reused else file.verifier
            if not reused and made.closed:
                self._rpc.posted.append((made.directory.verifier, p.Release(made.spare.handle)))
            self._inodes.forget(file.node, 1)

    def end_if_flushed(self, directory: CachedInode) -> None:
        """End a directory's delegation unless names or data are pending there; the next one needs a new
        grant.
        """
        with self._lock:
            held = self.names.held.get(directory.node)
            if held and not held.is_needed:
                self.delegations.end(held)

    def forbid_reuse(self, file: CachedInode) -> None:
        """Keep an unlinked file's preallocated inode from being recycled, because the file is about to be
        changed.
        """
        with self._lock:
            if made := self.names.forbid_reuse(file):
                self._forget_pending(made)

    def _forget_pending(self, made: PendingFile) -> None:
        """With the lock: drop the extra reference to a file whose name is no longer pending."""
        if made.closed:
            self._rpc.posted.append((made.directory.verifier, p.Release(made.spare.handle)))
        self._inodes.forget(made.file.node, 1)

    def note_close(self, opened: OpenFile) -> bool:
        """Note that an open file was closed locally; return whether the server's handle must stay open for
        now.
        """
        if not self.names.held and not self.names.pending:
            return False
        with self._lock:
            return self.names.close(opened.file, opened.remote)

    def flush(self, changed: CachedInode | None = None, deadline: Deadline | None = None) -> Deadline:
        """Flush all names that are pending now. Returns the deadline of the operation that waits for it.

        ``changed`` is the file that this operation changes afterwards. Raises OSError.
        """
        deadline = deadline or self._rpc.deadline()
        if changed and self.names.held:
            self.forbid_reuse(changed)
        if self.names.are_any:
            with until(deadline, self._flushing):
                with self._lock:
                    upto = self.names.last
                while self._flush_some(upto, deadline):
                    pass
        return deadline

    def _flush_some(self, upto: int, deadline: Deadline) -> bool:
        """Flush the next batch of names up to serial number ``upto``. Returns False if there were none."""
        with self._lock:
            batch, touched = self.names.begin_flush(upto), self.names.take_touched()
        flushed: list[PendingFile] = []
        try:
            self._flush_batch(batch, touched, deadline, flushed)
        finally:
            with self._lock:
                self._mark_flushed(flushed)
        return bool(batch)

    def _flush_batch(
        self,
        batch: Sequence[PendingFile],
        touched: Sequence[ExclusiveDirectory],
        deadline: Deadline,
        flushed: list[PendingFile],
    ) -> None:
        """Send a batch in one request, or one by one if the server refuses it; add the files that the server
        has now to ``flushed``.

        Names that the server refuses are lost. Raises OSError if the outcome of others is not known.
        """
        if not (batch or touched):
            return
        began = now()
        try:
            self._send(batch, deadline, touched)
        except OSError as error:
            # an operation that has spent its time on waiting, or was interrupted, proves nothing
            is_brief = error.errno == errno.EINTR or began + self._rpc.silence / 2 > (
                deadline.at or began + self._rpc.timeout
            )
            if error.errno in IN_DOUBT and (
                is_brief or not self._failures.count(now(), self._inodes.lease_end)
            ):
                with self._lock:
                    self.names.touched.update((held.file.node, held) for held in touched)
                raise
        else:
            self._failures.end()
            flushed += batch
            return
        self._flush_each(batch, deadline, flushed)

    def _flush_each(
        self, batch: Sequence[PendingFile], deadline: Deadline, flushed: list[PendingFile]
    ) -> None:
        """Replay the names of an earlier session, and send each other of a batch by itself; add the files
        that the server has now to ``flushed``. The server skips repeated serial numbers.
        """
        lost: list[OSError] = []
        former = of_earlier_session(self._rpc, batch)
        others = ((made, self._flush_one(made, deadline)) for made in batch[len(former) :])
        try:
            for made, refusal in itertools.chain(replay(self._rpc, former, deadline), others):
                if refusal:
                    self._lose(made)
                    lost.append(refusal)
                else:
                    flushed.append(made)
        finally:  # also if the outcome of the others is not known
            if lost:
                number, why = len(lost), lost[-1].strerror
                log.warning(
                    "new names are lost that did not reach the device in time: %d, the last: %s", number, why
                )
                self.on_lost()

    def _flush_one(self, made: PendingFile, deadline: Deadline) -> OSError | None:
        """Send one name. Returns the error for which the name is lost. Raises OSError if the outcome is not
        known.
        """
        try:
            self._send([made], deadline)
        except OSError as error:
            if error.errno in IN_DOUBT and not self._failures.are_hopeless(now()):
                raise
            if of_earlier_session(self._rpc, [made]):
                return next(replay(self._rpc, [made], deadline))[1]
            return error
        return None

    def _send(
        self, batch: Sequence[PendingFile], deadline: Deadline, touched: Sequence[ExclusiveDirectory] = ()
    ) -> None:
        """Send one request with names and with the directories that were touched.

        The server skips serial numbers that it has had. The request never waits for another client, which may
        be waiting for just this flush: the server does not recall anything for it and remembers the
        directories, so that no path has to be looked up through one that another client holds exclusively.
        """
        filled = [made for made in batch if made.contents]
        with self._rpc.call(deadline) as call:

            def request() -> n.FlushNames:
                if any(held.verifier != call.verifier for held in touched):
                    raise os_error(errno.ESTALE)
                others = (n.Touched(held.remote, held.granted) for held in touched)
                contents = (made.contents_update() for made in filled)
                return n.FlushNames(name_updates(batch, call.verifier), tuple(others), tuple(contents))

            data = b"".join(made.contents for made in filled)
            reply, _ = call.ask(request, n.NamesFlushed, idempotent=True, payload=data)
        for made, found in zip(filled, reply.files, strict=False):
            made.found = (found, call.since) if len(reply.files) == len(filled) else None

    def _mark_flushed(self, batch: Sequence[PendingFile]) -> None:
        """With the lock: treat these files as the server's own from now on."""
        self.names.end_flush(batch)
        if batch:
            self._inodes.change()
        for made in batch:
            made.file.attributes, made.file.linked = None, True
            known = made.found and self._inodes.learn_own(made.file, made.spare.granted, *made.found)
            if known and made.found and made.found[0].size == len(made.contents):
                self.on_stored(made.file, made.contents)
            if not made.directory.estimated:
                made.directory.file.attributes = None
            made.file.durability.change()
            made.directory.file.durability.change()
            self._forget_pending(made)

    def _lose(self, made: PendingFile) -> None:
        """Discard a name that the server refused. Each open file of the file or its directory sees EIO once
        from fsync.
        """
        directory = made.directory.file
        with self._lock:
            self.names.lose(made)
            directory.name_doubts += 1  # the server may have the name after all
            self._inodes.change()
            directory.attributes, directory.listing = None, None
            if directory.names.get(made.name) == made.file.node:
                del directory.names[made.name]
            if (made.file.parent, made.file.name) == (directory.node, made.name):
                self._inodes.set_location(made.file, None, b"")
            made.file.attributes = None
            if made.contents:
                made.file.durability.fail(errno.EIO, lost=True)
                self.on_contents_lost(made.file)
            else:
                made.file.durability.error_seq += 1
            directory.durability.error_seq += 1
            self._forget_pending(made)

    def send_with_names(
        self, file: CachedInode, write: Callable[[NameUpdates, Deadline], int], deadline: Deadline
    ) -> int:
        """Write to a file after, or together with, the pending names. Raises OSError and WouldBlock."""
        if self.names.pending and not may_block.get():  # a blocking thread would hold up the flush meanwhile
            with until(deadline, self._flushing):
                done = self._send_with_names(file, write, deadline)
            if done is not None:
                return done
        return write(no_name_updates, self.flush(file, deadline))

    def _send_with_names(
        self, file: CachedInode, write: Callable[[NameUpdates, Deadline], int], deadline: Deadline
    ) -> int | None:
        """Send the next batch of names with the write itself. Returns None if nothing was written, perhaps
        since a name was refused.
        """
        with self._lock:
            if self.names.with_contents:  # which go by FlushNames
                return None
            batch = self.names.begin_flush()
            made = self.names.files.get(file.node)
        if (
            made is not None and made not in batch
        ):  # the flush of its name would set its times after this write
            return None
        flushed: list[PendingFile] = []
        try:
            done = write(functools.partial(name_updates, batch), deadline)
            flushed = batch
        except OSError as error:
            if error.errno in IN_DOUBT:
                raise
            return None
        else:
            return done
        finally:
            with self._lock:
                kept = file.attributes
                self._mark_flushed(flushed)
                file.attributes = kept  # the write's reply is newer than the names

    def _run(self) -> None:
        last = 0
        while True:
            self._working.wait()
            self._many.wait(_TICK_SECONDS)
            self._many.clear()
            if self._closed.is_set():
                return
            last = self._tick(last)

    def _tick(self, last: int) -> int:
        """Flush all pending names if the oldest has been pending for a whole tick, or there is much to send.
        Returns the newest serial number.
        """
        with self._lock:
            oldest = self.names.first
        if self.names.touched or 0 < oldest <= last or self.names.with_contents >= _MANY:
            try:
                self.flush()
            except OSError as error:
                log.debug("pending names cannot be flushed: %s", error)
                self._closed.wait(_REST_SECONDS)
        with self._lock:
            self.delegations.end_idle()
            if not self.names.held and not self.names.pending:
                self._working.clear()
            return self.names.last

# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread, the clock): gathers small writes to new files, and sends them later (write-behind).

Only the data of a file that was made under an exclusive directory delegation is gathered: before anybody else
can look the file up, the directory is recalled, and the data is sent. It is also sent when 1 MiB is gathered,
after about 0.1 s, before this client does anything else with the file, and at the latest when a descriptor
of it is closed: with the file's pending name, and the attributes that were set meanwhile, in one request.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from millpond.base.deadline import Deadline
from millpond.base.errors import RemoteError
from millpond.fs.client.async_create import AsyncCreate
from millpond.fs.client.cache.gathered import Extent, GatheredWrites, may_follow
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.invalidation import Invalidation
from millpond.fs.client.cache.pending_creates import ExclusiveDirectory, PendingFile
from millpond.fs.client.dir_delegations import boottime_ns
from millpond.fs.client.open_files import NameUpdates, OpenFiles
from millpond.fs.client.rpc import is_in_doubt, seconds_left, until
from millpond.fs.client.rpc_pool import RpcPool, now
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.async_create import MAX_TIME
from millpond.fs.proto.setattr import set_attributes
from millpond.fs.proto.write_behind import WriteGathered
from millpond.fs.vfs.inode_api import Buffer, Node, Now, SetAttr
from millpond.fs.vfs.operation import about_to_wait
from millpond.fs.vfs.path_api import Attributes, Handle, os_error
from millpond.wire.messages import Message

log = logging.getLogger(__name__)
MOST_BYTES: Final = 16 << 20
"""Bytes gathered of all files together: then programs wait."""
SET_IDS: Final = stat.S_ISUID | stat.S_ISGID
"""Permissions that a write takes away: a file that has one of them is written through."""
_TICK_SECONDS = 0.05  # data is sent after one or two ticks
_REST_SECONDS = 0.5
_JOIN_SECONDS = 5.0
_THROUGH = os.O_SYNC | os.O_DSYNC | os.O_DIRECT
_NOTHING = SetAttr()


@dataclass(eq=False, slots=True)
class _NewFile:
    """A file that was made under the delegation ``held`` and is open; ``handle`` is the open file by which it
    is written, ``known`` its attributes before the first extent. ``shared``: others may see it by another
    name. ``handed_over`` is what goes with its pending name, and may be taken back. One thread at a time has
    ``sending`` and sends.
    """

    file: CachedInode
    handle: Handle
    held: ExclusiveDirectory
    writes: GatheredWrites = field(default_factory=GatheredWrites)
    known: Attributes | None = None
    end: int = 0
    written_at: int = 0
    shared: bool = False
    handed_over: Extent | None = None
    sending: threading.Lock = field(default_factory=threading.Lock)


class WriteBehind:
    """The gathered writes of one client. ``invalidation`` invalidates what is cached of a file around a
    change, ``learn`` caches the attributes that the change's reply brought, and the data, if it begins the
    file and may be all of it. ``on_lost`` is called, with the
    lock, for a file whose gathered data is lost, of which the kernel has cached pages. Threads may call at
    once.
    """

    def __init__(
        self,
        rpc: RpcPool,
        files: OpenFiles,
        async_create: AsyncCreate,
        invalidation: Callable[[CachedInode], Invalidation],
        learn: Callable[[Invalidation, CachedInode, p.AttributesAre | None, Buffer], None],
    ) -> None:
        self._rpc, self._files, self._async_create = rpc, files, async_create
        self._inodes, self._lock, self._held = rpc.inodes, rpc.lock, async_create.names.held
        self._invalidation, self._learn = invalidation, learn
        async_create.delegations.before_grant = self.flush_below
        self.on_lost: Callable[[CachedInode], None] = lambda _file: None
        async_create.on_contents_lost = lambda file: self.on_lost(file)
        self._new: dict[Node, _NewFile] = {}
        self._dirty: dict[Node, _NewFile] = {}
        self._bytes = 0
        self._sent = threading.Condition(rpc.lock)
        self._due: queue.SimpleQueue[_NewFile | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._sleeps, self._closed = True, threading.Event()

    def close(self) -> None:
        """Send all that is gathered, and gather no more."""
        with self._lock:
            self._closed.set()
        self._due.put(None)
        if self._thread:
            self._thread.join(_JOIN_SECONDS)
        for one in list(self._dirty.values()):
            try:
                self._flush(one, self._rpc.deadline())
            except OSError as error:
                self._lose(one, error)

    def begin(self, file: CachedInode, handle: Handle, mode: int) -> None:
        """With the lock: note that a file was made with these permissions, is open, and its name pending."""
        if not mode & SET_IDS and (made := self._async_create.names.files.get(file.node)):
            self._new[file.node] = _NewFile(file, handle, made.directory)

    def add(self, node: Node, flags: int, data: Buffer, offset: int) -> bool:
        """Gather a write to a file that is opened with these ``flags``; never waits. Returns False if it must
        be written otherwise.
        """
        one = self._new.get(node)
        if one is None or flags & _THROUGH or not data:
            return False
        append, size = bool(flags & os.O_APPEND), len(data)
        with self._lock:
            held, extents, time = one.held, one.writes.extents, now()
            if not self._may_gather(one, time) or self._bytes + size > MOST_BYTES or not self._take_back(one):
                return False
            if extents and extents[-1].accepts(size, offset, append):
                extents[-1].data += data
            elif one.writes.are_full:
                return False
            else:
                self._begin_extent(one, one.writes.begin(data, offset, append, time))
            self._bytes += size
            one.end = one.end + size if append else max(one.end, offset + size)
            one.written_at = boottime_ns() + held.clock_offset
        return True

    def _may_gather(self, one: _NewFile, time: float) -> bool:
        """With the lock: return whether nobody else can see the file, and no loss is to be reported first."""
        held, durability = one.held, one.file.durability
        return (
            held.is_valid
            and self._inodes.lease_end > time
            and self._held.get(held.file.node) is held
            and durability.lost_seq <= durability.reported_seq
            and not (one.shared or self._closed.is_set())
        )

    def _take_back(self, one: _NewFile) -> bool:
        """With the lock: gather again what was to be flushed with a file's name, before more is written.
        False if that is being flushed, attributes were set since, or a close has promised room for it.
        """
        made, extent = self._async_create.names.files.get(one.file.node), one.handed_over
        if made is None or not made.contents:  # there is nothing, or the server has it
            return True
        if extent is None or one.file.attributes is not one.known or not self._may_change(made):
            return False
        self._async_create.names.empty(made)
        one.writes.extents.append(extent)
        self._bytes += len(extent.data)
        self._begin_extent(one, extent)
        return True

    def _begin_extent(self, one: _NewFile, extent: Extent) -> None:
        """With the lock: note that a file has another extent, and have the one before sent."""
        file = one.file
        if len(one.writes.extents) == 1:
            one.known, one.end = file.attributes, file.attributes.size if file.attributes else 0
            one.held.gathered += 1
            file.gathered = True
            self._dirty[file.node] = one
        else:
            self._due.put(one)
        one.held.used = extent.began
        file.has_data = True  # the kernel caches what is written
        file.attributes = None
        self._inodes.change(file)
        if self._sleeps:
            self._sleeps = False
            self._start_thread()
            self._due.put(one)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="write-behind", daemon=True)
            self._thread.start()

    def add_when_sent(self, node: Node, flags: int, data: Buffer, offset: int) -> bool:
        """Gather a write once there is room for another extent; False as ``add``. Raises OSError and
        WouldBlock.
        """
        one = self._new.get(node)
        if one is None or not one.writes.are_full:
            return False
        about_to_wait()
        with self._lock:
            left = seconds_left(self._rpc.deadline())
            self._sent.wait_for(lambda: not one.writes.are_full, min(left, 1.0))
        return self.add(node, flags, data, offset)

    def set(self, file: CachedInode, changes: SetAttr) -> Attributes | None:
        """Have attributes set behind the gathered data. Returns the attributes as they will be, None if they
        must be set otherwise.
        """
        with self._lock:
            one = self._dirty.get(file.node)
            if one is None:
                return self._set_pending(file, changes)
            if one.known is None or not one.writes.set(changes):
                return None
            return self._expected(one, changes)

    def _set_pending(self, file: CachedInode, changes: SetAttr) -> Attributes | None:
        """With the lock: set attributes of a file whose contents are flushed with its name; None if they must
        be set otherwise.
        """
        made = self._async_create.names.files.get(file.node)
        if not made or not self._may_change(made) or not file.attributes or not may_follow(changes):
            return None
        time = boottime_ns() + made.directory.clock_offset
        return self._tell(made, _changed(file.attributes, changes, time, file.attributes.mtime))

    def _may_change(self, made: PendingFile) -> bool:
        """With the lock: return whether a file's contents are to be flushed, and may still be changed."""
        may = self._inodes.lease_end > now() and self._async_create.names.may_change(made)
        return bool(made.contents) and may

    def _tell(self, made: PendingFile, attributes: Attributes) -> Attributes | None:
        """With the lock: have a file get these attributes with its name. None if no message holds them."""
        if not all(0 <= time <= MAX_TIME for time in (attributes.atime, attributes.mtime, attributes.ctime)):
            return None
        made.mode, made.changed = attributes.mode & 0o777, attributes.ctime
        made.time, made.accessed = attributes.mtime, attributes.atime
        made.file.attributes = attributes
        return attributes

    def _expected(self, one: _NewFile, changes: SetAttr) -> Attributes:
        assert one.known
        size = max(one.known.size, one.end)
        known = replace(one.known, size=size, blocks=max(one.known.blocks, -(-size // 4096) * 8))
        one.known = _changed(known, changes, boottime_ns() + one.held.clock_offset, one.written_at)
        one.written_at = one.known.mtime
        return one.known

    def flush(self, file: CachedInode, deadline: Deadline | None = None, *, names: bool = True) -> None:
        """Send what is gathered of a file, and, with ``names``, the names if its contents go with its name. A
        loss is recorded for its open files. Raises OSError if the outcome is not known, and WouldBlock: then
        it is sent again.
        """
        self.flush_node(file.node, deadline, names=names)

    def flush_node(self, node: Node, deadline: Deadline | None = None, *, names: bool = True) -> None:
        """Send what is gathered of the file of a node, as ``flush``."""
        if one := self._dirty.get(node):
            self._flush(one, deadline or self._rpc.deadline())
        made = self._async_create.names.files.get(node) if names else None  # another thread may hand it over
        if made and (made.contents or self._inodes.lease_end <= now()):  # the server may be another one
            self._async_create.flush(deadline=deadline)

    def settle(self, file: CachedInode) -> None:
        """Have the attributes of a file be those that it keeps: what is gathered of it is flushed with its
        name, if there is room for it on the server, or sent. Raises as ``flush``.
        """
        if file.node in self._dirty and not self._hand_over(file):
            self.flush(file, names=False)

    def flush_below(self, directory: CachedInode | None, deadline: Deadline | None = None) -> None:
        """Send what is gathered of the files of one directory, or of all. Raises as ``flush``."""
        for one in list(self._dirty.values()) if self._dirty else ():
            if directory is None or one.held.file is directory:
                self._flush(one, deadline or self._rpc.deadline())

    def publish(self, file: CachedInode | None) -> None:
        """Send what is gathered of a file that is about to be seen elsewhere, and gather no more of it.
        Raises as ``flush``.
        """
        if file and (one := self._new.get(file.node)):
            with self._lock:
                one.shared = True
            self.flush(file)

    def end(self, file: CachedInode, handle: Handle) -> None:
        """Send what is left of a file whose open file is closed for good. Raises WouldBlock."""
        one = self._new.get(file.node)
        if one is None or one.handle != handle:
            return
        try:
            self._flush(one, self._rpc.deadline())
        except OSError as error:
            self._lose(one, error)
        with self._lock:
            self._new.pop(file.node, None)

    def report(self, handle: Handle, *, closing: bool = False) -> None:
        """Raise OSError, once for each open file, if gathered data was lost or, when ``closing``, attributes
        behind it were refused.
        """
        opened = self._files.get(handle)
        durability = opened.file.durability
        if (durability.failed_seq if closing else durability.lost_seq) > opened.seen_seq:
            opened.seen_seq = durability.report(opened.seen_seq) or opened.seen_seq
            raise os_error(durability.code)

    def close_descriptor(self, handle: Handle) -> None:
        """Send what is gathered of an open file, of which a descriptor is closed, or have it flushed with the
        file's name, if there is room for it on the server. Raises OSError: the reason of a loss or a refusal,
        too.
        """
        file = self._files.get(handle).file
        self.settle(file)
        if one := self._new.get(file.node):
            one.handed_over = None  # there is room for it where it is
        self.report(handle, closing=True)

    def _hand_over(self, file: CachedInode) -> bool:
        """Have what is gathered of a file flushed with its name: then nothing is left here, until more is
        written. Returns False if it must be sent by itself.
        """
        with self._lock:
            one, made = self._dirty.get(file.node), self._async_create.names.files.get(file.node)
            if one is None or made is None or one.known is None or not self._may_gather(one, now()):
                return False
            extent = one.writes.extents[0]
            is_whole = len(one.writes.extents) == 1 and not (extent.sealed or extent.append or extent.offset)
            has_room = len(extent.data) <= made.spare.room and self._async_create.names.may_change(made)
            if not (is_whole and has_room and self._tell(made, self._expected(one, _NOTHING))):
                return False
            self._async_create.fill(made, bytes(extent.data))
            self._remove(one, extent)
            one.handed_over = extent
            return True

    def _flush(self, one: _NewFile, deadline: Deadline) -> None:
        with until(deadline, one.sending):
            with self._lock:
                last = one.writes.extents[-1] if one.writes.extents else None
            while last in one.writes.extents:
                self._send_first(one, deadline)

    def _send_first(self, one: _NewFile, deadline: Deadline) -> None:
        """Send the oldest extent, by the only thread that sends this file's."""
        with self._lock:
            if not one.writes.extents:
                return
            extent = one.writes.extents[0]
            extent.sealed = True

        def send(updates: NameUpdates, deadline: Deadline) -> int:
            return self._send(one, extent, updates, deadline)

        try:
            while extent in one.writes.extents:
                self._async_create.send_with_names(one.file, send, deadline)
        except OSError as error:
            if is_in_doubt(error):
                raise
            self._lose(one, error)

    def _send(self, one: _NewFile, extent: Extent, updates: NameUpdates, deadline: Deadline) -> int:
        """Send what the server does not have yet of an extent; return how much it has taken."""
        opened, held, left = self._files.get(one.handle), one.held, memoryview(extent.data)[extent.written :]
        with self._invalidation(one.file) as change, self._rpc.call(deadline) as call:

            def prepare() -> Message:
                granted = held.granted if held.verifier == call.verifier else 0
                if not granted and extent.append:  # the server before may have appended it
                    raise os_error(errno.ESTALE)
                then = set_attributes(0, extent.changes, None) if extent.changes else None
                place = (held.file.inode, granted, extent.append, updates(call.verifier), then)
                return WriteGathered(self._files.remote(call, opened), extent.offset + extent.written, *place)

            reply, _ = call.ask(prepare, p.Written, idempotent=not extent.append, payload=left)
        if not 0 < reply.count <= len(left):
            raise os_error(errno.EIO) from RemoteError("the device's server has written an impossible number")
        with self._lock:
            extent.written += reply.count
            if extent.written == len(extent.data):
                self._remove(one, extent)
            if reply.refused:
                one.file.durability.fail(reply.refused, lost=False)
        if reply.refused:
            log.warning("attributes of a new file are not set: %s", os.strerror(reply.refused))
        self._learn(change, one.file, reply.file, b"" if extent.append or extent.offset else extent.data)
        return reply.count

    def _remove(self, one: _NewFile, extent: Extent) -> None:
        """With the lock: remove an extent that was sent, or is lost."""
        if extent not in one.writes.extents:
            return
        one.writes.extents.remove(extent)
        self._bytes -= len(extent.data)
        if not one.writes.extents:
            self._dirty.pop(one.file.node, None)
            one.file.gathered = False
            one.held.gathered -= 1
        self._sent.notify_all()

    def _lose(self, one: _NewFile, error: OSError) -> None:
        """Discard all that is gathered of a file; each of its open files reports the reason once."""
        code = errno.EIO if error.errno == errno.ESTALE else error.errno or errno.EIO
        with self._lock:
            lost = one.writes.size
            for extent in list(one.writes.extents):
                self._remove(one, extent)
            if lost:
                one.file.durability.fail(code, lost=True)
                self.on_lost(one.file)
        log.warning("%d bytes of a new file are lost that did not reach the device: %s", lost, error.strerror)

    def _run(self) -> None:
        """Send what is full, and after a while what is not."""
        while not self._closed.is_set():
            try:
                one = self._due.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                one = None
            time = now()
            due = [each for each in list(self._dirty.values()) if each is one or _is_old(each, time)]
            for each in due:
                self._flush_due(each, whole=each is not one or _is_old(each, time))
            with self._lock:
                self._sleeps = not self._dirty
            if self._sleeps and (one := self._due.get()):
                self._due.put(one)

    def _flush_due(self, one: _NewFile, *, whole: bool) -> None:
        try:
            deadline = self._rpc.deadline()
            if whole:
                self._flush(one, deadline)
                return
            with until(deadline, one.sending):
                while len(one.writes.extents) > 1:
                    self._send_first(one, deadline)
        except OSError as error:
            log.debug("gathered data cannot be sent: %s", error)
            self._closed.wait(_REST_SECONDS)


def _is_old(one: _NewFile, time: float) -> bool:
    extents = one.writes.extents
    try:
        return time - extents[0].began > _TICK_SECONDS
    except IndexError:
        return False


def _changed(known: Attributes, changes: SetAttr, time: int, written_at: int) -> Attributes:
    """Return the attributes of a file after these changes at ``time``, last written before at that time."""
    return replace(
        known,
        mode=known.mode if changes.mode is None else known.mode & ~0o777 | changes.mode,
        atime=_time(changes.atime, time, known.atime),
        mtime=_time(changes.mtime, time, written_at),
        ctime=time,
    )


def _time(asked: int | Now | None, now_ns: int, before: int) -> int:
    if asked is None:
        return before
    return now_ns if isinstance(asked, Now) else asked

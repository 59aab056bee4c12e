# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread, the clock): gathers writes to new files, and sends them later (write-behind).

Only the data of a file that this client has made is gathered, as long as it has the write delegation that
came with the reply: before anybody else can look at the file, the delegation is recalled, and the data is
sent. It is also sent when 1 MiB is gathered, after about 0.1 s, before this client does anything else with
the file, and when a descriptor of it is closed; that ends the delegation.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import stat
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from millpond.base.deadline import Deadline
from millpond.base.errors import RemoteError
from millpond.fs.client.cache.gathered import Extent, changed, may_follow, merged
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.invalidation import Invalidation
from millpond.fs.client.connection import is_in_doubt, seconds_left
from millpond.fs.client.open_files import OpenFiles
from millpond.fs.client.session import Session, now
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import Buffer, Node, SetAttr
from millpond.fs.vfs.operation import about_to_wait, held
from millpond.fs.vfs.path_api import Attributes, Handle, os_error
from millpond.wire.messages import Message

log = logging.getLogger(__name__)
MOST_BYTES: Final = 16 << 20
"""Bytes gathered of all files together: then programs wait."""
_MOST_EXTENTS = 4
_TICK_SECONDS = 0.05  # data is sent after one or two ticks
_REST_SECONDS = 0.5
_JOIN_SECONDS = 5.0
_SET_IDS = stat.S_ISUID | stat.S_ISGID  # a write takes them away: such a file is written through
_THROUGH = os.O_SYNC | os.O_DSYNC | os.O_DIRECT


@dataclass(eq=False, slots=True)
class _NewFile:
    """A file with a write delegation, which lasts as long as ``drops`` is that of the file; ``handle`` is the
    open file by which it is written, made in the session ``verifier``. ``until`` is when the lease ended that
    covered the last write. ``known`` are its attributes before the first extent, ``end`` is where its data
    ends. ``is_over``: nothing is gathered any more. One thread at a time has ``sending`` and sends.
    """

    file: CachedInode
    handle: Handle
    drops: int
    verifier: int
    until: float = 0.0
    extents: deque[Extent] = field(default_factory=deque)
    known: Attributes | None = None
    end: int = 0
    is_over: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)


class WriteBehind:
    """The gathered writes of one client. ``invalidation`` invalidates what is cached of a file around a
    change, ``learn`` caches the attributes that the change's reply brought, and the data, if it begins the
    file and may be all of it. ``on_lost`` is called, with the lock, for a file whose gathered data is lost,
    of which the kernel has cached pages. Threads may call at once.
    """

    def __init__(
        self,
        session: Session,
        files: OpenFiles,
        invalidation: Callable[[CachedInode], Invalidation],
        learn: Callable[[Invalidation, CachedInode, p.AttributesAre | None, Buffer], None],
        on_lost: Callable[[CachedInode], None],
    ) -> None:
        self._session, self._files, self._invalidation, self._learn = session, files, invalidation, learn
        self._inodes, self._lock, self._on_lost = session.inodes, session.lock, on_lost
        self._new: dict[Node, _NewFile] = {}
        self._dirty: dict[Node, _NewFile] = {}
        self._bytes = 0
        self._sent = threading.Condition(session.lock)
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
        deadline = self._session.deadline()
        for one in list(self._dirty.values()):
            self._flush_or_lose(one, deadline)

    @property
    def dirty(self) -> int:
        """Bytes that are gathered, and not yet on the device."""
        return self._bytes

    def may_begin(self, flags: int, mode: int) -> bool:
        """Return whether writes to a file that is made with these flags and permissions may be gathered."""
        return flags & os.O_ACCMODE != os.O_RDONLY and not (flags & _THROUGH or mode & _SET_IDS)

    def begin(self, file: CachedInode, handle: Handle, granted: int) -> None:
        """Gather the writes to a file that was made and is open, under this grant unless it is recalled."""
        verifier = self._files.get(handle).verifier
        with self._lock:  # a newer grant does not stand for one that was recalled before its reply came
            if 0 < granted <= file.granted and self._inodes.is_held(file.inode, granted, verifier):
                self._new[file.node] = _NewFile(file, handle, file.drops, verifier)

    def add(self, node: Node, flags: int, data: Buffer, offset: int) -> bool:
        """Gather a write to a file that is opened with these ``flags``; never waits. Returns False if it must
        be written otherwise.
        """
        one = self._new.get(node)
        if one is None or flags & _THROUGH or not data:
            return False
        append, size = bool(flags & os.O_APPEND), len(data)
        with self._lock:
            if not self._may_gather(one) or self._bytes + size > MOST_BYTES:
                return False
            if one.extents and one.extents[-1].accepts(size, offset, append):
                one.extents[-1].data += data
            elif len(one.extents) >= _MOST_EXTENTS:
                return False
            else:
                self._begin_extent(one, Extent(offset, append, now(), bytearray(data)))
            self._bytes += size
            one.until = self._inodes.lease_end
            one.end = one.end + size if append else max(one.end, offset + size)
        return True

    def _may_gather(self, one: _NewFile) -> bool:
        """With the lock: return whether nobody else can see the file, and no loss is to be reported first."""
        file, durability = one.file, one.file.durability
        return (
            file.drops == one.drops
            and self._inodes.lease_end > now()
            and durability.lost_seq <= durability.reported_seq
            and not (one.is_over or self._closed.is_set())
        )

    def _begin_extent(self, one: _NewFile, extent: Extent) -> None:
        """With the lock: add an extent to a file, and have the one before sent."""
        file = one.file
        if one.extents:
            one.extents[-1].sealed = True
            self._due.put(one)
        else:
            one.known, one.end = file.attributes, file.attributes.size if file.attributes else 0
            file.gathered, self._dirty[file.node] = True, one
        one.extents.append(extent)
        file.has_data = True  # the kernel caches what is written
        file.attributes = None
        self._inodes.change(file)
        if self._sleeps:
            self._sleeps = False
            self._start_thread()
            self._due.put(None)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="write-behind", daemon=True)
            self._thread.start()

    def add_when_sent(self, node: Node, flags: int, data: Buffer, offset: int) -> bool:
        """Gather a write once there is room for another extent; False as ``add``. Raises OSError."""
        one = self._new.get(node)
        if one is None or len(one.extents) < _MOST_EXTENTS:
            return False
        about_to_wait()
        with self._lock:
            left = seconds_left(self._session.deadline())
            self._sent.wait_for(lambda: len(one.extents) < _MOST_EXTENTS, min(left, 1.0))
        return self.add(node, flags, data, offset)

    def set(self, file: CachedInode, changes: SetAttr) -> Attributes | None:
        """Have attributes set behind the gathered data. Returns the attributes as they will be, None if they
        must be set otherwise.
        """
        with self._lock:
            if (changes.mode or 0) & _SET_IDS and (made := self._new.get(file.node)):
                made.is_over = True
            one = self._dirty.get(file.node)
            last = one.extents[-1] if one else None
            if not (one and one.known and last) or last.sealed or last.append or not may_follow(changes):
                return None
            last.changes = merged(last.changes, changes)
            one.known = changed(one.known, changes, one.end)
            return one.known

    def flush(self, file: CachedInode, deadline: Deadline | None = None) -> None:
        """Send what is gathered of a file. A loss is recorded for its open files. Raises OSError if the
        outcome is not known: then it is sent again.
        """
        if one := self._dirty.get(file.node):
            self._flush(one, deadline or self._session.deadline())

    def flush_all(self) -> None:
        """Send what is gathered of all files. Raises as ``flush``."""
        for one in list(self._dirty.values()):
            self._flush(one, self._session.deadline())

    def end_lease(self) -> None:
        """Note that a recall is refused, so that the server lets others change files whose data is not sent:
        one that is started again does not know of it.
        """
        with self._lock:
            for one in self._dirty.values():
                one.until = 0.0

    def close_descriptor(self, handle: Handle) -> None:
        """Send what is gathered of an open file, of which a descriptor is closed, and gather no more of it.
        Raises OSError: the reason of a loss, too.
        """
        opened = self._files.get(handle)
        durability = opened.file.durability
        if one := self._dirty.get(opened.file.node):
            with self._lock:
                one.is_over = True
            self._flush(one, self._session.deadline())
        if durability.lost_seq > opened.seen_seq:
            opened.seen_seq = durability.report(opened.seen_seq) or opened.seen_seq
            raise os_error(durability.code)

    def end(self, file: CachedInode, handle: Handle) -> None:
        """Send what is left of a file whose open file is closed for good."""
        one = self._new.get(file.node)
        if one and one.handle == handle:
            with self._lock:  # another open file's writes cannot be sent by this one any more
                one.is_over = True
            self._flush_or_lose(one, self._session.deadline())
            with self._lock:
                self._new.pop(file.node, None)

    def report(self, handle: Handle) -> None:
        """Raise OSError, at one write by each open file, if gathered data was lost. The next sync or close
        says so, too: the kernel tells of half a write, and not of the error of the other half.
        """
        opened = self._files.get(handle)
        durability = opened.file.durability
        if durability.lost_seq > max(opened.seen_seq, opened.told_seq):
            opened.told_seq = durability.lost_seq
            raise os_error(durability.code)

    def _flush_or_lose(self, one: _NewFile, deadline: Deadline) -> None:
        try:
            self._flush(one, deadline)
        except OSError as error:
            self._lose(one, error)

    def _flush(self, one: _NewFile, deadline: Deadline) -> None:
        with held(one.sending, seconds_left(deadline)):
            with self._lock:
                last = one.extents[-1] if one.extents else None
            while last in one.extents:
                self._send_first(one, deadline)

    def _send_first(self, one: _NewFile, deadline: Deadline) -> None:
        """Send the oldest extent, by the only thread that sends this file's."""
        with self._lock:
            if not one.extents:
                return
            extent = one.extents[0]
            extent.sealed = True
        try:
            while extent in one.extents:
                self._send(one, extent, deadline)
        except OSError as error:
            if is_in_doubt(error):
                raise
            if not extent.changes:
                self._lose(one, error)
                return
            with self._lock:  # they may be what was refused: the data is sent again, without them
                extent.changes, one.known = None, None
                one.file.durability.fail(_code(error))

    def _send(self, one: _NewFile, extent: Extent, deadline: Deadline) -> None:
        """Send what the server does not have yet of an extent."""
        opened, left = self._files.get(one.handle), memoryview(extent.data)[extent.written :]
        if extent.append and extent.in_doubt:
            raise os_error(errno.EIO) from RemoteError("the device's server may have appended it")
        with self._invalidation(one.file) as change, self._session.call(deadline) as call:

            def prepare() -> Message:
                is_last = one.is_over and len(one.extents) == 1
                place = self._files.remote(call, opened), extent.offset + extent.written  # it may wait
                reclaim = call.verifier != one.verifier
                if reclaim and now() > one.until:
                    raise os_error(errno.EIO) from RemoteError("others may have changed it by now")
                extent.in_doubt = True
                return p.Write(*place, extent.append, True, extent.changes, is_last, reclaim)

            reply, _ = call.ask(prepare, p.Written, idempotent=not extent.append, payload=left)
        if not 0 < reply.count <= len(left):
            raise os_error(errno.EIO) from RemoteError("the device's server has written an impossible number")
        with self._lock:
            extent.written, extent.in_doubt = extent.written + reply.count, False
            if extent.written == len(extent.data):
                self._remove(one, extent)
        self._learn(change, one.file, reply.file, b"" if extent.append or extent.offset else extent.data)

    def _remove(self, one: _NewFile, extent: Extent) -> None:
        """With the lock: remove an extent that was sent, or is lost."""
        one.extents.remove(extent)
        self._bytes -= len(extent.data)
        if not one.extents:
            self._dirty.pop(one.file.node, None)
            one.file.gathered = False
        self._sent.notify_all()

    def _lose(self, one: _NewFile, error: OSError) -> None:
        """Discard all that is gathered of a file; each of its open files reports the reason."""
        with self._lock:
            lost = sum(len(extent.data) for extent in one.extents)
            for extent in list(one.extents):
                self._remove(one, extent)
            if lost:
                one.file.durability.fail(_code(error))
                self._on_lost(one.file)
        if lost:
            text = "%d bytes of a new file are lost that did not reach the device: %s"
            log.warning(text, lost, error.strerror)

    def _run(self) -> None:
        """Send what is full, and after a while what is not."""
        while not self._closed.is_set():
            try:
                one = self._due.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                one = None
            time = now() - _TICK_SECONDS
            for each in list(self._dirty.values()):
                is_old = any(extent.began < time for extent in list(each.extents)[:1])
                if each is one or is_old:
                    self._flush_due(each, whole=is_old)
            with self._lock:
                self._sleeps = not self._dirty
            if self._sleeps:
                self._due.get()

    def _flush_due(self, one: _NewFile, *, whole: bool) -> None:
        try:
            deadline = self._session.deadline()
            if whole:
                self._flush(one, deadline)
                return
            with held(one.sending, seconds_left(deadline)):
                while len(one.extents) > 1:
                    self._send_first(one, deadline)
        except OSError as error:
            log.debug("gathered data cannot be sent: %s", error)
            self._closed.wait(_REST_SECONDS)


def _code(error: OSError) -> int:
    """Return what programs are told of a loss."""
    return errno.EIO if error.errno == errno.ESTALE else error.errno or errno.EIO

# SPDX-License-Identifier: Apache-2.0
"""Edge: reads ahead of programs that read files in order, over a few connections of its own.

Requests are pipelined: so many are under way that the next part has arrived when it is wanted. Data counts
only if it was granted and not recalled since.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from millpond.base.deadline import Deadline
from millpond.fs.client.cache.blocks import BLOCK, Block, BlockCache
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.connection import SlotLost, seconds_left
from millpond.fs.client.open_files import OpenFile
from millpond.fs.client.reply_buffers import ReplyBuffers
from millpond.fs.client.session import Session
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.operation import held
from millpond.fs.vfs.path_api import MAX_TRANSFER, Handle

EXTENT = MAX_TRANSFER
_LONG_READ = 128 << 10  # bytes: a read of so many at a file's beginning counts as sequential
_FIRST_WINDOW, _LAST_WINDOW = 2, 8  # extents
_LANES = 4
_SPARE = 4
_BEHIND = 2  # extents: requests of one reader may come in another order than they were made


@dataclass(eq=False, slots=True)
class _Extent:
    size: int
    data: memoryview | None = None
    granted: int = 0
    failed: bool = False
    drops: int = 0


@dataclass(slots=True)
class _Stream:
    file: CachedInode
    next: int = -1
    window: int = 0
    stale: bool = False
    extents: dict[int, _Extent] = field(default_factory=dict)

    def is_sequential(self, size: int, offset: int, end: int) -> bool:
        """Return whether the file is read in order; update the stream's state."""
        near = self.window > 0 and abs(offset - self.next) <= _BEHIND * EXTENT
        in_order = near or offset == self.next or (offset == 0 and size >= _LONG_READ)
        self.next = max(self.next, offset + size) if near else offset + size
        if self.stale or not in_order:
            self.stale = False
            self.drop()
        elif not self.window and end > offset + size:
            self.window = _FIRST_WINDOW
        return in_order and self.window > 0 and offset < end

    def drop(self) -> None:
        """Forget what was read ahead; replies under way are received and dropped."""
        self.window = 0
        self.extents.clear()


class Readahead:
    """The readahead of one client. Threads may call at once: files are spread over a few lanes, of which each
    serves one thread at a time.
    """

    def __init__(self, session: Session, blocks: BlockCache) -> None:
        self._session, self._blocks = session, blocks
        self._lanes = [_Lane(session, blocks) for _ in range(_LANES)]

    def take(
        self, handle: Handle, opened: OpenFile, size: int, offset: int, end: int
    ) -> tuple[int, memoryview] | None:
        """Return the grant and the data that was read ahead of a file of ``end`` bytes.

        Returns None if the file is not read in order, or cannot be read this way. Raises OSError: ETIMEDOUT
        if other threads take too long; EINTR.
        """
        lane, deadline = self._lanes[handle % _LANES], self._session.deadline()
        with held(lane.lock, seconds_left(deadline), interruptible=True):
            return lane.take(handle, opened, size, offset, end, deadline)

    def drop(self, file: CachedInode) -> None:
        """With the client's lock: invalidate all that was read ahead of this file."""
        for lane in self._lanes:
            for stream in list(lane.streams.values()):
                if stream.file is file:
                    stream.stale = True
        self._blocks.changed(file)

    def forget(self, handle: Handle) -> None:
        """Drop the stream of a handle that was closed."""
        lane = self._lanes[handle % _LANES]
        if handle in lane.streams:
            with lane.lock:
                lane.streams.pop(handle).drop()


class _Lane:
    """The readahead of some files, over one connection. Its methods are called with the lock; ``deadline`` is
    that of the read under way.
    """

    def __init__(self, session: Session, blocks: BlockCache) -> None:
        self._connection, self.lock = session.connection(spare=True), threading.Lock()
        self._meter, self._blocks, self._deadline = session.meter, blocks, Deadline.after(None)
        self.streams: dict[Handle, _Stream] = {}
        self._in_flight: deque[_Extent] = deque()
        self._buffers = ReplyBuffers(_SPARE)

    def take(
        self, handle: Handle, opened: OpenFile, size: int, offset: int, end: int, deadline: Deadline
    ) -> tuple[int, memoryview] | None:
        """Return the grant and the data, or None; see ``Readahead.take``."""
        stream, self._deadline = self.streams.setdefault(handle, _Stream(opened.file)), deadline
        try:
            if not stream.is_sequential(size, offset, end):
                return self._read_block(opened, size, offset, end)
            wanted = range(offset // EXTENT, -(-(offset + size) // EXTENT))
            self._connect(opened.verifier)
            with self._connection:
                self._request(stream, opened, wanted, end)
                return self._read_extents(stream, offset, min(size, end - offset))
        except (SlotLost, OSError):
            self._connection.disconnect()
            self._in_flight.clear()
            for each in self.streams.values():
                each.drop()
            return None

    def _connect(self, verifier: int) -> None:
        """Connect for a file that was opened in this session. Raises SlotLost and OSError."""
        if not self._connection.is_connected:
            self._connection.connect(self._deadline)
        if self._connection.verifier != verifier:  # the server has forgotten the file
            raise SlotLost(in_doubt=False)

    def _request(self, stream: _Stream, opened: OpenFile, wanted: range, end: int) -> None:
        """Send requests for the wanted extents and for the window behind them."""
        for index in [index for index in stream.extents if index < wanted.start - _BEHIND]:
            del stream.extents[index]
        for index in range(wanted.start, wanted.stop + stream.window):
            start = index * EXTENT
            if start < end and index not in stream.extents:
                stream.extents[index] = self._send(opened, start, min(EXTENT, end - start))

    def _send(self, opened: OpenFile, start: int, size: int) -> _Extent:
        extent = _Extent(size, drops=opened.file.drops)
        self._connection.send(p.Read(opened.remote, size, start, True, at_once=True), self._deadline)
        self._in_flight.append(extent)
        return extent

    def _read_extents(self, stream: _Stream, offset: int, size: int) -> tuple[int, memoryview] | None:
        """Return the grant and the bytes once they have arrived: a view of one extent, or a copy from
        several.
        """
        parts, grants, at = [], [], offset
        while at < offset + size:
            extent = stream.extents[at // EXTENT]
            if extent.data is None and not extent.failed:
                stream.window = min(2 * stream.window, _LAST_WINDOW)
                self._receive(extent)
            dropped = extent.drops != stream.file.drops  # a grant of an earlier session is void
            if dropped or extent.data is None or len(extent.data) != extent.size:
                stream.drop()
                return None
            start = at % EXTENT
            parts.append(extent.data[start : start + offset + size - at])
            grants.append(extent.granted)
            at += len(parts[-1])
        if stream.stale:
            return None
        self._meter.ahead_used += at - offset
        return min(grants), parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _read_block(
        self, opened: OpenFile, size: int, offset: int, end: int
    ) -> tuple[int, memoryview] | None:
        """Return the grant and the bytes of a randomly read file, from the block cache or after reading the
        whole block.
        """
        file, index = opened.file, offset // BLOCK
        if not self._blocks.serves(size, offset, end):
            return None
        block = self._blocks.get(file, index)
        if block is None:
            version = self._blocks.version(file)
            self._connect(opened.verifier)
            with self._connection:
                extent = self._send(opened, index * BLOCK, min(BLOCK, end - index * BLOCK))
                self._receive(extent)
            if extent.data is None or len(extent.data) != extent.size:
                return None
            block = Block(memoryview(bytes(extent.data)), extent.granted, version)
            self._blocks.keep(file, index, block)
        start = offset % BLOCK
        return block.granted, block.data[start : start + size]

    def _receive(self, wanted: _Extent) -> None:
        """Receive replies, in order, until the wanted one has arrived."""
        while wanted.data is None and not wanted.failed:
            extent = self._in_flight.popleft()
            reply, data = self._connection.receive(self._deadline, EXTENT, self._buffers)
            self._meter.ahead += len(data)
            if isinstance(reply, p.Data):
                extent.data, extent.granted = data, reply.granted
            else:
                extent.failed = True

# SPDX-License-Identifier: Apache-2.0
"""Edge: reads ahead of programs that read files in order, over a few session slots of its own.

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
from millpond.fs.client.open_files import OpenFile
from millpond.fs.client.reply_buffers import ReplyBuffers
from millpond.fs.client.rpc import Exchange, SlotLost, seconds_left
from millpond.fs.client.rpc_pool import RpcPool
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.operation import held
from millpond.fs.vfs.path_api import MAX_TRANSFER, Handle

EXTENT = MAX_TRANSFER
_LONG_READ = 128 << 10  # bytes: a read of so many at a file's beginning counts as sequential
_FIRST_WINDOW, _LAST_WINDOW = 2, 8  # extents
_SLOTS = 4
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


class Readahead:
    """The readahead of one client. Threads may call at once: files are spread over a few slots, of which each
    serves one thread at a time.
    """

    def __init__(self, rpc: RpcPool, blocks: BlockCache) -> None:
        self._rpc, self._blocks = rpc, blocks
        self._slots = [_PipelinedSlot(rpc, self._blocks) for _ in range(_SLOTS)]

    def _slot(self, handle: Handle) -> _PipelinedSlot:
        return self._slots[handle % _SLOTS]

    def take(
        self, handle: Handle, opened: OpenFile, size: int, offset: int, end: int
    ) -> tuple[int, memoryview] | None:
        """Return the grant and the data that was read ahead of a file of ``end`` bytes.

        Returns None if the file is not read in order, or cannot be read this way. Raises OSError: ETIMEDOUT
        if other threads take too long.
        """
        slot, deadline = self._slot(handle), self._rpc.deadline()
        with held(slot.lock, seconds_left(deadline)):
            return slot.take(handle, opened, size, offset, end, deadline)

    def drop(self, file: CachedInode) -> None:
        """With the client's lock: invalidate all that was read ahead of this file."""
        for slot in self._slots:
            slot.drop(file)
        self._blocks.changed(file)

    def forget(self, handle: Handle) -> None:
        """Drop the stream of a handle that was closed."""
        self._slot(handle).forget(handle)


class _PipelinedSlot:
    """The readahead of some files, over one session slot."""

    def __init__(self, rpc: RpcPool, blocks: BlockCache) -> None:
        self._slot, self.lock = rpc.new_slot(blocking=False), threading.Lock()
        self._meter, self._blocks = rpc.meter, blocks
        self._streams: dict[Handle, _Stream] = {}
        self._in_flight: deque[_Extent] = deque()
        self._buffers = ReplyBuffers(_SPARE)

    def take(
        self, handle: Handle, opened: OpenFile, size: int, offset: int, end: int, deadline: Deadline
    ) -> tuple[int, memoryview] | None:
        """With the lock: return the grant and the data, or None; see ``Readahead.take``."""
        stream = self._streams.setdefault(handle, _Stream(opened.file))
        try:
            if not self._is_sequential(stream, size, offset, end):
                return self._read_block(opened, size, offset, end, deadline)
            wanted = range(offset // EXTENT, -(-(offset + size) // EXTENT))
            with self._using(opened.verifier, deadline) as connection:
                self._request(connection, stream, opened, wanted, end, deadline)
                return self._read_extents(connection, stream, offset, min(size, end - offset), deadline)
        except (SlotLost, OSError):
            self._slot.disconnect()
            self._in_flight.clear()
            for each in self._streams.values():
                self._drop(each)
            return None

    def _using(self, verifier: int, deadline: Deadline) -> Exchange:
        """Use the connection for a file that was opened in this session. Raises SlotLost and OSError."""
        if not self._slot.is_connected:
            self._slot.connect(deadline)
        if self._slot.verifier != verifier:  # the server has forgotten the file
            raise SlotLost(in_doubt=False)
        return self._slot.using()

    def _is_sequential(self, stream: _Stream, size: int, offset: int, end: int) -> bool:
        """Return whether the file is read in order; update the stream's state."""
        near = stream.window > 0 and abs(offset - stream.next) <= _BEHIND * EXTENT
        in_order = near or offset == stream.next or (offset == 0 and size >= _LONG_READ)
        stream.next = max(stream.next, offset + size) if near else offset + size
        if stream.stale or not in_order:
            stream.stale = False
            self._drop(stream)
        elif not stream.window and end > offset + size:
            stream.window = _FIRST_WINDOW
        return in_order and stream.window > 0 and offset < end

    def _request(
        self,
        connection: Exchange,
        stream: _Stream,
        opened: OpenFile,
        wanted: range,
        end: int,
        deadline: Deadline,
    ) -> None:
        """Send requests for the wanted extents and for the window behind them."""
        for index in [index for index in stream.extents if index < wanted.start - _BEHIND]:
            del stream.extents[index]
        for index in range(wanted.start, wanted.stop + stream.window):
            start = index * EXTENT
            if start >= end or index in stream.extents:
                continue
            extent = stream.extents[index] = _Extent(min(EXTENT, end - start), drops=stream.file.drops)
            connection.send(p.Read(opened.remote, extent.size, start, True), deadline)
            self._in_flight.append(extent)

    def _read_extents(
        self, connection: Exchange, stream: _Stream, offset: int, size: int, deadline: Deadline
    ) -> tuple[int, memoryview] | None:
        """Return the grant and the bytes once they have arrived: a view of one extent, or a copy from
        several.
        """
        parts, grants, at = [], [], offset
        while at < offset + size:
            extent = stream.extents[at // EXTENT]
            if extent.data is None and not extent.failed:
                stream.window = min(2 * stream.window, _LAST_WINDOW)
                self._receive(connection, extent, deadline)
            dropped = extent.drops != stream.file.drops  # a grant of an earlier session is void
            if dropped or extent.failed or extent.data is None or len(extent.data) != extent.size:
                self._drop(stream)
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
        self, opened: OpenFile, size: int, offset: int, end: int, deadline: Deadline
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
            extent = _Extent(min(BLOCK, end - index * BLOCK))
            request = p.Read(opened.remote, extent.size, index * BLOCK, True)
            with self._using(opened.verifier, deadline) as connection:
                connection.send(request, deadline)
                self._in_flight.append(extent)
                self._receive(connection, extent, deadline)
            if extent.failed or extent.data is None or len(extent.data) != extent.size:
                return None
            block = Block(memoryview(bytes(extent.data)), extent.granted, version)
            self._blocks.keep(file, index, block)
        start = offset % BLOCK
        return block.granted, block.data[start : start + size]

    def _receive(self, connection: Exchange, wanted: _Extent, deadline: Deadline) -> None:
        """Receive replies, in order, until the wanted one has arrived."""
        while wanted.data is None and not wanted.failed:
            extent = self._in_flight.popleft()
            reply, data = connection.receive(deadline, EXTENT, self._buffers)
            self._meter.ahead += len(data)
            if isinstance(reply, p.Data):
                extent.data, extent.granted = data, reply.granted
            else:
                extent.failed = True

    def drop(self, file: CachedInode) -> None:
        """Invalidate all extents of this file."""
        for stream in list(self._streams.values()):
            if stream.file is file:
                stream.stale = True

    def forget(self, handle: Handle) -> None:
        """Drop the stream of a handle that was closed."""
        if handle in self._streams:
            with self.lock:
                self._drop(self._streams.pop(handle))

    def _drop(self, stream: _Stream) -> None:
        stream.window = 0
        stream.extents.clear()  # replies under way are received and dropped

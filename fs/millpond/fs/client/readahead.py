# SPDX-License-Identifier: Apache-2.0
"""Edge: reads ahead of programs that read files in order, over a few session slots of its own.

Requests are pipelined: so many are under way that the next part has arrived when it is wanted. Data counts
only if it was granted and not recalled since.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError, ProtocolError
from millpond.fs.client.cache.blocks import BLOCK, Block, BlockCache
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.metrics import OperationMeter
from millpond.fs.client.open_files import OpenFile
from millpond.fs.client.rpc import Dial, seconds_left, until
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.operation import current, woken_by
from millpond.fs.vfs.path_api import MAX_TRANSFER, Handle
from millpond.wire.channel import Channel
from millpond.wire.framing import Head

EXTENT = MAX_TRANSFER
_LONG_READ = 128 << 10  # bytes: a read of so many at a file's beginning counts as sequential
_FIRST_WINDOW, _LAST_WINDOW = 2, 8  # extents
_LANES = 4
_SPARE = 4
_BEHIND = 2  # extents: requests of one reader may come in another order than they were made
_UNSHARED = sys.getrefcount(bytearray()) + 1  # references to a buffer in a list of which there is no view


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
    """The readahead of the client with this name. Threads may call at once: files are spread over a few
    lanes, of which each serves one thread at a time. The others wait, for ``timeout`` seconds after their
    operations began.
    """

    def __init__(
        self, dial: Dial, client: bytes, timeout: float, meter: OperationMeter | None = None
    ) -> None:
        self._blocks = BlockCache()
        meter = meter or OperationMeter()
        self._lanes = [_Lane(dial, client, timeout, meter, self._blocks) for _ in range(_LANES)]

    def _lane(self, handle: Handle) -> _Lane:
        return self._lanes[handle % _LANES]

    def take(
        self, handle: Handle, opened: OpenFile, size: int, offset: int, end: int
    ) -> tuple[int, memoryview] | None:
        """Return the grant and the data that was read ahead of a file of ``end`` bytes.

        Returns None if the file is not read in order, or cannot be read this way. Raises OSError: ETIMEDOUT
        if other threads take too long.
        """
        return self._lane(handle).take(handle, opened, size, offset, end)

    def drop(self, file: CachedInode) -> None:
        """With the client's lock: invalidate all that was read ahead of this file."""
        for lane in self._lanes:
            lane.drop(file)
        self._blocks.changed(file)

    def forget(self, handle: Handle) -> None:
        """Drop the stream of a handle that was closed."""
        self._lane(handle).forget(handle)

    def close(self) -> None:
        """Disconnect."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """The readahead of some files, over one connection."""

    def __init__(
        self, dial: Dial, client: bytes, timeout: float, meter: OperationMeter, blocks: BlockCache
    ) -> None:
        self._dial, self._client, self._timeout = dial, client, timeout
        self._slot_id = os.urandom(16)
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._verifier = 0
        self._meter, self._blocks = meter, blocks
        self._streams: dict[Handle, _Stream] = {}
        self._in_flight: deque[_Extent] = deque()
        self._spare: list[bytearray] = []

    def take(
        self, handle: Handle, opened: OpenFile, size: int, offset: int, end: int
    ) -> tuple[int, memoryview] | None:
        """Return the grant and the data, or None; see ``Readahead.take``."""
        operation = current.get()
        began = operation.began if operation and operation.began else time.monotonic()
        deadline = Deadline(began + self._timeout)
        with until(deadline, self._lock):
            return self._take(handle, opened, size, offset, end, deadline)

    def _take(
        self, handle: Handle, opened: OpenFile, size: int, offset: int, end: int, deadline: Deadline
    ) -> tuple[int, memoryview] | None:
        try:
            stream = self._streams.setdefault(handle, _Stream(opened.file))
            if not self._is_sequential(stream, size, offset, end):
                return self._read_block(opened, size, offset, end, deadline)
            self._request(
                stream, opened, range(offset // EXTENT, -(-(offset + size) // EXTENT)), end, deadline
            )
            return self._read_extents(stream, offset, min(size, end - offset), deadline)
        except (MillpondError, OSError):
            self._disconnect()
            return None

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
        self, stream: _Stream, opened: OpenFile, wanted: range, end: int, deadline: Deadline
    ) -> None:
        """Send requests for the wanted extents and for the window behind them."""
        channel = self._connected(opened.verifier, deadline)
        for index in [index for index in stream.extents if index < wanted.start - _BEHIND]:
            self._recycle(stream.extents.pop(index))
        for index in range(wanted.start, wanted.stop + stream.window):
            start = index * EXTENT
            if start >= end or index in stream.extents:
                continue
            extent = stream.extents[index] = _Extent(min(EXTENT, end - start), drops=stream.file.drops)
            channel.send(p.Read(opened.remote, extent.size, start, True), deadline)
            self._in_flight.append(extent)

    def _read_extents(
        self, stream: _Stream, offset: int, size: int, deadline: Deadline
    ) -> tuple[int, memoryview] | None:
        """Return the grant and the bytes once they have arrived: a view of one extent, or a copy from
        several.
        """
        parts, grants, at = [], [], offset
        while at < offset + size:
            extent = stream.extents[at // EXTENT]
            if extent.data is None and not extent.failed:
                stream.window = min(2 * stream.window, _LAST_WINDOW)
                self._receive(extent, deadline)
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
            self._connected(opened.verifier, deadline).send(request, deadline)
            self._in_flight.append(extent)
            self._receive(extent, deadline)
            if extent.failed or extent.data is None or len(extent.data) != extent.size:
                return None
            block = Block(memoryview(bytes(extent.data)), extent.granted, version)
            self._recycle(extent)
            self._blocks.keep(file, index, block)
        start = offset % BLOCK
        return block.granted, block.data[start : start + size]

    def _receive(self, wanted: _Extent, deadline: Deadline) -> None:
        """Receive replies, in order, until the wanted one has arrived."""
        assert self._channel
        while wanted.data is None and not wanted.failed:
            extent = self._in_flight.popleft()
            head = self._await_reply(self._channel, deadline)
            if head.payload_size > EXTENT:
                raise ProtocolError(f"the server sent {head.payload_size} bytes where {extent.size} belong")
            data = self._buffer()[: head.payload_size]
            self._channel.receive_into(data, deadline)
            self._meter.ahead += len(data)
            if isinstance(head.message, p.Data):
                extent.data, extent.granted = data, head.message.granted
            else:
                extent.failed = True

    def _await_reply(self, channel: Channel, deadline: Deadline) -> Head:
        """Return the next reply; meanwhile others are served, and an interruption ends the connection."""
        with woken_by(channel.shut_down) as operation:
            operation.about_to_wait(channel.sock.fileno(), seconds_left(deadline))
            return channel.receive(deadline)

    def _buffer(self) -> memoryview:
        """Return a buffer of which no reply is on its way to a program any more."""
        for number in range(len(self._spare)):
            if sys.getrefcount(self._spare[number]) <= _UNSHARED:
                return memoryview(self._spare.pop(number))
        return memoryview(bytearray(EXTENT))

    def _recycle(self, extent: _Extent) -> None:
        buffer = extent.data.obj if extent.data is not None else None
        if isinstance(buffer, bytearray) and len(self._spare) < _SPARE:
            self._spare.append(buffer)
            extent.data = None

    def _connected(self, verifier: int, deadline: Deadline) -> Channel:
        if self._channel is None:
            self._channel = self._dial(deadline)
            welcome = self._channel.call(
                p.SessionHello(self._client, self._slot_id, False), p.SessionWelcome, deadline
            )
            self._verifier = welcome.verifier
        if self._verifier != verifier:
            raise ProtocolError("the server has forgotten the file")
        return self._channel

    def drop(self, file: CachedInode) -> None:
        """Invalidate all extents of this file."""
        for stream in list(self._streams.values()):
            if stream.file is file:
                stream.stale = True

    def forget(self, handle: Handle) -> None:
        """Drop the stream of a handle that was closed."""
        if handle in self._streams:
            with self._lock:
                self._drop(self._streams.pop(handle))

    def _drop(self, stream: _Stream) -> None:
        stream.window = 0
        stream.extents.clear()  # replies under way are received and dropped

    def _disconnect(self) -> None:
        if self._channel:
            self._channel.close()
            self._channel = None
        self._in_flight.clear()
        for stream in self._streams.values():
            self._drop(stream)

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            self._disconnect()

# SPDX-License-Identifier: Apache-2.0
"""Edge: send and receive messages over one connected stream socket (TCP, TLS or Unix), each with a deadline.

A channel is one conversation: strictly one thread sends or receives at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LimitExceeded,
    ProtocolError,
    Refused,
    RemoteError,
)
from millpond.base.text import printable
from millpond.linux.memory import SharedSlice
from millpond.wire.framing import Head, Limits, Receiver, encode
from millpond.wire.messages import Failure, Kind, Message
from millpond.wire.texts import cleaned

R = TypeVar("R", bound=Message)
Buffer = bytes | bytearray | memoryview
_POLL_SECONDS = 0.2
_CHUNK = 1 << 18  # a chunk that is copied, searched and sent stays in the processor's cache
_SSL_ERROR_WANT_READ = 2  # ssl.SSL_ERROR_WANT_READ
_SMALL = 1 << 14
_EARLY = 1 << 12
_UNREAD = memoryview(bytes(_CHUNK))  # stands for a chunk that is sent unread, for an outlet that only counts


class Outlet(Protocol):
    """Sees every byte that a channel sends, before any encryption; raises to stop it. An outlet that
    ``searches`` is given copies: the bytes that it searched must be those that are sent, even if others can
    write to the original.
    """

    @property
    def searches(self) -> bool:
        """Whether the outlet reads the bytes, rather than only counting them."""

    def passing(self, kind: Kind, data: Buffer, payload: bool) -> None:
        """Inspect ``data`` of ``kind`` that is about to leave: part of a head, or of a payload."""

    def examine(self, data: Buffer) -> None:
        """Search ``data``, which is going to leave in another form; nothing is counted as sent."""


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Part of a file with the open ``descriptor``. The connection is cut if the file ends within it."""

    descriptor: int
    start: int
    size: int

    @property
    def data(self) -> bytes:
        """The bytes of the part. Raises ConnectionLost if the file has become shorter."""
        found = os.pread(self.descriptor, self.size, self.start)
        if len(found) != self.size:
            raise ConnectionLost("a file has ended while it was sent")
        return found


class _Use:
    """The use of a socket by the one thread that sends and receives, while another thread may close it. The
    descriptor stays until the call has ended: another socket could get its number before the call looks at
    it, and the thread would wait for that one.
    """

    __slots__ = ("_closing", "_sock", "_under_way")

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._under_way, self._closing = sock, False, False

    def begin(self) -> None:
        """Begin a call. If the socket is closed the call fails."""
        self._under_way = True

    def end(self) -> None:
        """End a call."""
        self._under_way = False
        if self._closing:
            self._sock.close()

    def close(self) -> None:
        """Close the socket, now or at the end of the call that is under way, which was woken."""
        self._closing = True
        if not self._under_way:
            self._sock.close()


class _Sending:
    """Converts errors of system calls to millpond's. (A generator would cost more than the calls.)"""

    __slots__ = ("_peer", "_use")

    def __init__(self, peer: str, use: _Use) -> None:
        self._peer, self._use = peer, use

    def __enter__(self) -> None:
        self._use.begin()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._use.end()
        if (
            isinstance(error, TimeoutError) and error.errno is None
        ):  # with an errno, the kernel gave the peer up
            raise DeadlineExceeded(f"{self._peer} took no data in time") from None
        if isinstance(error, OSError):
            raise ConnectionLost(f"{self._peer}: {error.strerror or error}") from error


class _Receiving(_Sending):
    __slots__ = ()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._use.end()
        if error is None:
            return
        if isinstance(error, TimeoutError) and error.errno is None:
            raise DeadlineExceeded(f"{self._peer} did not answer in time") from None
        if isinstance(error, EOFError):
            raise ConnectionLost(f"{self._peer} closed the connection") from None
        if isinstance(error, OSError):
            raise self._translated(error) from error

    def _translated(self, error: OSError) -> RemoteError:
        return ConnectionLost(f"{self._peer}: {error.strerror or error}")


class _ReceivingTls(_Receiving):
    __slots__ = ()

    def _translated(self, error: OSError) -> RemoteError:
        # Imported here: a process without TLS connections should not load ssl.
        from millpond.wire import tls

        return tls.translate_error(self._peer, error) or super()._translated(error)


class Channel:
    """Sends and receives messages. ``peer`` names the other end in errors. An ``eager`` channel reads ahead
    all that has come, to be woken less often: then nobody else may read from its socket. The messages that a
    ``clean`` one receives have no control characters in their texts.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        limits: Limits | None = None,
        outlet: Outlet | None = None,
        clean: bool = False,
    ) -> None:
        self.sock, self.peer, self._clean = sock, peer, clean
        self._receiver = Receiver(limits or Limits(), peer)
        self.outlet = outlet
        self._payload_left = 0
        self._early = memoryview(b"")
        self.eager = False
        self._closing = threading.Lock()
        self._plain = not hasattr(sock, "unwrap")
        self._use = _Use(sock)
        self._sending = _Sending(peer, self._use)
        self._receiving = (_Receiving if self._plain else _ReceivingTls)(peer, self._use)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            enable_keepalive(sock)

    def send(
        self,
        message: Message,
        deadline: Deadline,
        payload: Buffer | SharedSlice | FileSlice = b"",
        *,
        before: Sequence[Message] = (),
    ) -> None:
        """Send a message and the raw ``payload`` behind it; ``before`` it, messages of the same kind without
        payload. Raises ConnectionLost, DeadlineExceeded.
        """
        size = payload.size if isinstance(payload, (SharedSlice, FileSlice)) else memoryview(payload).nbytes
        heads = b"".join([*map(encode, before), encode(message, size)])
        kind, payload_kind = type(message).KIND, type(message).PAYLOAD_KIND
        if isinstance(payload, (SharedSlice, FileSlice)):
            self._send_bytes(kind, heads, deadline, payload=False)
            self._send_slice(payload_kind, payload, deadline)
        elif size <= _SMALL:
            self._send_small(kind, heads, payload_kind, memoryview(payload).cast("B"), deadline)
        else:
            self._send_bytes(kind, heads, deadline, payload=False)
            self._send_chunks(payload_kind, memoryview(payload).cast("B"), deadline)

    def send_encoded(self, message: type[Message], frame: bytes, deadline: Deadline) -> None:
        """Send a frame of a message without payload, which ``encode`` has made. Raises as ``send`` does."""
        self._send_bytes(message.KIND, frame, deadline, payload=False)

    def examined(self, data: memoryview) -> bytearray | memoryview:
        """Return data that is going to leave in another form: a copy that the outlet has searched if it
        searches, else ``data`` itself.
        """
        if not (self.outlet and self.outlet.searches):
            return data
        copy = bytearray(data)
        self.outlet.examine(copy)
        return copy

    def _send_small(
        self, kind: Kind, heads: bytes, payload_kind: Kind, body: memoryview, deadline: Deadline
    ) -> None:
        """Send head and payload in one call: a packet costs more than a copy."""
        data = bytes(body)
        if self.outlet:
            parts = ((kind, heads, False), (payload_kind, data, True))
            for part in parts if data else parts[:1]:
                self.outlet.passing(*part)
        with self._sending:
            self.sock.settimeout(deadline.remaining())
            self.sock.sendall(heads + data)

    def _send_chunks(self, kind: Kind, body: memoryview, deadline: Deadline) -> None:
        for start in range(0, len(body), _CHUNK):
            self._send_bytes(kind, body[start : start + _CHUNK], deadline, payload=True)

    def _send_slice(self, kind: Kind, piece: SharedSlice | FileSlice, deadline: Deadline) -> None:
        if not self._sends_pages:
            self._send_copies(kind, piece, deadline)
            return
        shared = piece.data if isinstance(piece, SharedSlice) else None
        for start in range(0, piece.size, _CHUNK):
            size = min(_CHUNK, piece.size - start)
            part = _UNREAD[:size] if shared is None else shared[start : start + size]
            self._send_pages(kind, part, piece.descriptor, piece.start + start, deadline)

    def _send_copies(self, kind: Kind, piece: SharedSlice | FileSlice, deadline: Deadline) -> None:
        """Send copies of parts, of a file each when its turn comes: it may be larger than the memory."""
        if isinstance(piece, SharedSlice):
            self._send_chunks(kind, memoryview(piece.data), deadline)
            return
        for start in range(0, piece.size, _CHUNK):
            part = FileSlice(piece.descriptor, piece.start + start, min(_CHUNK, piece.size - start))
            self._send_bytes(kind, part.data, deadline, payload=True)

    @property
    def _sends_pages(self) -> bool:
        return self._plain and not (self.outlet and self.outlet.searches)

    def _send_bytes(self, kind: Kind, data: Buffer, deadline: Deadline, *, payload: bool) -> None:
        if self.outlet:
            data = bytes(data) if self.outlet.searches else data
            self.outlet.passing(kind, data, payload)
        with self._sending:
            self.sock.settimeout(deadline.remaining())
            self.sock.sendall(data)

    def _send_pages(
        self, kind: Kind, data: memoryview, descriptor: int, start: int, deadline: Deadline
    ) -> None:
        """Have the kernel send ``data``, which lies in ``descriptor`` at ``start``, without a copy."""
        if self.outlet:
            self.outlet.passing(kind, data, payload=True)
        end = start + len(data)
        with self._sending:
            self.sock.settimeout(0.0)
            while start < end:
                try:
                    start += self._send_file(descriptor, start, end - start)
                except BlockingIOError:
                    self._wait_for(select.POLLOUT, deadline)

    def _send_file(self, descriptor: int, start: int, size: int) -> int:
        with self._closing:  # else the socket's number could be another file's by the time of the call
            sent = os.sendfile(self._number(), descriptor, start, size)
        if not sent:
            raise OSError(errno.ENODATA, "the memory has ended")
        return sent

    def _wait_for(self, event: int, deadline: Deadline) -> None:
        """Wait for the event, but not for long: SO_RCVLOWAT does not report the last few bytes everywhere."""
        left = _POLL_SECONDS if deadline.at is None else min(_POLL_SECONDS, deadline.at - time.monotonic())
        if left <= 0:
            raise TimeoutError
        poll = select.poll()
        poll.register(self._number(), event)
        poll.poll(1000 * left)

    def _number(self) -> int:
        number = self.sock.fileno()
        if number < 0:
            raise OSError(errno.EBADF, "it was closed here")
        return number

    def receive(self, deadline: Deadline) -> Head:
        """Return the next message, of any class. Raises ConnectionLost, DeadlineExceeded, ProtocolError."""
        if self._payload_left:
            raise RuntimeError("the payload of the last message was not received")
        while True:
            count = self._receive_some(self._receiver.buffer(), deadline)
            if head := self._receiver.received(count):
                self._payload_left = head.payload_size
                return Head(cleaned(head.message), head.payload_size) if self._clean else head

    def receive_into(self, buffer: Buffer, deadline: Deadline) -> None:
        """Receive the whole payload of the last message into ``buffer``, which must be of its size."""
        view = memoryview(buffer).cast("B")
        if len(view) != self._payload_left:
            raise ProtocolError(f"{self.peer} sent {self._payload_left} bytes where {len(view)} belong")
        self.receive_next(view, deadline)

    def receive_next(self, view: memoryview, deadline: Deadline) -> None:
        """Receive the next bytes of the last message's payload, which has as many, into ``view`` (bytes)."""
        left = self._payload_left - len(view)
        if left < 0:
            raise ValueError(f"{len(view)} bytes are wanted of {self._payload_left}")
        if self._early and view:  # an empty view may be of bytes, which take no slice
            view = view[self._take_early(view) :]
        if len(view) > _CHUNK and self._plain:
            view = self._receive_chunks(view, deadline)
        while view:
            view = view[self._receive_some(view, deadline) :]
        self._payload_left = left

    def _receive_chunks(self, view: memoryview, deadline: Deadline) -> memoryview:
        """Fill ``view`` except for its last bytes, which are returned as a view. A wake-up for every packet
        would cost as much as the copy of its bytes.
        """
        with self._receiving, self._woken_by_chunks():
            self.sock.settimeout(0.0)
            while len(view) > _CHUNK:
                try:
                    view = view[_or_eof(self.sock.recv_into(view)) :]
                except BlockingIOError:
                    self._wait_for(select.POLLIN, deadline)
        return view

    @contextlib.contextmanager
    def _woken_by_chunks(self) -> Iterator[None]:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _CHUNK)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it was closed, which the waiting thread learns by itself
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def receive_payload(self, limit: int, deadline: Deadline) -> bytearray:
        """Receive the payload of the last message into a new buffer. Raises LimitExceeded before it
        allocates.
        """
        if self._payload_left > limit:
            raise LimitExceeded(
                f"{self.peer} sent {self._payload_left} bytes; at most {limit} are accepted here"
            )
        data = bytearray(self._payload_left)
        self.receive_into(data, deadline)
        return data

    @property
    def payload_left(self) -> int:
        """The bytes of the last message's payload that were not received yet."""
        return self._payload_left

    def receive_parts(self, deadline: Deadline) -> Iterator[memoryview]:
        """Yield the payload of the last message in parts, each valid until the next is asked for."""
        buffer = memoryview(bytearray(min(_CHUNK, self._payload_left)))
        while self._payload_left:
            count = self._receive_some(buffer[: self._payload_left], deadline)
            self._payload_left -= count
            yield buffer[:count]

    def expect(self, reply: type[R], deadline: Deadline, payload: int | None = 0) -> R:
        """Return the next message, a ``reply`` with ``payload`` bytes (None: any number). Raises Refused."""
        return self.checked(self.receive(deadline), reply, payload)

    def checked(self, head: Head, reply: type[R], payload: int | None = 0) -> R:
        """Return a received message if it is a ``reply`` with ``payload`` bytes (None: any number). Raises
        Refused for a Failure, ProtocolError for another message.
        """
        if isinstance(head.message, Failure):
            if head.payload_size:  # the bytes would be taken for the next message
                raise ProtocolError(f"{self.peer} sent {head.payload_size} bytes behind 'failure'")
            raise Refused(self.peer, printable(head.message.code), printable(head.message.text))
        if not isinstance(head.message, reply):
            raise ProtocolError(f"{self.peer} sent '{head.message.NAME}' where '{reply.NAME}' belongs")
        if payload is not None and head.payload_size != payload:
            raise ProtocolError(
                f"{self.peer} sent {head.payload_size} bytes behind '{reply.NAME}', not {payload}"
            )
        return head.message

    def call(
        self, request: Message, reply: type[R], deadline: Deadline, payload: Buffer | FileSlice = b""
    ) -> R:
        """Send ``request`` and return the ``reply``, which has no payload."""
        self.send(request, deadline, payload)
        return self.expect(reply, deadline)

    def _receive_some(self, buffer: memoryview, deadline: Deadline) -> int:
        if self._early:
            return self._take_early(buffer)
        with self._receiving:
            self.sock.settimeout(deadline.remaining())
            if not self.eager or len(buffer) >= _EARLY:
                return _or_eof(self.sock.recv_into(buffer))
            early = bytearray(_EARLY)
            self._early = memoryview(early)[: _or_eof(self.sock.recv_into(early))]
        return self._take_early(buffer)

    def _take_early(self, buffer: memoryview) -> int:
        """Take bytes that were read ahead; returns their number."""
        count = min(len(buffer), len(self._early))
        buffer[:count] = self._early[:count]
        self._early = self._early[count:]
        return count

    @property
    def is_quiet(self) -> bool:
        """Whether no unread bytes have come from the other end, and it is still there."""
        if self._early:
            return False
        try:
            self.sock.settimeout(0)
            self.sock.recv(1)
        except BlockingIOError:
            return True
        except OSError as error:
            return not self._plain and error.errno == _SSL_ERROR_WANT_READ
        return False

    @property
    def closed_cleanly(self) -> bool:
        """Whether the last received message is whole: a close of the connection here loses nothing."""
        return self._receiver.idle and not self._payload_left and not self._early

    @property
    def peer_has_closed(self) -> bool:
        """Whether the other end has closed the connection, or its process is gone."""
        state = select.poll()
        with contextlib.suppress(OSError):
            state.register(self._number(), select.POLLRDHUP)
            return any(event & select.POLLRDHUP for _, event in state.poll(0))
        return False

    def shut_down(self) -> None:
        """End the connection from any thread: a thread that waits in it gets ConnectionLost."""
        with contextlib.suppress(OSError):  # the peer was faster
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, waking a thread that waits in it."""
        self.shut_down()
        with self._closing:
            self._use.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _or_eof(count: int) -> int:
    if count == 0:
        raise EOFError
    return count


def enable_keepalive(sock: socket.socket) -> None:
    """Detect a peer whose machine or link is gone (TCP keepalive): probe after 10 s, give up after 30."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
    options[socket.TCP_USER_TIMEOUT] = 30_000
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)

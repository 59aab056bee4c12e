# SPDX-License-Identifier: Apache-2.0
"""Edge: performs requests over one session slot, which outlives its connections.

Client and server count the requests that were performed (NFSv4.1's slot sequence). When a connection is lost
after a request was sent, the count that the server names on the next connection tells whether the request was
performed; if so, the server sends its reply again from its reply cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import ConfigError, DeadlineExceeded, MillpondError, RemoteError
from millpond.fs.client.keep_alive import KeepAlive
from millpond.fs.client.metrics import OperationMeter
from millpond.fs.proto.file_ops import (
    Again,
    Done,
    Error,
    Goodbye,
    Pending,
    SessionHello,
    SessionWelcome,
    known_errno,
)
from millpond.fs.proto.validate import require_possible
from millpond.fs.vfs.inode_api import WouldBlock
from millpond.fs.vfs.operation import about_to_wait, current, woken_by
from millpond.fs.vfs.path_api import MAX_TRANSFER, Owner, os_error
from millpond.wire.channel import Buffer, Channel
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
Dial = Callable[[Deadline], Channel]
IN_DOUBT = (errno.EIO, errno.ETIMEDOUT, errno.EINTR)
"""Errors after which the server may have done it, or was not reachable."""
_TRIES = 3
_UNSHARED = sys.getrefcount(bytearray()) + 1  # references to a buffer of which there is no view
_REFUSED = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE)  # of which the log says where they come from
_REDIAL_SECONDS = 0.1
_FRESH_SECONDS = 0.5  # a connection that was just used is not probed: the request shows a loss


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A request that was sent when its connection was lost: the session verifier then (0: no request), and
    the server's count before, and once it is performed.
    """

    verifier: int
    before: int
    performed: int


class AbsentName(FileNotFoundError):
    """ENOENT of a lookup, cacheable under the grant ``granted``; 0 for none."""

    def __init__(self, granted: int) -> None:
        super().__init__(errno.ENOENT, os.strerror(errno.ENOENT))
        self.granted = granted


class SlotLost(Exception):
    """The connection ended. ``in_doubt``: after the whole request was sent, so that it may have been
    performed.
    """

    def __init__(self, in_doubt: bool) -> None:
        super().__init__("the connection was lost")
        self.in_doubt = in_doubt


@contextlib.contextmanager
def until(deadline: Deadline, lock: threading.Lock) -> Iterator[None]:
    """Hold the lock. Raises OSError: ETIMEDOUT if it is not free by the deadline."""
    if not lock.acquire(blocking=False):
        about_to_wait()
        if not lock.acquire(timeout=seconds_left(deadline)):
            raise os_error(errno.ETIMEDOUT)
    try:
        yield
    finally:
        lock.release()


def seconds_left(deadline: Deadline) -> float:
    """Return the seconds until the deadline. Raises OSError: ETIMEDOUT."""
    try:
        left = deadline.remaining()
    except DeadlineExceeded as error:
        raise os_error(errno.ETIMEDOUT) from error
    return threading.TIMEOUT_MAX if left is None else left


class _Wait:
    """A request under way. Its operation's interruption and a server that has stopped end it. (A generator
    would cost more.)
    """

    __slots__ = ("_began", "_channel", "_slot", "is_given_up", "is_sent", "operation")

    def __init__(self, slot: RpcSlot, channel: Channel, began: float) -> None:
        self._slot, self._channel, self._began = slot, channel, began
        self.operation, self.is_sent, self.is_given_up = current.get(), False, False

    def __enter__(self) -> Self:
        if self.operation:
            self.operation.add_wake(self._channel.shut_down)
        self._slot.keep_alive.begin(self, self._began)
        return self

    def give_up(self) -> None:
        """End the wait: the server has stopped. Any thread may call, also late: then the slot's next request
        loses its connection, and is sent over another.
        """
        self.is_given_up = True
        self._channel.shut_down()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._slot.keep_alive.end(self)
        if self.operation:
            self.operation.remove_wake(self._channel.shut_down)
        if error is not None:
            self._slot.wait_failed(self, error)


def is_in_doubt(error: OSError) -> bool:
    """Return whether the outcome of a request is not known: the server has not said that error."""
    cause = error.__cause__
    is_said = isinstance(cause, RemoteError) and not isinstance(cause, DeadlineExceeded)
    return error.errno in IN_DOUBT and not is_said


class RpcSlot:
    """A session slot: requests execute one at a time over what ``dial`` connects; dialled again when the
    connection is lost.

    One thread uses it at a time. ``client`` is the client's name, ``timeout`` the seconds that an operation
    may take while the server answers ``keep_alive``. Unless ``blocking``, a request that would wait for a
    recall raises WouldBlock. ``meter`` counts how long requests take. ``verifier`` is the session verifier:
    it changes when the server has lost this client's state. ``root`` is the volume's node on the server,
    ``lease`` the length of a lease in seconds, ``owner`` the owner of new files, ``storage`` the write
    verifier. Requests in ``posted`` go out with the next request and move to ``answered`` with its reply;
    their outcome is ignored, and one may be performed twice.
    """

    def __init__(
        self,
        dial: Dial,
        timeout: float,
        client: bytes,
        keep_alive: KeepAlive,
        *,
        blocking: bool = True,
        meter: OperationMeter | None = None,
    ) -> None:
        self._dial, self._timeout, self._meter = dial, timeout, meter or OperationMeter()
        self.keep_alive = keep_alive
        self._channel: Channel | None = None
        self._hello = SessionHello(client, os.urandom(16), blocking)
        self._performed = self._sent = 0
        self._buffer = bytearray(MAX_TRANSFER)
        self._used = 0.0
        self.posted: list[Message] = []
        self.answered: list[Message] = []
        self.verifier, self.root, self.lease, self.storage = 0, 0, 0.0, b""
        self.owner: Owner | None = None

    def ask(
        self,
        prepare: Callable[[Deadline], Message],
        reply: type[R],
        deadline: Deadline,
        *,
        idempotent: bool,
        payload: Buffer = b"",
        limit: int = 0,
    ) -> tuple[R, memoryview]:
        """Return the reply to the request that ``prepare`` makes once connected, and up to ``limit`` bytes
        behind it.

        The caller holds the slot. If the connection is lost, the request is made and sent once more if it was
        not performed, else its reply is asked for (one with bytes behind it: by sending the request again).
        Raises OSError: the server's; ETIMEDOUT; EINTR; EIO if a request that is not ``idempotent`` was in
        doubt when the server lost the session.
        """
        doubt, loss = _Doubt(0, 0, 0), SlotLost(in_doubt=False)
        for _ in range(_TRIES):
            try:
                self._connect(deadline)
                forgotten = doubt.verifier not in (0, self.verifier) or self._performed < doubt.before
                if forgotten and not idempotent:
                    break
                if not forgotten and doubt.performed == self._performed and doubt.verifier and not limit:
                    return self.exchange(Again(), reply, deadline, counted=False)
                doubt = _Doubt(0, 0, 0)  # it was not performed
                request = prepare(deadline)
            except SlotLost as lost:
                loss = lost
                continue
            try:
                return self.exchange(request, reply, deadline, payload=payload, limit=limit)
            except SlotLost as lost:
                loss = lost
                if lost.in_doubt:
                    performed = self._performed + self._sent
                    doubt = _Doubt(self.verifier, self._performed, performed + 1)
        raise os_error(errno.EIO) from loss

    def exchange(
        self,
        request: Message,
        reply: type[R],
        deadline: Deadline,
        *,
        payload: Buffer = b"",
        limit: int = 0,
        counted: bool = True,
    ) -> tuple[R, memoryview]:
        """Send one request and receive its reply, on the present connection only. Raises SlotLost, OSError
        and WouldBlock.
        """
        channel = self._channel
        if channel is None:
            raise SlotLost(in_doubt=False)
        began = time.monotonic()
        posted = self._mark_sent() if counted else []
        with self._waiting(channel, deadline) as wait:
            channel.send(request, deadline, payload, before=posted)
            wait.is_sent = True
            self._await_reply(channel, deadline)
            head = channel.receive(deadline)
            body = self._receive_payload(channel, head.payload_size, limit, deadline)
            require_possible(head.message)
        if not isinstance(head.message, (Error, Pending, reply)):
            self.disconnect()  # a refusal, or the server is out of step
            said = f"the device's server said '{head.message.NAME}' to '{request.NAME}'"
            raise os_error(errno.EIO) from (RemoteError(said) if counted else None)
        if counted:
            self._performed += 1
            self._confirm_posted(len(posted))
        self._used = self.keep_alive.heard = time.monotonic()
        self._meter.add(request.NAME, self._used - began)
        return self._success(request, head.message, reply), body

    def _waiting(self, channel: Channel, deadline: Deadline) -> _Wait:
        """Return a context in which one request is sent, and its reply received."""
        return _Wait(self, channel, self._began(deadline))

    def _began(self, deadline: Deadline) -> float:
        """Return when the operation with this deadline began."""
        return time.monotonic() if deadline.at is None else deadline.at - self._timeout

    def _await_reply(self, channel: Channel, deadline: Deadline) -> None:
        """Tell the kernel binding that this thread waits for the reply."""
        about_to_wait(channel.sock.fileno(), seconds_left(deadline))

    def wait_failed(self, wait: _Wait, error: BaseException) -> None:
        """Disconnect after a failed exchange. Raises SlotLost and OSError in place of the error."""
        self.disconnect()  # an interrupt leaves the rest of a reply in the stream
        if isinstance(error, ConfigError):  # a number that no message can hold
            raise os_error(errno.EINVAL) from None
        if not isinstance(error, (MillpondError, OSError)):
            return
        if wait.is_given_up:
            self.renew()
            raise os_error(errno.ETIMEDOUT) from DeadlineExceeded(
                "the device has answered nothing for a while, nor keep-alives"
            )
        if isinstance(error, DeadlineExceeded):
            self.renew()
            raise os_error(errno.ETIMEDOUT) from error
        if wait.operation and wait.operation.is_interrupted:
            self.renew()
            raise os_error(errno.EINTR) from error
        raise SlotLost(in_doubt=wait.is_sent) from error

    def renew(self) -> None:
        """Become another slot of the session: the server may perform the last request for long yet, and
        nobody wants its reply. What was posted goes out again.
        """
        self._hello = replace(self._hello, slot=os.urandom(16))
        self._performed = self._sent = 0

    def _success(self, request: Message, answer: Message, reply: type[R]) -> R:
        """Return the reply of a request that succeeded. Raises OSError and WouldBlock."""
        if isinstance(answer, Error):
            raise _refusal(request, answer)
        if isinstance(answer, reply):
            return answer
        if not self._hello.may_block:
            raise WouldBlock
        raise os_error(errno.EIO)  # a blocking slot never gets Pending from an honest server

    def _receive_payload(self, channel: Channel, size: int, limit: int, deadline: Deadline) -> memoryview:
        if not size <= min(limit, len(self._buffer)):
            return memoryview(channel.receive_payload(limit, deadline))
        if sys.getrefcount(self._buffer) > _UNSHARED:  # the last reply is still on its way to a program
            self._buffer = bytearray(MAX_TRANSFER)
        body = memoryview(self._buffer)[:size]
        channel.receive_into(body, deadline)
        return body

    def _mark_sent(self) -> list[Message]:
        self._sent = len(self.posted)
        return self.posted[:]

    def unsent(self) -> list[Message]:
        """Remove and return the posted requests that were not sent, to be posted elsewhere."""
        left = self.posted[self._sent :]
        del self.posted[self._sent :]
        return left

    def _confirm_posted(self, count: int) -> None:
        """Count the first ``count`` posted requests as performed."""
        self._performed += count
        self.answered += self.posted[:count]
        del self.posted[:count]
        self._sent = 0

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._channel is not None

    @property
    def has_ended(self) -> bool:
        """Whether the server has closed the connection."""
        return self._channel is not None and not self._channel.is_quiet

    def disconnect(self) -> None:
        """Close the connection. The server waits a while for the next one."""
        if self._channel:
            self._channel.close()
            self._channel = None

    def close(self, deadline: Deadline) -> None:
        """Close the connection and everything that the server has open for the client."""
        if self._channel:
            with contextlib.suppress(SlotLost, OSError):
                self.exchange(Goodbye(), Done, deadline, counted=False)
        self.disconnect()

    def _connect(self, deadline: Deadline) -> None:
        if self._channel and time.monotonic() > self._used + _FRESH_SECONDS and not self._channel.is_quiet:
            self.disconnect()
        if self._channel:
            return
        about_to_wait()
        self._channel = self._dialled(deadline)
        self._channel.eager = True
        self._handshake(deadline)

    def _dialled(self, deadline: Deadline) -> Channel:
        """Dial. A program's operation dials again for as long as it would wait for a silent server: it may
        be about to start again. Raises OSError.
        """
        while True:
            try:
                channel = self._dial(self.keep_alive.earlier(deadline))
            except (DeadlineExceeded, TimeoutError) as error:
                raise os_error(errno.ETIMEDOUT) from error
            except (MillpondError, OSError) as error:
                if self.keep_alive.is_away() or current.get() is None or deadline.passed:
                    raise os_error(errno.EIO) from error
            else:
                self.keep_alive.away_since = None
                return channel
            woken = threading.Event()
            with woken_by(woken.set):
                woken.wait(_REDIAL_SECONDS)

    def _handshake(self, deadline: Deadline) -> None:
        """Resume the slot, if the server still has the session."""
        sent = self._sent
        welcome, _ = self.exchange(self._hello, SessionWelcome, deadline, counted=False)
        if welcome.verifier != self.verifier:
            self.verifier, self.root = welcome.verifier, welcome.root
            self.posted.clear()
            self.answered.clear()
        else:  # performed requests must not be repeated: their numbers may mean other files by now
            self._confirm_posted(min(sent, max(0, welcome.performed - self._performed)))
        self._performed, self.lease, self.owner = welcome.performed, welcome.lease, welcome.owner
        self.storage = welcome.storage


def _refusal(request: Message, error: Error) -> OSError:
    code = known_errno(error.errno)
    if code in _REFUSED:
        refusal = os_error(code)
        refusal.__cause__ = RemoteError(f"the device's server said so to '{request.NAME}'")
        return refusal
    return AbsentName(error.granted) if code == errno.ENOENT else os_error(code)

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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import ConfigError, DeadlineExceeded, MillpondError, ProtocolError, RemoteError
from millpond.fs.client.keep_alive import KeepAlive
from millpond.fs.client.metrics import OperationMeter
from millpond.fs.client.reply_buffers import ReplyBuffers
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
from millpond.fs.vfs.path_api import MAX_TRANSFER, os_error
from millpond.wire.channel import Buffer, Channel
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
Dial = Callable[[Deadline], Channel]
IN_DOUBT = (errno.EIO, errno.ETIMEDOUT, errno.EINTR)
"""Errors after which the server may have done it, or was not reachable."""
_TRIES = 3
_REFUSED = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE)  # of which the log says where they come from
_REDIAL_SECONDS = 0.1
_FRESH_SECONDS = 0.5  # a connection that was just used is not probed: the request shows a loss


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


def seconds_left(deadline: Deadline) -> float:
    """Return the seconds until the deadline. Raises OSError: ETIMEDOUT."""
    try:
        left = deadline.remaining()
    except DeadlineExceeded as error:
        raise os_error(errno.ETIMEDOUT) from error
    return threading.TIMEOUT_MAX if left is None else left


def is_in_doubt(error: OSError) -> bool:
    """Return whether the outcome of a request is not known: the server has not said that error."""
    cause = error.__cause__
    is_said = isinstance(cause, RemoteError) and not isinstance(cause, DeadlineExceeded)
    return error.errno in IN_DOUBT and not is_said


class Exchange:
    """The use of a slot's connection for requests, replies, or both. An interruption of the operation, and a
    server that has stopped, end it. It turns errors into SlotLost and OSError. (A generator would cost more.)
    """

    __slots__ = ("_channel", "_slot", "is_given_up", "is_sent", "operation")

    def __init__(self, slot: RpcSlot, channel: Channel) -> None:
        self._slot, self._channel = slot, channel
        self.operation, self.is_sent, self.is_given_up = current.get(), False, False

    def __enter__(self) -> Self:
        began = self.operation.began if self.operation else 0.0
        if self.operation:
            self.operation.add_wake(self._channel.shut_down)
        self._slot.keep_alive.begin(self.give_up, began or time.monotonic())
        return self

    def send(
        self, request: Message, deadline: Deadline, payload: Buffer = b"", before: Sequence[Message] = ()
    ) -> None:
        """Send a request, ``before`` it some that are not answered."""
        self._channel.send(request, deadline, payload, before=before)
        self.is_sent = True

    def receive(self, deadline: Deadline, limit: int, buffers: ReplyBuffers) -> tuple[Message, memoryview]:
        """Return the next reply and up to ``limit`` bytes behind it. Other operations are performed while
        this thread waits.
        """
        about_to_wait(self._channel.sock.fileno(), seconds_left(deadline))
        head = self._channel.receive(deadline)
        if head.payload_size > min(limit, MAX_TRANSFER):
            raise ProtocolError(f"the server sent {head.payload_size} bytes where at most {limit} belong")
        body = buffers.take(head.payload_size) if head.payload_size else memoryview(b"")
        self._channel.receive_into(body, deadline)
        require_possible(head.message)
        self._slot.keep_alive.heard = time.monotonic()
        return head.message, body

    def give_up(self) -> None:
        """End the wait: the server has stopped. Any thread may call, also late: then the slot's next request
        loses its connection, and is sent over another.
        """
        self.is_given_up = True
        self._channel.shut_down()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._slot.keep_alive.end(self.give_up)
        if self.operation:
            self.operation.remove_wake(self._channel.shut_down)
        if error is not None:
            self._slot.disconnect()  # an interrupt leaves the rest of a reply in the stream
            self._translate(error)

    def _translate(self, error: BaseException) -> None:
        """Raise SlotLost or OSError in place of the error."""
        if isinstance(error, ConfigError):  # a number that no message can hold
            raise os_error(errno.EINVAL) from None
        if not isinstance(error, (MillpondError, OSError)):
            return
        is_interrupted = self.operation is not None and self.operation.is_interrupted
        if not (self.is_given_up or is_interrupted or isinstance(error, DeadlineExceeded)):
            raise SlotLost(in_doubt=self.is_sent) from error
        self._slot.renew()
        if self.is_given_up:
            silent = DeadlineExceeded("the device has answered nothing for a while, nor keep-alives")
            raise os_error(errno.ETIMEDOUT) from silent
        code = errno.ETIMEDOUT if isinstance(error, DeadlineExceeded) else errno.EINTR
        raise os_error(code) from error


class RpcSlot:
    """A session slot of the client with this name: requests execute one at a time over what ``dial``
    connects; dialled again when the connection is lost.

    One thread uses it at a time. ``keep_alive`` ends requests to a server that has stopped. Unless
    ``blocking``, a request that would wait for a recall raises WouldBlock. ``meter`` counts how long requests
    take. ``session`` is what the server said of the session when it was last connected; its verifier changes
    when the server has lost this client's state. Requests in ``posted`` go out with the next request and move
    to ``answered`` with its reply; their outcome is ignored, and one may be performed twice.
    """

    def __init__(
        self,
        dial: Dial,
        client: bytes,
        keep_alive: KeepAlive,
        *,
        blocking: bool = True,
        meter: OperationMeter | None = None,
    ) -> None:
        self._dial, self._meter, self.keep_alive = dial, meter or OperationMeter(), keep_alive
        self._channel: Channel | None = None
        self._hello = SessionHello(client, os.urandom(16), blocking)
        self._performed = self._sent = 0
        self._buffers = ReplyBuffers(spare=0)
        self._used = 0.0
        self.posted: list[Message] = []
        self.answered: list[Message] = []
        self.session = SessionWelcome(0, 0, 0, 0.0)

    @property
    def verifier(self) -> int:
        """The session verifier."""
        return self.session.verifier

    def ask(
        self,
        prepare: Callable[[], Message],
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
        loss, verifier, before, performed = SlotLost(in_doubt=False), 0, 0, 0
        for _ in range(_TRIES):
            try:
                self.connect(deadline)
                if verifier:  # in which a request was sent that is in doubt
                    is_forgotten = verifier != self.verifier or self._performed < before
                    if is_forgotten and not idempotent:
                        break
                    if not is_forgotten and self._performed == performed and not limit:
                        return self.exchange(Again(), reply, deadline, counted=False)
                    verifier = 0  # it was not performed
                request = prepare()
            except SlotLost as lost:
                loss = lost
                continue
            try:
                return self.exchange(request, reply, deadline, payload=payload, limit=limit)
            except SlotLost as lost:
                loss = lost
                if lost.in_doubt:
                    verifier, before = self.verifier, self._performed
                    performed = before + self._sent + 1
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
        began = time.monotonic()
        posted = self.posted[:] if counted else []
        with self.using() as connection:
            self._sent = len(posted) if counted else self._sent
            connection.send(request, deadline, payload, posted)
            answer, body = connection.receive(deadline, limit, self._buffers)
        if not isinstance(answer, (Error, Pending, reply)):
            self.disconnect()  # a refusal, or the server is out of step
            said = f"the device's server said '{answer.NAME}' to '{request.NAME}'"
            raise os_error(errno.EIO) from (RemoteError(said) if counted else None)
        if counted:
            self._performed += 1
            self._confirm_posted(len(posted))
        self._used = self.keep_alive.heard
        self._meter.add(request.NAME, self._used - began)
        return self._success(request, answer, reply), body

    def using(self) -> Exchange:
        """Use the present connection. Raises SlotLost if there is none."""
        if self._channel is None:
            raise SlotLost(in_doubt=False)
        return Exchange(self, self._channel)

    def renew(self) -> None:
        """Become another slot of the session: the server may perform the last request for long yet, and
        nobody wants its reply. What was posted goes out again.
        """
        self._hello = replace(self._hello, slot=os.urandom(16), instead=self._hello.slot)
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
        with contextlib.suppress(SlotLost, OSError):
            self.exchange(Goodbye(), Done, deadline, counted=False)
        self.disconnect()

    def connect(self, deadline: Deadline) -> None:
        """Connect, and resume the slot if the server still has the session, unless that has been done. Raises
        SlotLost and OSError.
        """
        if time.monotonic() > self._used + _FRESH_SECONDS and self.has_ended:
            self.disconnect()
        if self._channel:
            return
        about_to_wait()
        self._channel = self._dialled(deadline)
        self._channel.eager = True
        sent = self._sent
        welcome, _ = self.exchange(self._hello, SessionWelcome, deadline, counted=False)
        if welcome.verifier != self.verifier:
            self.posted.clear()
            self.answered.clear()
        else:  # performed requests must not be repeated: their numbers may mean other files by now
            self._confirm_posted(min(sent, max(0, welcome.performed - self._performed)))
        self._performed, self.session = welcome.performed, welcome

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


def _refusal(request: Message, error: Error) -> OSError:
    code = known_errno(error.errno)
    if code in _REFUSED:
        refusal = os_error(code)
        refusal.__cause__ = RemoteError(f"the device's server said so to '{request.NAME}'")
        return refusal
    return AbsentName(error.granted) if code == errno.ENOENT else os_error(code)

# SPDX-License-Identifier: Apache-2.0
"""Edge: one session slot of a client, and the connection that it has now.

Client and server count the requests that were performed (NFSv4.1's slot sequence). When a connection is lost
after a request was sent, the count that the server names on the next connection tells whether the request was
performed; if so, the server sends its reply again from its reply cache.
"""

from __future__ import annotations

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
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.validate import require_possible
from millpond.fs.vfs.operation import Operation, about_to_wait, current, pause
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


class SessionConnection:
    """A session slot of the client with this name, over what ``dial`` connects; dialled again when the
    connection is lost.

    One thread uses it at a time: with ``ask``, which has one request performed exactly once, or as a context
    in which requests are sent and replies received, in order. ``keep_alive`` ends the waits for a server that
    has stopped. ``spare``: its requests wait for nobody. ``meter`` counts how long requests take. ``session``
    is what the server said of the session when it was last connected; its verifier changes when the server
    has lost this client's state. Requests in ``posted`` go out with the next request and move to ``answered``
    with its reply; their outcome is ignored, and one may be performed twice.
    """

    def __init__(
        self, dial: Dial, client: bytes, keep_alive: KeepAlive, meter: OperationMeter, *, spare: bool
    ) -> None:
        self._dial, self._keep_alive, self._meter = dial, keep_alive, meter
        self._channel: Channel | None = None
        self._hello = p.SessionHello(client, os.urandom(16), spare)
        self._performed = self._sent = 0
        self._buffers = ReplyBuffers(spare=0)
        self._used = self._given_up = self.since = 0.0
        self._operation: Operation | None = None
        self._is_sent = self._is_welcome = False
        self.posted: list[Message] = []
        self.answered: list[Message] = []
        self.session = p.SessionWelcome(0, 0, 0, 0.0)

    @property
    def verifier(self) -> int:
        """The session verifier."""
        return self.session.verifier

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._channel is not None

    @property
    def has_ended(self) -> bool:
        """Whether the server has closed the connection."""
        return self._channel is not None and not self._channel.is_quiet

    @property
    def _present(self) -> Channel:
        if self._channel is None:
            raise SlotLost(in_doubt=False)
        return self._channel

    def __enter__(self) -> Self:
        """Use the present connection. An interruption of the operation, and a server that has stopped, end
        the context. It turns errors into SlotLost and OSError. (A generator would cost more.)
        """
        channel, self._operation = self._present, current.get()
        self._is_sent, self._given_up, began = False, 0.0, 0.0
        if self._operation:
            self._operation.add_wake(channel.shut_down)
            began = self._operation.began
        self.since = began or time.monotonic()
        return self

    def send(
        self, request: Message, deadline: Deadline, payload: Buffer = b"", before: Sequence[Message] = ()
    ) -> None:
        """Send a request, ``before`` it some that are not answered."""
        self._present.send(request, deadline, payload, before=before)
        self._is_sent = True

    def receive(self, deadline: Deadline, limit: int, buffers: ReplyBuffers) -> tuple[Message, memoryview]:
        """Return the next reply and up to ``limit`` bytes behind it. Other operations are performed while
        this thread waits.
        """
        channel = self._present
        about_to_wait(channel.sock.fileno(), seconds_left(deadline))
        head = channel.receive(deadline)
        if head.payload_size > min(limit, MAX_TRANSFER):
            raise ProtocolError(f"the server sent {head.payload_size} bytes where at most {limit} belong")
        body = buffers.take(head.payload_size) if head.payload_size else memoryview(b"")
        channel.receive_into(body, deadline)
        require_possible(head.message)
        self._keep_alive.heard = time.monotonic()
        return head.message, body

    def give_up(self, since: float) -> None:
        """End the wait of the operation that began then: the server has stopped. Any thread may call, also
        late: then the next request loses its connection, and is sent over another.
        """
        self._given_up = since
        if channel := self._channel:
            channel.shut_down()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        is_given_up, self.since = self._given_up == self.since, 0.0
        if self._operation:
            self._operation.remove_wake(self._present.shut_down)
        if error is not None:
            self.disconnect()  # an interrupt leaves the rest of a reply in the stream
            self._translate(error, is_given_up)

    def _translate(self, error: BaseException, is_given_up: bool) -> None:
        """Raise SlotLost or OSError in place of the error."""
        if isinstance(error, ConfigError):  # a number that no message can hold
            raise os_error(errno.EINVAL) from None
        if not isinstance(error, (MillpondError, OSError)):
            return
        is_interrupted = self._operation is not None and self._operation.is_interrupted
        if not (is_given_up or is_interrupted or isinstance(error, DeadlineExceeded)):
            raise SlotLost(in_doubt=self._is_sent) from error
        self._leave_slot()
        if is_given_up:
            silent = DeadlineExceeded("the device has answered nothing for a while, nor keep-alives")
            raise os_error(errno.ETIMEDOUT) from silent
        code = errno.ETIMEDOUT if isinstance(error, DeadlineExceeded) else errno.EINTR
        raise os_error(code) from error

    def _leave_slot(self) -> None:
        """Become another slot: the last request may still be executing. What was posted goes out again. A
        slot without a welcome has had no request, and the server may not know yet ``instead`` of which it is.
        """
        if self._is_welcome:
            self._hello = replace(self._hello, slot=os.urandom(16), instead=self._hello.slot)
        self._performed = self._sent = 0
        self._is_welcome = False

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

        If the connection is lost, the request is made and sent once more if it was not performed, else its
        reply is asked for (one with bytes behind it: by sending the request again). Raises OSError: the
        server's; ETIMEDOUT; EINTR; EIO if a request that is not ``idempotent`` was in doubt when the server
        lost the session.
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
                        return self.exchange(p.Again(), reply, deadline, counted=False)
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
        """Send one request and receive its reply, on the present connection only. Raises SlotLost and
        OSError.
        """
        began, posted = time.monotonic(), self.posted[:] if counted else []
        with self:
            self._sent = len(posted) if counted else self._sent
            self.send(request, deadline, payload, posted)
            answer, body = self.receive(deadline, limit, self._buffers)
        if not isinstance(answer, (p.Error, reply)):
            self.disconnect()  # a refusal, or the server is out of step
            said = f"the device's server said '{answer.NAME}' to '{request.NAME}'"
            raise os_error(errno.EIO) from (RemoteError(said) if counted else None)
        if counted:
            self._performed += 1
            self._confirm_posted(len(posted))
        self._used = self._keep_alive.heard
        self._meter.add(request.NAME, self._used - began)
        if isinstance(answer, p.Error):
            raise _refusal(request, answer)
        return answer, body

    def _confirm_posted(self, count: int) -> None:
        """Count the first ``count`` posted requests as performed."""
        self._performed += count
        self.answered += self.posted[:count]
        del self.posted[:count]
        self._sent = 0

    def unsent(self) -> list[Message]:
        """Remove and return the posted requests that were not sent, to be posted elsewhere."""
        left = self.posted[self._sent :]
        del self.posted[self._sent :]
        return left

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
        if self._keep_alive.closed.is_set():
            self.disconnect()
            raise os_error(errno.ETIMEDOUT) from DeadlineExceeded("the client is closed")
        sent = self._sent
        welcome, _ = self.exchange(self._hello, p.SessionWelcome, deadline, counted=False)
        if welcome.verifier != self.verifier:
            self.posted.clear()
            self.answered.clear()
        else:  # performed requests must not be repeated: their numbers may mean other files by now
            self._confirm_posted(min(sent, max(0, welcome.performed - self._performed)))
        self._performed, self.session, self._is_welcome = welcome.performed, welcome, True

    def _dialled(self, deadline: Deadline) -> Channel:
        """Dial. A program's operation dials again for as long as it would wait for a silent server: it may
        be about to start again. Raises OSError.
        """
        self._keep_alive.start()
        while True:
            try:
                channel = self._dial(self._keep_alive.earlier(deadline))
            except (DeadlineExceeded, TimeoutError) as error:
                raise os_error(errno.ETIMEDOUT) from error
            except (MillpondError, OSError) as error:
                if self._keep_alive.is_away() or current.get() is None or deadline.passed:
                    raise os_error(errno.EIO) from error
            else:
                self._keep_alive.away_since = None
                return channel
            pause(_REDIAL_SECONDS)

    def disconnect(self) -> None:
        """Close the connection. The server waits a while for the next one."""
        channel, self._channel = self._channel, None
        if channel:
            channel.close()

    def close(self) -> None:
        """End the connection, from any thread: one that uses it loses it."""
        if channel := self._channel:
            channel.close()


def _refusal(request: Message, error: p.Error) -> OSError:
    code = p.known_errno(error.errno)
    if code in _REFUSED:
        refusal = os_error(code)
        refusal.__cause__ = RemoteError(f"the device's server said so to '{request.NAME}'")
        return refusal
    return AbsentName(error.granted) if code == errno.ENOENT else os_error(code)

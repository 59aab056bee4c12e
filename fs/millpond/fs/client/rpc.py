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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, MillpondError
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
from millpond.fs.vfs.path_api import MAX_TRANSFER, os_error
from millpond.wire.channel import Buffer, Channel
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
Dial = Callable[[Deadline], Channel]
_TRIES = 3
_FRESH_SECONDS = 0.5  # a connection that was just used is not probed: the request shows a loss


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A request that was sent when its connection was lost: the session verifier then (0: no request), and
    the server's count once it is performed.
    """

    verifier: int
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


class RpcSlot:
    """A session slot: requests execute one at a time over what ``dial`` connects; dialled again when the
    connection is lost.

    ``client`` is the client's name. Unless ``blocking``, a request that would wait for a recall raises
    WouldBlock. ``meter`` counts how long requests take. ``verifier`` is the session verifier: it changes when
    the server has lost this client's state. ``root`` is the volume's node on the server, ``lease`` the length
    of a lease in seconds. Requests in ``posted`` go out with the next request and move to ``answered`` with
    its reply; their outcome is ignored, and one may be performed twice.
    """

    def __init__(
        self,
        dial: Dial,
        timeout: float,
        client: bytes,
        *,
        blocking: bool = True,
        meter: OperationMeter | None = None,
    ) -> None:
        self._dial, self._timeout, self._meter = dial, timeout, meter or OperationMeter()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._hello = SessionHello(client, os.urandom(16), blocking)
        self._performed = self._sent = 0
        self._buffer = memoryview(bytearray(MAX_TRANSFER))
        self._used = 0.0
        self.posted: list[Message] = []
        self.answered: list[Message] = []
        self.verifier, self.root, self.lease = 0, 0, 0.0

    @contextlib.contextmanager
    def acquire(self, deadline: Deadline | None = None) -> Iterator[Deadline]:
        """Hold the slot for one thread; yields the deadline of everything done inside. Raises OSError."""
        deadline = deadline or Deadline.after(self._timeout)
        with until(deadline, self._lock):
            yield deadline

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
        behind it, valid until the next request.

        The caller holds the slot. If the connection is lost, the request is made and sent once more if it was
        not performed, else its reply is asked for (one with bytes behind it: by sending the request again).
        Raises OSError: the server's; ETIMEDOUT; EIO if a request that is not ``idempotent`` was in doubt when
        the server lost the session.
        """
        doubt = _Doubt(0, 0)
        for _ in range(_TRIES):
            try:
                self._connect(deadline)
                forgotten = doubt.verifier not in (0, self.verifier)
                if forgotten and not idempotent:
                    break
                if not forgotten and doubt.performed == self._performed and doubt.verifier and not limit:
                    return self.exchange(Again(), reply, deadline, counted=False)
                doubt = _Doubt(0, 0)  # it was not performed
                request = prepare(deadline)
            except SlotLost:
                continue
            try:
                return self.exchange(request, reply, deadline, payload=payload, limit=limit)
            except SlotLost as lost:
                if lost.in_doubt:
                    doubt = _Doubt(self.verifier, self._performed + self._sent + 1)
        raise os_error(errno.EIO)

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
        sent, began = False, time.monotonic()
        posted = self._mark_sent() if counted else []
        try:
            channel.send(request, deadline, payload, before=posted)
            sent = True
            head = channel.receive(deadline)
            body = self._receive_payload(channel, head.payload_size, limit, deadline)
            require_possible(head.message)
        except DeadlineExceeded as error:
            self.disconnect()
            raise os_error(errno.ETIMEDOUT) from error
        except MillpondError as error:
            self.disconnect()
            raise SlotLost(in_doubt=sent) from error
        except OverflowError:
            raise os_error(errno.EINVAL) from None
        except BaseException:  # an interrupt leaves the rest of a reply in the stream
            self.disconnect()
            raise
        if not isinstance(head.message, (Error, Pending, reply)):
            self.disconnect()  # a refusal, or the server is out of step
            raise os_error(errno.EIO)
        if counted:
            self._performed += 1
            self._confirm_posted(len(posted))
        self._used = time.monotonic()
        self._meter.add(request.NAME, self._used - began)
        return self._success(head.message, reply), body

    def _success(self, answer: Message, reply: type[R]) -> R:
        """Return the reply of a request that succeeded. Raises OSError and WouldBlock."""
        if isinstance(answer, Error):
            raise _refusal(answer)
        if isinstance(answer, reply):
            return answer
        if not self._hello.may_block:
            raise WouldBlock
        raise os_error(errno.EIO)  # a blocking slot never gets Pending from an honest server

    def _receive_payload(self, channel: Channel, size: int, limit: int, deadline: Deadline) -> memoryview:
        if not size <= min(limit, len(self._buffer)):
            return memoryview(channel.receive_payload(limit, deadline))
        body = self._buffer[:size]
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
    def has_ended(self) -> bool:
        """Whether the server has closed the connection."""
        return self._channel is not None and not self._channel.is_quiet

    def disconnect(self) -> None:
        """Close the connection. The server waits a while for the next one."""
        if self._channel:
            self._channel.close()
            self._channel = None

    def close(self, deadline: Deadline) -> None:
        """Close the connection and everything that the server has open for the slot. The caller holds the
        slot.
        """
        if self._channel:
            with contextlib.suppress(SlotLost, OSError):
                self.exchange(Goodbye(), Done, deadline, counted=False)
        self.disconnect()

    def _connect(self, deadline: Deadline) -> None:
        if self._channel and time.monotonic() > self._used + _FRESH_SECONDS and not self._channel.is_quiet:
            self.disconnect()
        if self._channel:
            return
        try:
            self._channel = self._dial(deadline)
            self._channel.eager = True
        except (DeadlineExceeded, TimeoutError) as error:
            raise os_error(errno.ETIMEDOUT) from error
        except (MillpondError, OSError) as error:
            raise os_error(errno.EIO) from error
        self._handshake(deadline)

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
        self._performed, self.lease = welcome.performed, welcome.lease


def _refusal(error: Error) -> OSError:
    code = known_errno(error.errno)
    return AbsentName(error.granted) if code == errno.ENOENT else os_error(code)

"""Edge: one lane of a client: a conversation with a volume's server that outlives its connections.

Both count the requests that were performed. When a connection is lost after a request was out, the number
that the server names on the next tells whether it was performed; if so, the server tells its reply again.
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
_FRESH_SECONDS = 0.5  # a connection that was used just now is tried at once: a loss shows in any case


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A request that was out when its connection was lost: the server's memory then, if it has any, and how
    many will have been performed with it.
    """

    memory: int
    performed: int


class AbsentName(FileNotFoundError):
    """There is no such name, by this grant, 0 for none."""

    def __init__(self, granted: int) -> None:
        super().__init__(errno.ENOENT, os.strerror(errno.ENOENT))
        self.granted = granted


class SlotLost(Exception):
    """The connection ended. ``in_doubt``: after the whole request was out, so that it may have been done."""

    def __init__(self, in_doubt: bool) -> None:
        super().__init__("the connection was lost")
        self.in_doubt = in_doubt


@contextlib.contextmanager
def until(deadline: Deadline, lock: threading.Lock) -> Iterator[None]:
    """With the lock. Raises OSError: ETIMEDOUT if it is not free by then."""
    if not lock.acquire(timeout=seconds_left(deadline)):
        raise os_error(errno.ETIMEDOUT)
    try:
        yield
    finally:
        lock.release()


def seconds_left(deadline: Deadline) -> float:
    """Raises OSError: ETIMEDOUT."""
    try:
        left = deadline.remaining()
    except DeadlineExceeded as error:
        raise os_error(errno.ETIMEDOUT) from error
    return threading.TIMEOUT_MAX if left is None else left


class RpcSlot:
    """Requests and replies, one at a time, over what ``dial`` connects; dialled again when it is lost.
    ``client`` is the client's name. Who is not ``patient`` gets WouldWait where others would have to give up
    a lock first. ``meter`` is told how long requests take.

    ``memory`` names the server's memory of this client: what it knew in an earlier one is gone. ``root`` is
    the volume's node there, ``lease`` how many seconds a lock is leased for. What is ``posted`` goes out with
    the next request and is ``answered`` with it; its outcome is of no interest, and once may be twice.
    """

    def __init__(
        self,
        dial: Dial,
        timeout: float,
        client: bytes,
        *,
        patient: bool = True,
        meter: OperationMeter | None = None,
    ) -> None:
        self._dial, self._timeout, self._meter = dial, timeout, meter or OperationMeter()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._hello = SessionHello(client, os.urandom(16), patient)
        self._performed = self._sent = 0
        self._buffer = memoryview(bytearray(MAX_TRANSFER))
        self._used = 0.0
        self.posted: list[Message] = []
        self.answered: list[Message] = []
        self.memory, self.root, self.lease = 0, 0, 0.0

    @contextlib.contextmanager
    def turn(self, deadline: Deadline | None = None) -> Iterator[Deadline]:
        """Wait for the threads before this one; the deadline of all that is done inside. Raises OSError."""
        deadline = deadline or Deadline.after(self._timeout)
        with until(deadline, self._lock):
            yield deadline

    def ask(
        self,
        prepare: Callable[[Deadline], Message],
        reply: type[R],
        deadline: Deadline,
        *,
        repeat: bool,
        payload: Buffer = b"",
        limit: int = 0,
    ) -> tuple[R, memoryview]:
        """The reply to what ``prepare`` makes once connected, and up to ``limit`` bytes behind it, which are
        good until the next request.

        Within a turn. If the connection is lost, the request is made and sent once more when it was not
        performed, else its reply is asked for (one with bytes behind it: by sending the request again).
        Raises OSError: what the server says; ETIMEDOUT; EIO if the server has forgotten this client, and
        so nobody knows, for what may not be performed twice (``repeat``).
        """
        doubt = _Doubt(0, 0)
        for _ in range(_TRIES):
            try:
                self._connect(deadline)
                forgotten = doubt.memory not in (0, self.memory)
                if forgotten and not repeat:
                    break
                if not forgotten and doubt.performed == self._performed and doubt.memory and not limit:
                    return self.exchange(Again(), reply, deadline, counts=False)
                doubt = _Doubt(0, 0)  # it was not performed
                request = prepare(deadline)
            except SlotLost:
                continue
            try:
                return self.exchange(request, reply, deadline, payload=payload, limit=limit)
            except SlotLost as lost:
                if lost.in_doubt:
                    doubt = _Doubt(self.memory, self._performed + self._sent + 1)
        raise os_error(errno.EIO)

    def exchange(
        self,
        request: Message,
        reply: type[R],
        deadline: Deadline,
        *,
        payload: Buffer = b"",
        limit: int = 0,
        counts: bool = True,
    ) -> tuple[R, memoryview]:
        """One request, one reply, on the present connection only. Raises Lost, OSError and WouldWait."""
        channel = self._channel
        if channel is None:
            raise SlotLost(in_doubt=False)
        sent, began = False, time.monotonic()
        posted = self._posting() if counts else []
        try:
            channel.send(request, deadline, payload, before=posted)
            sent = True
            head = channel.receive(deadline)
            body = self._receive_payload(channel, head.payload_size, limit, deadline)
            require_possible(head.message)
        except DeadlineExceeded as error:
            self.hang_up()
            raise os_error(errno.ETIMEDOUT) from error
        except MillpondError as error:
            self.hang_up()
            raise SlotLost(in_doubt=sent) from error
        except OverflowError:
            raise os_error(errno.EINVAL) from None
        except BaseException:  # an interrupt, which leaves the rest of a reply behind
            self.hang_up()
            raise
        if not isinstance(head.message, (Error, Pending, reply)):
            self.hang_up()  # a refusal, or the server is out of step
            raise os_error(errno.EIO)
        if counts:
            self._performed += 1
            self._have_answered(len(posted))
        self._used = time.monotonic()
        self._meter.took(request.NAME, self._used - began)
        return self._success(head.message, reply), body

    def _success(self, answer: Message, reply: type[R]) -> R:
        """Raises OSError and WouldWait."""
        if isinstance(answer, Error):
            raise _refusal(answer)
        if isinstance(answer, reply):
            return answer
        if not self._hello.patient:
            raise WouldBlock
        raise os_error(errno.EIO)  # it was asked to wait

    def _receive_payload(self, channel: Channel, size: int, limit: int, deadline: Deadline) -> memoryview:
        if not size <= min(limit, len(self._buffer)):
            return memoryview(channel.receive_payload(limit, deadline))
        body = self._buffer[:size]
        channel.receive_into(body, deadline)
        return body

    def _posting(self) -> list[Message]:
        self._sent = len(self.posted)
        return self.posted[:]

    def unsent(self) -> list[Message]:
        """What was posted and has not gone out, to be posted elsewhere."""
        left = self.posted[self._sent :]
        del self.posted[self._sent :]
        return left

    def _have_answered(self, count: int) -> None:
        """So many of what was posted were performed."""
        self._performed += count
        self.answered += self.posted[:count]
        del self.posted[:count]
        self._sent = 0

    @property
    def has_ended(self) -> bool:
        """Whether the server has closed the connection."""
        return self._channel is not None and not self._channel.is_quiet

    def hang_up(self) -> None:
        """Close the connection. The server waits for the next one for a while."""
        if self._channel:
            self._channel.close()
            self._channel = None

    def close(self, deadline: Deadline) -> None:
        """Within a turn: close the connection, and all that the server has open for it."""
        if self._channel:
            with contextlib.suppress(SlotLost, OSError):
                self.exchange(Goodbye(), Done, deadline, counts=False)
        self.hang_up()

    def _connect(self, deadline: Deadline) -> None:
        if self._channel and time.monotonic() > self._used + _FRESH_SECONDS and not self._channel.is_quiet:
            self.hang_up()
        if self._channel:
            return
        try:
            self._channel = self._dial(deadline)
            self._channel.eager = True
        except (DeadlineExceeded, TimeoutError) as error:
            raise os_error(errno.ETIMEDOUT) from error
        except (MillpondError, OSError) as error:
            raise os_error(errno.EIO) from error
        self._greet(deadline)

    def _greet(self, deadline: Deadline) -> None:
        """Go on with the lane, if the server still knows it."""
        sent = self._sent
        welcome, _ = self.exchange(self._hello, SessionWelcome, deadline, counts=False)
        if welcome.memory != self.memory:
            self.memory, self.root = welcome.memory, welcome.root
            self.posted.clear()
            self.answered.clear()
        else:  # what was done must not be done again: by now it may mean something else
            self._have_answered(min(sent, max(0, welcome.performed - self._performed)))
        self._performed, self.lease = welcome.performed, welcome.lease


def _refusal(error: Error) -> OSError:
    code = known_errno(error.errno)
    return AbsentName(error.granted) if code == errno.ENOENT else os_error(code)

"""Edge: a conversation with a volume's server that outlives the connections it is held over."""

from __future__ import annotations

import contextlib
import errno
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from millpond.fs.protocol import Error, known_errno
from millpond.fs.volume import failure
from millpond.wire.channel import Buffer, Channel
from millpond.wire.deadline import Deadline
from millpond.wire.errors import DeadlineExceeded, MillpondError
from millpond.wire.message import Message

R = TypeVar("R", bound=Message)
Dial = Callable[[Deadline], Channel]


class Lost(Exception):
    """The connection ended. ``in_doubt``: after the whole request was out, so that it may have been done."""

    def __init__(self, in_doubt: bool) -> None:
        super().__init__("the connection was lost")
        self.in_doubt = in_doubt


class Connection:
    """Requests and replies, one at a time, over what ``dial`` connects; dialled again when it is lost.

    ``number`` counts the connections: what the server knew of an earlier one is gone.
    """

    def __init__(self, dial: Dial, timeout: float) -> None:
        self._dial, self._timeout = dial, timeout
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self.number = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[Deadline]:
        """Wait for the threads before this one; the deadline of all that is done inside. Raises OSError."""
        deadline = Deadline.after(self._timeout)
        if not self._lock.acquire(timeout=self._timeout):
            raise failure(errno.ETIMEDOUT)
        try:
            yield deadline
        finally:
            self._lock.release()

    def ask(
        self,
        prepare: Callable[[Deadline], Message],
        reply: type[R],
        deadline: Deadline,
        *,
        repeat: bool,
        payload: Buffer = b"",
        limit: int = 0,
    ) -> tuple[R, bytearray]:
        """The reply to what ``prepare`` makes once connected, and up to ``limit`` bytes behind it.

        Within a turn. If the connection is lost, the request is made and sent once more when it cannot have
        been done or may be done twice (``repeat``). Raises OSError: what the server says, EIO, ETIMEDOUT.
        """
        for last in (False, True):
            try:
                self._connect(deadline)
                return self.exchange(prepare(deadline), reply, deadline, payload=payload, limit=limit)
            except Lost as lost:
                if last or (lost.in_doubt and not repeat):
                    raise failure(errno.EIO) from lost
        raise failure(errno.EIO)

    def exchange(
        self, request: Message, reply: type[R], deadline: Deadline, *, payload: Buffer = b"", limit: int = 0
    ) -> tuple[R, bytearray]:
        """One request, one reply, on the present connection only. Raises Lost and OSError."""
        channel = self._channel
        if channel is None:
            raise Lost(in_doubt=False)
        sent = False
        try:
            channel.send(request, deadline, payload)
            sent = True
            head = channel.receive(deadline)
            body = channel.receive_payload(limit, deadline)
        except DeadlineExceeded as error:
            self.hang_up()
            raise failure(errno.ETIMEDOUT) from error
        except MillpondError as error:
            self.hang_up()
            raise Lost(in_doubt=sent) from error
        except OverflowError:
            raise failure(errno.EINVAL) from None
        if isinstance(head.message, Error):
            raise failure(known_errno(head.message.errno))
        if not isinstance(head.message, reply):
            self.hang_up()  # a refusal, or the server is out of step
            raise failure(errno.EIO)
        return head.message, body

    def hang_up(self) -> None:
        """Close the connection; the server closes what was open over it."""
        if self._channel:
            self._channel.close()
            self._channel = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as this side knows."""
        return self._channel is not None

    def _connect(self, deadline: Deadline) -> None:
        if self._channel and not _quiet(self._channel):
            self.hang_up()
        if self._channel:
            return
        try:
            self._channel = self._dial(deadline)
        except (DeadlineExceeded, TimeoutError) as error:
            raise failure(errno.ETIMEDOUT) from error
        except (MillpondError, OSError) as error:
            raise failure(errno.EIO) from error
        self.number += 1


def _quiet(channel: Channel) -> bool:
    """Whether an idle connection has nothing to say, as it should; the end of it would show here."""
    try:
        channel.sock.settimeout(0)
        channel.sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        pass
    return False

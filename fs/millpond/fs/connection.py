"""Edge: a conversation with a volume's server that outlives the connections it is held over.

Both count the requests that were performed. When a connection is lost after a request was out, the number
that the server names on the next tells whether it was performed; if so, the server tells its reply again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from millpond.fs.protocol import Again, Done, Error, Goodbye, Hello, Welcome, known_errno
from millpond.fs.volume import failure
from millpond.wire.channel import Buffer, Channel
from millpond.wire.deadline import Deadline
from millpond.wire.errors import DeadlineExceeded, MillpondError
from millpond.wire.message import Message

R = TypeVar("R", bound=Message)
Dial = Callable[[Deadline], Channel]
_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A request that was out when its connection was lost: its session, if it has any, and how many will have
    been performed with it.
    """

    session: int
    performed: int


class Lost(Exception):
    """The connection ended. ``in_doubt``: after the whole request was out, so that it may have been done."""

    def __init__(self, in_doubt: bool) -> None:
        super().__init__("the connection was lost")
        self.in_doubt = in_doubt


class Connection:
    """Requests and replies, one at a time, over what ``dial`` connects; dialled again when it is lost.

    ``session`` counts the server's memories of this client: what it knew in an earlier one is gone.
    """

    def __init__(self, dial: Dial, timeout: float) -> None:
        self._dial, self._timeout = dial, timeout
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._name = os.urandom(16)
        self._performed = 0
        self._later: list[Message] = []
        self.session = 0

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

        Within a turn. If the connection is lost, the request is made and sent once more when it was not
        performed, else its reply is asked for (one with bytes behind it: by sending the request again).
        Raises OSError: what the server says; ETIMEDOUT; EIO if the server has forgotten this client, and
        so nobody knows, for what may not be performed twice (``repeat``).
        """
        doubt = _Doubt(0, 0)
        for _ in range(_TRIES):
            try:
                self._connect(deadline)
                forgotten = doubt.session not in (0, self.session)
                if forgotten and not repeat:
                    break
                if not forgotten and doubt.performed == self._performed and doubt.session and not limit:
                    return self.exchange(Again(), reply, deadline, counts=False)
                request = prepare(deadline)
            except Lost:
                continue
            try:
                return self.exchange(request, reply, deadline, payload=payload, limit=limit)
            except Lost as lost:
                if lost.in_doubt:
                    doubt = _Doubt(self.session, self._performed + 1)
        raise failure(errno.EIO)

    def tell(self, request: Message, deadline: Deadline) -> None:
        """Have something done whose outcome is of no interest: within a turn now, or once connected again."""
        if self._channel is None:
            self._later.append(request)
            return
        try:
            self.exchange(request, Done, deadline)
        except (Lost, OSError):
            if self._channel is None:  # else the server has heard, whatever it says
                self._later.append(request)

    def exchange(
        self,
        request: Message,
        reply: type[R],
        deadline: Deadline,
        *,
        payload: Buffer = b"",
        limit: int = 0,
        counts: bool = True,
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
        except BaseException:  # an interrupt, which leaves the rest of a reply behind
            self.hang_up()
            raise
        self._performed += counts
        if isinstance(head.message, Error):
            raise failure(known_errno(head.message.errno))
        if not isinstance(head.message, reply):
            self.hang_up()  # a refusal, or the server is out of step
            raise failure(errno.EIO)
        return head.message, body

    def hang_up(self) -> None:
        """Close the connection. The server waits for the next one for a while."""
        if self._channel:
            self._channel.close()
            self._channel = None

    def close(self, deadline: Deadline) -> None:
        """Within a turn: close the connection, and all that the server has open for it."""
        if self._channel:
            with contextlib.suppress(Lost, OSError):
                self.exchange(Goodbye(), Done, deadline, counts=False)
        self.hang_up()

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
        self._greet(deadline)

    def _greet(self, deadline: Deadline) -> None:
        """Go on with the session, if the server still knows it."""
        welcome, _ = self.exchange(Hello(self._name), Welcome, deadline, counts=False)
        if not (welcome.known and self.session):
            self.session += 1
            self._later.clear()
        self._performed = welcome.performed
        while self._later:
            try:
                self.exchange(self._later[-1], Done, deadline)
            except OSError:
                if self._channel is None:
                    raise
            self._later.pop()


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

"""Edge (threads, the clock): what clients have open, and what each was told last, across its connections.

A client whose connection is lost may come back for a while: its files are as they were, and it hears again
what it did not hear, so that nothing is done twice. Whoever comes with a session's name has it from then on:
what still arrives over an earlier connection is not done.
"""

from __future__ import annotations

import errno
import threading

from millpond.fs import protocol as p
from millpond.fs.requests import Reply, Requests
from millpond.fs.volume import Volume
from millpond.wire.channel import Channel
from millpond.wire.errors import ConnectionLost, ProtocolError
from millpond.wire.message import Message

_KEEP_SECONDS = 60.0
_MOST = 64
_NAME = 16  # bytes


class Session:
    """One client's: the requests of the connection that has it are performed, one at a time. ``performed``
    counts them.
    """

    def __init__(self, volume: Volume, name: bytes) -> None:
        self.name, self.performed = name, 0
        self._requests = Requests(volume)
        self._last: Message | None = None
        self._lock = threading.Lock()
        self._channel: Channel | None = None

    def take(self, channel: Channel) -> None:
        """It belongs to this connection now; an earlier one is of no more use."""
        with self._lock:
            before, self._channel = self._channel, channel
        if before and before is not channel:
            before.shut_down()

    def leave(self, channel: Channel) -> bool:
        """It belongs to no connection now, unless it belonged to another."""
        with self._lock:
            if self._channel is not channel:
                return False
            self._channel = None
            return True

    @property
    def away(self) -> bool:
        """Whether it belongs to no connection."""
        with self._lock:
            return self._channel is None

    def perform(self, channel: Channel, request: Message, payload: bytes) -> Reply:
        """Do what the client asks for over ``channel``. Raises OSError for what cannot be told again,
        ProtocolError, and ConnectionLost if the session has gone on elsewhere.
        """
        with self._lock:
            if self._channel is not channel:
                raise ConnectionLost(f"{channel.peer} has come back over another connection")
            if isinstance(request, p.Again):
                return self._again(), b""
            self._requests.payload = payload
            reply, body = self._perform(request)
            self.performed += 1
            self._last = None if body else reply
            return reply, body

    def _perform(self, request: Message) -> Reply:
        try:
            return self._requests.perform(request)
        except OSError as error:
            return p.Error(error.errno or errno.EIO), b""
        except (OverflowError, ValueError):  # a number or a name that no system call takes
            return p.Error(errno.EINVAL), b""

    def _again(self) -> Message:
        if self._last is None:
            raise OSError(errno.EIO, "there is nothing to be told again")
        return self._last

    def close(self) -> None:
        """Close what the client left open."""
        with self._lock:
            self._channel = None
            self._requests.release_all()


class Sessions:
    """All clients of ``volume``. A session is kept for ``keep`` seconds without a connection."""

    def __init__(self, volume: Volume, keep: float = _KEEP_SECONDS) -> None:
        self._volume, self._keep = volume, keep
        self._sessions: dict[bytes, Session] = {}
        self._timers: dict[bytes, threading.Timer] = {}
        self._lock = threading.Lock()

    def nameless(self, channel: Channel) -> Session:
        """One that ends with its connection."""
        session = Session(self._volume, b"")
        session.take(channel)
        return session

    def enter(self, name: bytes, channel: Channel) -> tuple[Session, bool]:
        """The session with this name, and whether it was there. Raises ProtocolError."""
        if len(name) != _NAME:
            raise ProtocolError(f"{channel.peer} sent a session's name of {len(name)} bytes, not {_NAME}")
        with self._lock:
            session, known = self._sessions.get(name), name in self._sessions
            if session is None:
                self._make_room(channel)
                session = self._sessions[name] = Session(self._volume, name)
            if timer := self._timers.pop(name, None):
                timer.cancel()
        session.take(channel)
        return session, known

    def _make_room(self, channel: Channel) -> None:
        """At most so many, so that nobody can fill the memory with them; the longest away goes first."""
        if len(self._sessions) >= _MOST:
            away = next(iter(self._timers), None)
            if away is None:
                raise ProtocolError(f"{channel.peer} would be the {_MOST + 1}th client")
            self._remove(away).close()

    def leave(self, session: Session, channel: Channel) -> None:
        """The connection has ended."""
        if not session.leave(channel):
            return
        with self._lock:
            if kept := self._sessions.get(session.name) is session:
                timer = threading.Timer(self._keep, self._expire, [session])
                timer.daemon = True
                self._timers[session.name] = timer
                timer.start()
        if not kept:
            session.close()

    def _expire(self, session: Session) -> None:
        with self._lock:
            if self._timers.get(session.name) is not threading.current_thread():
                return  # it came back
            del self._timers[session.name]
            if not session.away:
                return
            del self._sessions[session.name]
        session.close()

    def _remove(self, name: bytes) -> Session:
        if timer := self._timers.pop(name, None):
            timer.cancel()
        return self._sessions.pop(name)

    def end(self, session: Session) -> None:
        """Its client says that it is done."""
        with self._lock:
            if self._sessions.get(session.name) is session:
                self._remove(session.name)
        session.close()

    def close(self) -> None:
        """End all."""
        with self._lock:
            sessions = [self._remove(name) for name in list(self._sessions)]
        for session in sessions:
            session.close()

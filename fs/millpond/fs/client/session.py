# SPDX-License-Identifier: Apache-2.0
"""Edge: the session of one client: gives each operation a connection, and keeps the client's inodes known to
the server when it has lost the session.

A session is what the server knows by the client's name: nodes, open files, delegations, locks. Each
connection has one of its slots, and one request under way; readahead's have several. The connection itself
dials again, and repeats a request that was not performed, or asks for its reply. The call repeats one that
has had no effect: for want of room, or since a FORGET of another connection was faster.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import RemoteError
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.inodes import InodeCache
from millpond.fs.client.connection import Dial, SessionConnection, SlotLost
from millpond.fs.client.keep_alive import SILENT_SECONDS, KeepAlive
from millpond.fs.client.metrics import OperationMeter
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.bulk_copy import ReturnUnused
from millpond.fs.vfs.operation import current
from millpond.fs.vfs.path_api import os_error
from millpond.wire.channel import Buffer
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
now = time.monotonic
"""Return the seconds of the lease clock (monotonic)."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
_FORGET_AT_ONCE = 64
_GOODBYE_SECONDS = 2.0  # a server that has stopped holds up no unmount
_FLUSH_SECONDS = 0.5  # of a thread that has to renew the lease


class Session:
    """One client's session: as many connections as operations wait for the server at once. Threads may call
    at once.

    ``timeout`` is how many seconds an operation may take while the server answers, ``silence`` how long the
    server may answer nothing. ``inodes`` is guarded by ``lock``. ``on_invalidate`` is called, with the lock,
    when the server has lost the session. ``welcome`` is what the server said of it.
    """

    def __init__(
        self, dial: Dial, timeout: float, on_invalidate: Callable[[list[CachedInode]], None]
    ) -> None:
        self.client, self.meter = os.urandom(16), OperationMeter()
        self.inodes, self.lock, self.on_invalidate = InodeCache(), threading.Lock(), on_invalidate
        self.posted: list[tuple[int, Message]] = []
        self.busy: list[SessionConnection] = []
        self._ended: set[int] = set()  # verifiers of earlier sessions
        self._dial, self.timeout, self.silence = dial, timeout, min(timeout, SILENT_SECONDS)
        self._connections: list[SessionConnection] = []
        self._keep_alive = KeepAlive(self._ping, self.silence, self._connections)
        self._pinging = self.connection(spare=True)
        self._free: list[SessionConnection] = []
        self.welcome = p.SessionWelcome(0, 0, 0, 0.0)

    def connection(self, *, spare: bool = False) -> SessionConnection:
        """Return another connection, for one thread at a time; a ``spare`` one waits for nobody."""
        made = SessionConnection(self._dial, self.client, self._keep_alive, self.meter, spare=spare)
        self._connections.append(made)
        return made

    def _ping(self, deadline: Deadline) -> None:
        with suppress(SlotLost, OSError):
            self._pinging.ask(p.Ping, p.Done, deadline, idempotent=True)

    def deadline(self) -> Deadline:
        """Return the deadline of the operation of this thread, or of one that begins now."""
        operation = current.get()
        return Deadline((operation.began if operation and operation.began else now()) + self.timeout)

    @contextmanager
    def call(self, deadline: Deadline | None = None) -> Iterator[Call]:
        """Have a connection for one operation, of which a part of the time may be over. Raises OSError."""
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self.connection()
        self.busy.append(connection)
        try:
            yield Call(self, connection, deadline or self.deadline())
        finally:
            self.busy.remove(connection)
            if unsent := connection.unsent():
                with self.lock:
                    self.posted[:0] = [(connection.verifier, message) for message in unsent]
            self._free.append(connection)

    def post(self, request: Message, verifier: int) -> None:
        """Queue a request whose outcome is ignored; it goes out with the next one, unless the session
        ``verifier`` has changed by then.
        """
        with self.lock:
            self.posted.append((verifier, request))

    def flush(self, seconds: float = _FLUSH_SECONDS, limit: float = math.inf) -> None:
        """Send what was posted, and all FORGETs, with requests that begin within so many seconds. They end
        within ``limit`` seconds: what is not answered goes out again later.
        """
        end, deadline = now() + seconds, self.deadline().earlier(limit)
        while (self.posted or self.inodes.to_forget) and now() < end:
            with self.lock:
                self.inodes.forget_is_urgent = bool(self.inodes.to_forget)
            try:
                self._send_posted(deadline)
            except OSError:
                return

    def _send_posted(self, deadline: Deadline | None = None) -> None:
        """Send any request, so that what was posted goes with it."""
        with self.call(deadline) as call:
            call.ask(p.GetStatistics, p.StatisticsAre, idempotent=True)

    def must_forget(self) -> bool:
        """Return whether FORGETs are due: many, or one of a file that may take flash space until then."""
        count = len(self.inodes.to_forget)
        return count >= _FORGET_AT_ONCE or (count > 0 and self.inodes.forget_is_urgent)

    def forget_now(self) -> None:
        """Send due FORGETs before another request, whose reply they would make invalid."""
        if self.must_forget():
            self._send_posted()

    def make_room(self) -> bool:
        """Have the next request forget all idle inodes, since a removed file takes flash space until then.
        Returns False if there are none.
        """
        with self.lock:
            self.inodes.forget_idle()
            self.inodes.forget_is_urgent = bool(self.inodes.to_forget)
            return self.inodes.forget_is_urgent

    def due(self, connection: SessionConnection) -> list[Message]:
        """Return what is to go out with the next request over a connection. Invalidates the cache if its
        session is a new one. Raises SlotLost if the cache is of a newer one.
        """
        inodes, session = self.inodes, connection.session
        if session.verifier in self._ended:
            connection.disconnect()  # else its old session would look like a new one
            raise SlotLost(in_doubt=False)
        self.welcome = session
        is_new, returns = inodes.verifier != session.verifier, len(inodes.to_return) >= _FORGET_AT_ONCE
        if not (is_new or returns or self.posted or self.must_forget()):
            return []
        with self.lock:
            if inodes.verifier != session.verifier:
                self._ended.add(inodes.verifier)
                inodes.root.inode = session.root_inode
                self.on_invalidate(inodes.invalidate_all(session.verifier, session.storage))
            due = [message for verifier, message in self.posted if verifier == inodes.verifier]
            self.posted.clear()
            if self.must_forget():
                due.append(p.Forget(inodes.take_forgets()))
            if len(inodes.to_return) >= _FORGET_AT_ONCE:
                due.append(ReturnUnused(*map(tuple, zip(*inodes.take_returns(), strict=True))))
            return due

    def note_forgets(self, connection: SessionConnection) -> None:
        """Record performed FORGETs: replies of other connections that are under way may still name those
        nodes.
        """
        forgotten = [node for one in connection.answered if isinstance(one, p.Forget) for node in one.nodes]
        connection.answered.clear()
        if forgotten:
            with self.lock:
                self.inodes.forgets_done(forgotten, others_ask=self.busy != [connection])

    def close(self) -> None:
        """End the session, and all connections; no other is made."""
        self._keep_alive.closed.set()
        with suppress(IndexError, SlotLost, OSError):
            deadline = Deadline.after(min(self.silence, _GOODBYE_SECONDS))
            idle = [one for one in self._free if one.is_connected]
            idle[0].exchange(p.Goodbye(), p.Done, deadline, counted=False)
        for connection in self._connections:
            connection.close()
        self._keep_alive.close()


class Call:
    """One operation's use of a connection. ``since`` and ``verifier`` are ``InodeCache.changes`` and the
    session verifier when the answered request was made.
    """

    def __init__(self, session: Session, connection: SessionConnection, deadline: Deadline) -> None:
        self._session, self._connection, self._deadline = session, connection, deadline
        self._used: list[CachedInode] = []
        self.since = self.verifier = 0

    def ask(
        self,
        prepare: Callable[[], Message],
        reply: type[R],
        *,
        idempotent: bool,
        payload: Buffer = b"",
        limit: int = 0,
    ) -> tuple[R, memoryview]:
        """Return the reply to the request that ``prepare`` makes once connected; see ``ask`` of the
        connection. An operation that failed with ENOSPC is repeated as long as FORGETs may free space: it has
        had no effect. So is one, once, for files that another connection's FORGET has overtaken.
        """

        def ready() -> Message:
            self._connection.posted += self._session.due(self._connection)
            self._used.clear()
            self.since, self.verifier = self._session.inodes.changes, self._connection.verifier
            return prepare()

        is_second = False
        while True:
            try:
                return self._connection.ask(
                    ready, reply, self._deadline, idempotent=idempotent, payload=payload, limit=limit
                )
            except OSError as error:
                if error.errno == errno.ENOSPC and self._session.make_room():
                    continue
                if error.errno != errno.ESTALE or not self._used or is_second:
                    raise
            finally:
                self._session.note_forgets(self._connection)
            is_second = True
            for file in self._used:
                file.verifier = 0

    def exchange(self, request: Message, reply: type[R]) -> R:
        """Send another request first, while ``ask`` prepares. Raises OSError and SlotLost."""
        return self._connection.exchange(request, reply, self._deadline)[0]

    def remote(self, file: CachedInode) -> int:
        """Return a file's node on the server, while ``ask`` prepares. Raises OSError: ESTALE if the file is
        gone.
        """
        if file is self._session.inodes.root:
            return self._connection.session.root
        if file.verifier != self._connection.verifier:
            self._find_again(file)
        self._used.append(file)
        return file.remote

    def _find_again(self, file: CachedInode) -> None:
        with self._session.lock:
            path = self._session.inodes.path(file)
        try:
            found = self.exchange(p.Walk(self._connection.session.root, path, again=True), p.FoundIs)
        except OSError as error:
            if error.errno in _GONE:
                raise os_error(errno.ESTALE) from RemoteError(f"its name: {error.strerror}")
            raise
        if found.attributes.inode != file.inode:
            raise os_error(errno.ESTALE) from RemoteError("another file has its name by now")
        file.remote, file.verifier = found.node, self._connection.verifier

# SPDX-License-Identifier: Apache-2.0
"""Edge: gives each request a session slot, and keeps the client's inodes known to the server across lost
sessions.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar
from weakref import WeakSet

from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, RemoteError
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.inodes import InodeCache
from millpond.fs.client.keep_alive import SILENT_SECONDS, KeepAlive
from millpond.fs.client.metrics import OperationMeter
from millpond.fs.client.rpc import Dial, RpcSlot, SlotLost, seconds_left
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.bulk_copy import ReturnUnused
from millpond.fs.vfs.inode_api import may_block
from millpond.fs.vfs.operation import about_to_wait, current, woken_by
from millpond.fs.vfs.path_api import os_error
from millpond.wire.channel import Buffer, Channel
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
_FORGET_AT_ONCE = 64
_MOST_SHARED = 16
_GOODBYE_SECONDS = 2.0  # a server that has stopped holds up no unmount
_FLUSH_SECONDS = 0.5  # of a thread that has to renew the lease


class RpcPool:
    """The session slots of one client, each for one thread at a time. Threads that must not block share a few
    and wait for each other; those that may block get as many as they need, for they may wait for long.

    ``timeout`` is how many seconds an operation may take while the server answers, ``silence`` how long the
    server may answer nothing. ``inodes`` is guarded by ``lock``. ``on_invalidate`` is called, with the lock,
    when the server has lost the session. ``session`` is what the server said of it.
    """

    def __init__(
        self, dial: Dial, timeout: float, on_invalidate: Callable[[list[CachedInode]], None]
    ) -> None:
        self.client = os.urandom(16)
        self.meter = OperationMeter()
        self.posted: list[tuple[int, Message]] = []
        self.busy: list[RpcSlot] = []
        self.inodes, self.lock, self.on_invalidate = InodeCache(), threading.Lock(), on_invalidate
        self._dial, self.timeout, self.silence = dial, timeout, min(timeout, SILENT_SECONDS)
        self._connections, self._is_closed = WeakSet[Channel](), False
        self._keep_alive = KeepAlive(self._ping, self.silence)
        self._pinging = RpcSlot(self._connect, self.client, self._keep_alive, blocking=False)
        self._free: dict[bool, list[RpcSlot]] = {False: [], True: []}
        self._slot_free = threading.Condition()
        self._all: list[RpcSlot] = []
        self._shared = 0
        self.session = p.SessionWelcome(0, 0, 0, 0.0)

    def _connect(self, deadline: Deadline) -> Channel:
        """Dial, unless the client is closed: a thread may still be at a request of its own then."""
        channel = self._dial(deadline)
        with self._slot_free:
            if not self._is_closed:
                self._connections.add(channel)
                return channel
        channel.close()
        raise DeadlineExceeded("the client is closed")  # dialling again is of no use

    def _ping(self, deadline: Deadline) -> None:
        with suppress(SlotLost, OSError):
            self._pinging.ask(p.Ping, p.Done, deadline, idempotent=True)

    def new_slot(self, *, blocking: bool) -> RpcSlot:
        """Return another session slot, for one thread at a time."""
        slot = RpcSlot(self._connect, self.client, self._keep_alive, blocking=blocking, meter=self.meter)
        self._all.append(slot)
        return slot

    def _take_slot(self, deadline: Deadline, *, blocking: bool) -> RpcSlot:
        """Return a slot for this thread. Raises OSError."""
        free = self._free[blocking]
        with self._slot_free:
            if free:
                return free.pop()
            if blocking or self._shared < _MOST_SHARED:
                self._shared += not blocking
                return self.new_slot(blocking=blocking)
        return self._await_slot(free, deadline)

    def _await_slot(self, free: list[RpcSlot], deadline: Deadline) -> RpcSlot:
        about_to_wait()
        with woken_by(self._notify) as operation, self._slot_free:
            if not self._slot_free.wait_for(lambda: free or operation.is_interrupted, seconds_left(deadline)):
                raise os_error(errno.ETIMEDOUT)
            if operation.is_interrupted:
                raise os_error(errno.EINTR)
            return free.pop()

    def _notify(self) -> None:
        with self._slot_free:
            self._slot_free.notify_all()

    def deadline(self) -> Deadline:
        """Return the deadline of the operation of this thread, or of one that begins now."""
        operation = current.get()
        return Deadline((operation.began if operation and operation.began else now()) + self.timeout)

    @contextmanager
    def call(self, deadline: Deadline | None = None) -> Iterator[RpcCall]:
        """Have a slot for one operation, of which a part of the time may be over. Raises OSError."""
        deadline, blocking = deadline or self.deadline(), may_block.get()
        slot = self._take_slot(deadline, blocking=blocking)
        self.busy.append(slot)
        try:
            yield RpcCall(self, slot, deadline)
        finally:
            self.busy.remove(slot)
            self._requeue_unsent(slot)
            with self._slot_free:
                self._free[blocking].append(slot)
                self._slot_free.notify()

    def _requeue_unsent(self, slot: RpcSlot) -> None:
        """Queue again what was posted on a slot and went out with no request."""
        if unsent := slot.unsent():
            with self.lock:
                self.posted[:0] = [(slot.verifier, message) for message in unsent]

    def post(self, request: Message, verifier: int) -> None:
        """Queue a request whose outcome is ignored; it goes out with the next one, unless the session
        ``verifier`` has changed by then.
        """
        with self.lock:
            self.posted.append((verifier, request))

    def flush(self, seconds: float = _FLUSH_SECONDS) -> None:
        """Send what was posted, and all FORGETs, with requests that begin within so many seconds."""
        end = now() + seconds
        while (self.posted or self.inodes.to_forget) and now() < end:
            with self.lock:
                self.inodes.forget_is_urgent = bool(self.inodes.to_forget)
            try:
                self._send_posted()
            except OSError:
                return

    def _send_posted(self) -> None:
        """Send any request, so that what was posted goes with it."""
        with self.call() as call:
            call.ask(p.GetStatistics, p.StatisticsAre, idempotent=True)

    def has_due(self) -> bool:
        """Return whether anything is to go out with the next request. Needs no lock."""
        return bool(self.posted) or self.must_forget() or len(self.inodes.to_return) >= _FORGET_AT_ONCE

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

    def close(self) -> None:
        """End the session, and all connections; no other is made."""
        with self._slot_free:
            self._is_closed, slots, connections = True, self._all[:], [*self._connections]
        connected = [slot for slot in slots if slot.is_connected and slot not in self.busy]
        if connected:
            connected[0].close(Deadline.after(min(self.silence, _GOODBYE_SECONDS)))
        for slot in (*slots, self._pinging):
            slot.disconnect()
        for connection in connections:  # of a slot that does not have it yet
            connection.close()
        self._keep_alive.close()


class RpcCall:
    """One operation's use of a session slot."""

    def __init__(self, rpc: RpcPool, slot: RpcSlot, deadline: Deadline) -> None:
        self._rpc, self._slot, self._deadline = rpc, slot, deadline
        self._used: list[CachedInode] = []
        self.since = self.verifier = 0
        """``InodeCache.changes`` and the session verifier when the answered request was made."""

    def ask(
        self,
        prepare: Callable[[], Message],
        reply: type[R],
        *,
        idempotent: bool,
        payload: Buffer = b"",
        limit: int = 0,
    ) -> tuple[R, memoryview]:
        """Return the reply to the request that ``prepare`` makes once connected; see ``RpcSlot.ask``. An
        operation that failed with ENOSPC is repeated as long as FORGETs may free space: it has had no effect.
        So is one, once, for files that another slot's FORGET has overtaken.
        """

        def ready() -> Message:
            self._sync_session()
            self._used.clear()
            self.since, self.verifier = self._rpc.inodes.changes, self._slot.verifier
            return prepare()

        is_second = False
        while True:
            try:
                return self._slot.ask(
                    ready, reply, self._deadline, idempotent=idempotent, payload=payload, limit=limit
                )
            except OSError as error:
                if error.errno == errno.ENOSPC and self._rpc.make_room():
                    continue
                if error.errno != errno.ESTALE or not self._used or is_second:
                    raise
            finally:
                self._note_forgets_done()
            is_second = True
            for file in self._used:
                file.verifier = 0

    def _note_forgets_done(self) -> None:
        """Record performed FORGETs: replies of other slots that are under way may still name those nodes."""
        forgotten = [node for one in self._slot.answered if isinstance(one, p.Forget) for node in one.nodes]
        self._slot.answered.clear()
        if forgotten:
            with self._rpc.lock:
                self._rpc.inodes.forgets_done(forgotten, others_ask=self._rpc.busy != [self._slot])

    def exchange(self, request: Message, reply: type[R]) -> R:
        """Send another request first, while ``ask`` prepares."""
        return self._slot.exchange(request, reply, self._deadline)[0]

    def _sync_session(self) -> None:
        """Invalidate the cache if the session verifier has changed, and add posted requests and due FORGETs
        to the slot.
        """
        inodes = self._rpc.inodes
        if inodes.verifier not in (0, self._slot.verifier) and self._slot.has_ended:
            self._slot.disconnect()  # else its old session would look like a new one
            raise SlotLost(in_doubt=False)
        self._rpc.session = self._slot.session
        if inodes.verifier == self._slot.verifier and not self._rpc.has_due():
            return
        with self._rpc.lock:
            if inodes.verifier != self._slot.verifier:
                session = self._slot.session
                self._rpc.on_invalidate(inodes.invalidate_all(session.verifier, session.storage))
            self._slot.posted += [
                message for verifier, message in self._rpc.posted if verifier == inodes.verifier
            ]
            self._rpc.posted.clear()
            if self._rpc.must_forget():
                self._slot.posted.append(p.Forget(inodes.take_forgets()))
            if len(inodes.to_return) >= _FORGET_AT_ONCE:
                grants = inodes.take_returns()
                self._slot.posted.append(ReturnUnused(*map(tuple, zip(*grants, strict=True))))

    def remote(self, file: CachedInode) -> int:
        """Return a file's node on the server, while ``ask`` prepares. Raises OSError: ESTALE if the file is
        gone.
        """
        if file is self._rpc.inodes.root:
            return self._slot.session.root
        if file.verifier != self._slot.verifier:
            self._find_again(file)
        self._used.append(file)
        return file.remote

    def _find_again(self, file: CachedInode) -> None:
        with self._rpc.lock:
            path = self._rpc.inodes.path(file)
        try:
            found = self.exchange(p.Walk(self._slot.session.root, path, again=True), p.FoundIs)
        except SlotLost:
            raise SlotLost(in_doubt=False) from None
        except OSError as error:
            if error.errno in _GONE:
                raise os_error(errno.ESTALE) from RemoteError(f"its name: {error.strerror}")
            raise
        if found.attributes.inode != file.inode:
            raise os_error(errno.ESTALE) from RemoteError("another file has its name by now")
        file.remote, file.verifier = found.node, self._slot.verifier


now = time.monotonic
"""Return the seconds of the lease clock (monotonic)."""

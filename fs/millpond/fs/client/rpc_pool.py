"""Edge: a client's conversations with the server, and its files there, found again if it forgot them."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from millpond.base.deadline import Deadline
from millpond.fs.client.cache.inodes import CachedInode, InodeCache
from millpond.fs.client.metrics import OperationMeter
from millpond.fs.client.rpc import Dial, RpcSlot, SlotLost
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import may_block
from millpond.fs.vfs.path_api import os_error
from millpond.wire.channel import Buffer
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
T = TypeVar("T")
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
_FORGET_AT_ONCE = 64


class RpcPool:
    """One lane for threads that may not wait until others give up a lock, and one for each that may.

    ``book`` is guarded by ``lock``. ``on_void`` is called, with the lock, when the server has forgotten all.
    """

    def __init__(self, dial: Dial, timeout: float) -> None:
        self.client = os.urandom(16)
        self.meter = OperationMeter()
        self.posted: list[tuple[int, Message]] = []
        self.busy: list[RpcSlot] = []
        self.book, self.lock = InodeCache(), threading.Lock()
        self.on_void: Callable[[list[CachedInode]], None] = lambda _files: None
        self._dial, self.timeout = dial, timeout
        self._first = self._made(patient=False)
        self._own = threading.local()
        self._all = [self._first]
        self._owners: list[tuple[threading.Thread, RpcSlot]] = []

    def _made(self, *, patient: bool) -> RpcSlot:
        return RpcSlot(self._dial, self.timeout, self.client, patient=patient, meter=self.meter)

    def _lane(self) -> RpcSlot:
        """Of this thread, now."""
        if not may_block.get():
            return self._first
        found: RpcSlot | None = getattr(self._own, "lane", None)
        if found is None:
            found = self._own.lane = self._left_behind() or self._made(patient=True)
            with self.lock:
                self._owners.append((threading.current_thread(), found))
                if found not in self._all:
                    self._all.append(found)
        return found

    def _left_behind(self) -> RpcSlot | None:
        """By a thread that has ended: the server lets a client have so many lanes only."""
        with self.lock:
            for owned in self._owners:
                if not owned[0].is_alive():
                    self._owners.remove(owned)
                    return owned[1]
        return None

    @property
    def lease(self) -> float:
        """For how many seconds the server leases locks."""
        return self._lane().lease

    def deadline(self) -> Deadline:
        """Of an operation that begins now."""
        return Deadline.after(self.timeout)

    @contextmanager
    def turn(self, deadline: Deadline | None = None) -> Iterator[RpcCall]:
        """A lane, for one operation, of which a part may be over. Raises OSError."""
        lane = self._lane()
        with lane.turn(deadline) as deadline:
            self.busy.append(lane)
            try:
                yield RpcCall(self, lane, deadline)
            finally:
                self.busy.remove(lane)
                self._take_back(lane)

    def _take_back(self, lane: RpcSlot) -> None:
        """What was posted, and went with no request; where others have gone, it is told who asks next."""
        if unsent := lane.unsent():
            with self.lock:
                self.posted[:0] = [(lane.memory, message) for message in unsent]

    def post(self, request: Message, memory: int) -> None:
        """Have something done, before long, whose outcome is of no interest; not by another ``memory``."""
        with self.lock:
            self.posted.append((memory, request))

    def flush(self) -> None:
        """Have done now what was posted."""
        if self.posted or self.book.is_urgent:
            with suppress(OSError):
                self._ask_anything()

    def _ask_anything(self) -> None:
        """What is posted goes with it."""
        with self.turn() as turn:
            turn.ask(p.GetStatistics, p.StatisticsAre, repeat=True)

    def forget_now(self) -> None:
        """Have the server forget what it is to forget, before something else is asked: the reply to that
        would not count.
        """
        if len(self.book.forgotten) >= _FORGET_AT_ONCE or self.book.is_urgent:
            self._ask_anything()

    def make_room(self) -> bool:
        """Have the server forget, with the next request, all that nobody uses here: what was removed takes
        space until then. False if there is nothing.
        """
        with self.lock:
            self.book.forget_idle()
            self.book.is_urgent = bool(self.book.forgotten)
            return self.book.is_urgent

    def close(self) -> None:
        """Say farewell on one, and hang up the others."""
        own = self._lane()
        for lane in self._all:
            if lane is not own:
                lane.hang_up()
        with own.turn() as deadline:
            own.close(deadline)


class RpcCall:
    """One operation's time on a lane."""

    def __init__(self, lanes: RpcPool, lane: RpcSlot, deadline: Deadline) -> None:
        self._lanes, self._lane, self._deadline = lanes, lane, deadline
        self._used: list[CachedInode] = []
        self.since = self.memory = 0
        """How often something had been changed here when the request that was answered was made, and the
        server's memory of this client then.
        """

    def ask(
        self,
        prepare: Callable[[], Message],
        reply: type[R],
        *,
        repeat: bool,
        payload: Buffer = b"",
        limit: int = 0,
    ) -> tuple[R, memoryview]:
        """The reply to what ``prepare`` makes once connected; see Connection."""

        def ready(_deadline: Deadline) -> Message:
            self._meet()
            self._used.clear()
            self.since, self.memory = self._lanes.book.changes, self._lane.memory
            return prepare()

        def once() -> tuple[R, memoryview]:
            try:
                return self._lane.ask(
                    ready, reply, self._deadline, repeat=repeat, payload=payload, limit=limit
                )
            finally:
                self._settle()

        try:
            return self._with_room(once)
        except OSError as error:
            if error.errno != errno.ESTALE or not self._used:
                raise
        for file in self._used:  # another lane may have let the server forget what it just found for this one
            file.memory = 0
        return self._with_room(once)

    def _with_room(self, once: Callable[[], T]) -> T:
        """Who was refused for want of room has done nothing, and there may be more by now."""
        while True:
            try:
                return once()
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._lanes.make_room():
                    raise

    def _settle(self) -> None:
        """What was forgotten before the request is not in its reply, but may be in those of other lanes."""
        forgotten = [node for one in self._lane.answered if isinstance(one, p.Forget) for node in one.nodes]
        self._lane.answered.clear()
        if forgotten:
            with self._lanes.lock:
                self._lanes.book.has_forgotten(forgotten, others_ask=self._lanes.busy != [self._lane])

    def exchange(self, request: Message, reply: type[R]) -> R:
        """While ``ask`` prepares: another request before it."""
        return self._lane.exchange(request, reply, self._deadline)[0]

    def _meet(self) -> None:
        """Go by nothing that the server has forgotten; let it forget what is forgotten here."""
        book = self._lanes.book
        if book.memory not in (0, self._lane.memory) and self._lane.has_ended:
            self._lane.hang_up()  # or it would be taken for the server that has forgotten all
            raise SlotLost(in_doubt=False)
        with self._lanes.lock:
            if book.memory != self._lane.memory:
                self._lanes.on_void(book.void(self._lane.memory))
            self._lane.posted += [message for memory, message in self._lanes.posted if memory == book.memory]
            self._lanes.posted.clear()
            if len(book.forgotten) >= _FORGET_AT_ONCE or (book.forgotten and book.is_urgent):
                self._lane.posted.append(p.Forget(book.forget_remotely()))

    def remote(self, file: CachedInode) -> int:
        """A file's node on the server, while ``ask`` prepares. Raises OSError: ESTALE if it is gone."""
        if file is self._lanes.book.root:
            return self._lane.root
        if file.memory != self._lane.memory:
            self._find_again(file)
        self._used.append(file)
        return file.remote

    def _find_again(self, file: CachedInode) -> None:
        with self._lanes.lock:
            path = self._lanes.book.path(file)
        try:
            found = self.exchange(p.Walk(self._lane.root, path), p.FoundIs)
        except SlotLost:
            raise SlotLost(in_doubt=False) from None
        except OSError as error:
            if error.errno in _GONE:
                raise os_error(errno.ESTALE) from None
            raise
        if found.attributes.inode != file.inode:
            raise os_error(errno.ESTALE)
        file.remote, file.memory = found.node, self._lane.memory


now = time.monotonic
"""Seconds of the clock by which leases are counted."""

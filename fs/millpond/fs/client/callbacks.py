"""Edge (a thread): keeps up a client's lease, and gives up what the server recalls, in the kernel, too.

The lease counts from when the last answer that has certainly arrived was sent. Over its own connection the
server asks, so that what is under way on others has nothing to wait for.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.client.rpc import Dial
from millpond.fs.client.rpc_pool import now
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import WouldBlock, may_block
from millpond.fs.vfs.path_api import os_error
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

log = logging.getLogger(__name__)
_AGAIN_SECONDS = 0.5
_INSTANT = 0.001
_INSTANTS = 2000  # that a kernel may take to make what it has just been told its own


class KernelCache(Protocol):
    """A kernel that keeps what it is told."""

    def drop_names(self) -> None:
        """Ask for every name again. Never waits."""

    def drop(self, node: int, *, data: bool) -> bool:
        """Ask for a node's attributes again, and for its data; waits for reads under way. False if it does
        not know the node.
        """


class CallbackChannel:
    """Of one ``tree``, whose server ``dial`` reaches; ``cache`` goes by what it is told, too."""

    def __init__(self, tree: RemoteFs, dial: Dial, cache: KernelCache, timeout: float) -> None:
        self._tree, self._dial, self._cache, self._timeout = tree, dial, cache, timeout
        self._book = tree.lanes.book
        self._moved = threading.Condition(tree.lanes.lock)
        self._stopped = threading.Event()
        self._channel: Channel | None = None
        self._voided: dict[int, CachedInode] = {}
        self._thread = threading.Thread(target=self._run, name="recalls", daemon=True)
        self._soon: queue.SimpleQueue[CachedInode | None] = queue.SimpleQueue()
        self._dropping = threading.Thread(target=self._drop_all, name="drops", daemon=True)
        tree.lanes.on_void = self._void

    def start(self) -> None:
        """From now on what the server grants is kept."""
        self._tree.keeper = self
        self._tree.naming.on_lost = functools.partial(self._quietly, self._cache.drop_names)
        self._thread.start()
        self._dropping.start()
        with self._moved:
            self._moved.wait_for(lambda: self._book.lease_end > now(), self._timeout)

    def stop(self) -> None:
        """Nothing is kept any more, in this process: the mount has gone."""
        self._tree.naming.close()
        self._stopped.set()
        with self._moved:
            self._book.void(self._book.memory)
            channel = self._channel
        if channel:
            channel.shut_down()
        self._thread.join()
        self._soon.put(None)
        self._dropping.join()

    def await_lease(self, file: CachedInode) -> None:
        """Return once there is a lease, or the file is recalled."""
        if not may_block.get():
            raise WouldBlock
        with self._moved:
            if not self._moved.wait_for(
                lambda: file.recalling > 0 or self._book.lease_end > now(), self._timeout
            ):
                raise os_error(errno.ETIMEDOUT)

    def drop_soon(self, file: CachedInode) -> None:
        """Have dropped what is about to be told of a file; with the lock."""
        file.recalling += 1
        self._soon.put(file)

    def _drop_all(self) -> None:
        while file := self._soon.get():
            self._drop_one(file)

    def _void(self, files: Sequence[CachedInode]) -> None:
        """With the lock: nothing counts any more; what the kernel keeps is dropped by the thread."""
        for file in files:
            if file.node not in self._voided:
                file.recalling += 1
                self._voided[file.node] = file
        self._moved.notify_all()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._tree.statfs()  # so that the server knows this client
                self._drop_voided()
                self._attend()
            except (MillpondError, OSError) as error:
                log.debug("the server cannot recall anything: %s", error)
            self._drop_voided()
            self._stopped.wait(_AGAIN_SECONDS)

    def _attend(self) -> None:
        """Answer the server until the connection or the lease ends: by then nothing is kept any more."""
        deadline = Deadline.after(self._timeout)
        with contextlib.closing(self._dial(deadline)) as channel:
            self._channel = channel
            try:
                self._converse(channel, deadline)
            finally:
                with self._moved:
                    self._void(self._book.void(self._book.memory))
                self._drop_voided()
                self._tell_names()  # the server hears them, if nobody has missed them, until this is closed

    def _converse(self, channel: Channel, deadline: Deadline) -> None:
        sent, seconds = now(), self._tree.lanes.lease
        channel.send(p.Attend(self._tree.lanes.client), deadline)
        heard = _heard(channel, deadline)
        if isinstance(heard, p.Recall):
            with self._moved:
                self._book.begin_lease(heard.upto)
        while isinstance(heard, p.Recall) and sent + seconds > now() and not self._stopped.is_set():
            with self._moved:
                self._book.lease_end = sent + seconds
                self._moved.notify_all()
            still_open = self._give_up(heard)
            self._tree.lanes.flush()
            answered = now()
            try:
                channel.send(p.Recalled(tuple(f.inode for f in still_open)), Deadline.after(seconds))
                heard = _heard(channel, Deadline.after(sent + seconds - now()))
            finally:
                self._tree.named_open(still_open)
            sent = answered

    def _give_up(self, recall: p.Recall) -> list[CachedInode]:
        """Those that are open and the server does not know of."""
        if not recall.inodes:
            return []
        with self._moved:
            files = self._book.recall(recall.inodes, recall.upto)
            for file in files:
                file.recalling += 1
            self._moved.notify_all()
        self._tell_names()
        self._drop(files)
        with self._moved:
            return [file for file in files if file.opens]

    def _tell_names(self) -> None:
        """Those that were made without a word to the server."""
        with contextlib.suppress(OSError):  # they are told later, or lost when others look after the lease
            self._tree.naming.settle()

    def _drop_voided(self) -> None:
        """What is no longer covered by a lease."""
        with self._moved:
            files = list(self._voided.values())
            self._voided.clear()
        self._drop(files)

    def _drop(self, files: Iterable[CachedInode]) -> None:
        """From the kernel; the names first, for that needs no waiting."""
        files = list(files)
        if files:
            self._quietly(self._cache.drop_names)
        for file in files:
            self._drop_one(file)

    def _drop_one(self, file: CachedInode) -> None:
        """Until nothing is left that was read meanwhile."""
        while True:
            with self._moved:
                file.uncovered, data = False, file.has_data
            self._quietly(functools.partial(self._drop_known, file, data))
            with self._moved:
                if not file.uncovered:
                    file.recalling -= 1
                    if not file.recalling:
                        file.has_data = False
                    return

    def _drop_known(self, file: CachedInode, data: bool) -> None:
        """A kernel that has just been told of the file may not have made it its own yet."""
        for _ in range(_INSTANTS):
            if self._cache.drop(file.node, data=data) or file.seen or not file.lookups:
                return
            time.sleep(_INSTANT)

    def _quietly(self, do: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):  # the mount has gone
            do()


def _heard(channel: Channel, deadline: Deadline) -> Message:
    """What the server says, with nothing behind it."""
    head = channel.receive(deadline)
    channel.receive_payload(0, deadline)
    return head.message

# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): renews the client's lease and answers the server's recalls, also towards the kernel's
cache.

The lease counts from the moment at which the last answer that certainly arrived was sent. A client that hears
nothing for most of it drops everything in the rest: what programs have mapped is read without a request until
the kernel has dropped it. Recalls come over a connection of their own (NFSv4.1's backchannel), so that
requests under way on session slots cannot delay them.
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

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.connection import Dial
from millpond.fs.client.recalled_files import RecalledFiles
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.client.session import now
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import KernelCache, KnownFile
from millpond.fs.vfs.kernel_memory import KernelMemory
from millpond.fs.vfs.operation import about_to_wait, woken_by
from millpond.fs.vfs.path_api import os_error
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

log = logging.getLogger(__name__)
MOST_KNOWN = 131_072
"""The files from which on the kernel is told to forget those that it does not use."""
_AGAIN_SECONDS = 0.5
_SILENT_SHARE = 0.75  # of the lease: the server calls four times per lease
_FLUSH_SHARE = 0.2  # of the lease: a slow flash delays no answer for longer
_LISTING_SECONDS = 2.0
_INSTANT = 0.001
_INSTANTS = 2000  # tries until the kernel has taken over a node from a reply that was just sent


class CallbackChannel:
    """The backchannel of one client: serves recalls for ``tree`` over what ``dial`` connects, and invalidates
    ``cache``.

    ``timeout`` is in seconds, for the connection and for waiting for a lease.
    """

    def __init__(self, tree: RemoteFs, dial: Dial, cache: KernelCache, timeout: float) -> None:
        self._tree, self._dial, self._cache, self._timeout = tree, dial, cache, timeout
        self._inodes = tree.session.inodes
        self._changed = threading.Condition(tree.session.lock)
        self._stopped = threading.Event()
        self._channel: Channel | None = None
        self._invalidated: dict[int, CachedInode] = {}
        self.memory = KernelMemory(MOST_KNOWN, lambda: self._inodes.count, self._least_needed)
        self.memory.start(cache)
        self._recalled = RecalledFiles(self._inodes, tree.session.lock, cache)
        self._thread = threading.Thread(target=self._run, name="recalls", daemon=True)
        self._drop_queue: queue.SimpleQueue[CachedInode | None] = queue.SimpleQueue()
        self._drop_thread = threading.Thread(target=self._drop_all, name="drops", daemon=True)

    def start(self) -> None:
        """Start the threads and wait for the first lease; from then on the client caches what the server
        grants.
        """
        self._tree.attend(self)
        self._recalled.start()
        self._thread.start()
        self._drop_thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._inodes.lease_end > now(), self._timeout)

    def stop(self) -> None:
        """Stop the threads and cache nothing any more: the mount has gone."""
        self._tree.write_behind.close()
        self._stopped.set()
        with self._changed:
            self._inodes.invalidate_all(self._inodes.verifier)
            channel = self._channel
        if channel:
            channel.shut_down()
        self._recalled.stop()
        self._thread.join()
        self._drop_queue.put(None)
        self._drop_thread.join()

    def await_lease(self, file: CachedInode) -> None:
        """Return once the lease is valid or the file is being recalled. Raises OSError."""
        about_to_wait()
        with woken_by(self._look_again) as operation, self._changed:
            if not self._changed.wait_for(
                lambda: operation.is_interrupted or file.recalling > 0 or self._inodes.lease_end > now(),
                self._timeout,
            ):
                raise os_error(errno.ETIMEDOUT)
            if operation.is_interrupted:
                raise os_error(errno.EINTR)

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def drop_soon(self, file: CachedInode) -> None:
        """With the lock: queue a file for invalidation whose data is about to be returned to the kernel
        without a grant, or was lost.
        """
        file.recalling += 1
        self._drop_queue.put(file)

    def _drop_all(self) -> None:
        while file := self._drop_queue.get():
            self._drop_one(file)

    def invalidated(self, files: Sequence[CachedInode]) -> None:
        """With the lock: queue files for invalidation in the kernel, since no grant of them is valid any
        more.
        """
        for file in files:
            if file.node not in self._invalidated:
                file.recalling += 1
                self._invalidated[file.node] = file
        self._changed.notify_all()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._tree.statfs()  # opens a session, if the server has none
                self._tree.write_behind.flush_all()
                self._tree.files.reclaim()
                self._drop_invalidated()
                self._serve_recalls()
            except (MillpondError, OSError) as error:
                log.debug("no callback channel to the server: %s", error)
            self._drop_invalidated()
            self._stopped.wait(_AGAIN_SECONDS)

    def _serve_recalls(self) -> None:
        """Answer recalls until the connection, or most of the lease, is over; then invalidate everything."""
        deadline = Deadline.after(self._timeout)
        with contextlib.closing(self._dial(deadline)) as channel:
            self._channel = channel
            try:
                self._answer_recalls(channel, deadline)
            finally:
                with self._changed:
                    self.invalidated(self._inodes.invalidate_all(self._inodes.verifier))
                self._drop_invalidated()
                with contextlib.suppress(OSError):  # sent later
                    self._tree.write_behind.flush_all()

    def _answer_recalls(self, channel: Channel, deadline: Deadline) -> None:
        sent, seconds = now(), self._tree.session.welcome.lease
        silent = _SILENT_SHARE * seconds
        channel.send(p.Attend(self._tree.session.client), deadline)
        heard = _receive(channel, deadline)
        if isinstance(heard, p.Recall):
            with self._changed:
                self._inodes.begin_lease(heard.upto)
            threading.Thread(target=self._restore_locks, args=(channel,), name="reclaim", daemon=True).start()
        while isinstance(heard, p.Recall) and sent + silent > now() and not self._stopped.is_set():
            with self._changed:
                self._inodes.lease_end = sent + seconds
                self._changed.notify_all()
            still_open = self._recall(heard, Deadline(sent + silent))
            self.memory.check(self._inodes.count)
            self._tree.session.flush(limit=_FLUSH_SHARE * seconds)
            answered = now()
            try:
                channel.send(p.Recalled(tuple(f.inode for f in still_open)), Deadline.after(seconds))
                heard = _receive(channel, Deadline.after(sent + silent - now()))
            finally:
                self._tree.files.mark_reported_open(still_open)
            sent = answered

    def _restore_locks(self, channel: Channel) -> None:
        """Reclaim file locks, which may wait for other hosts; if it fails, with the next lease."""
        try:
            self._tree.locks.restore()
        except OSError:
            channel.shut_down()

    def _recall(self, recall: p.Recall, deadline: Deadline) -> list[CachedInode]:
        """Give up the recalled inodes; return the files with local opens that the server does not know of.
        Raises OSError if gathered data is not sent by the deadline: after an answer, others could change the
        file, and it would overwrite that.
        """
        if not recall.inodes:
            return []
        with self._changed:
            known = [file for inode in recall.inodes if (file := self._inodes.by_inode(inode))]
            forgettable = self._recalled.forgettable(known)
            files = self._inodes.recall(recall.inodes, recall.upto)
            for file in files:
                file.recalling += 1
            self._changed.notify_all()
        try:
            for file in files:
                self._tree.write_behind.flush(file, deadline)
        except OSError:
            self._tree.write_behind.end_lease()
            raise
        finally:
            self._drop(files)
        with self._changed:
            self._recalled.forget(forgettable)
            return [file for file in files if file.local_opens]

    def _least_needed(self) -> list[KnownFile]:
        is_open = self._tree.files.nodes()
        with self._changed:
            return [file for file in self._inodes.least_needed() if file[0] not in is_open]

    def _drop_invalidated(self) -> None:
        """Invalidate in the kernel all files that no lease covers any more."""
        with self._changed:
            files = list(self._invalidated.values())
            self._invalidated.clear()
        self._drop(files)

    def _drop(self, files: Iterable[CachedInode]) -> None:
        """Invalidate files in the kernel: the names first, since that needs no waiting, then open files,
        which may be mapped, then the others that the kernel has data of.
        """
        files = list(files)
        if files:
            self._unless_unmounted(self._cache.drop_names)
            self._await_listings([file for file in files if file.in_listing])
        is_open = self._tree.files.nodes()
        for file in sorted(files, key=lambda file: (file.node not in is_open, not file.has_data)):
            self._drop_one(file)

    def _await_listings(self, directories: Sequence[CachedInode]) -> None:
        """Wait until the kernel has taken over the names that it was told of with listings of these
        directories, and invalidate them, too: it has counted them as new. What it waits for may itself wait
        for this recall: after a while the names are taken for taken over.
        """
        if not directories:
            return

        def wait() -> None:
            for directory in directories:
                directory.in_listing = False
                self._cache.await_listings(directory.node)

        waiting = threading.Thread(target=wait, name="listings", daemon=True)
        waiting.start()
        waiting.join(_LISTING_SECONDS)
        self._unless_unmounted(self._cache.drop_names)

    def _drop_one(self, file: CachedInode) -> None:
        """Invalidate one file, again and again until no data was read into the kernel meanwhile."""
        while True:
            with self._changed:
                file.ungranted_read, data = False, file.has_data
            self._unless_unmounted(functools.partial(self._drop_known, file, data))
            with self._changed:
                if not file.ungranted_read:
                    file.recalling -= 1
                    if not file.recalling:
                        file.has_data = False
                    return

    def _drop_known(self, file: CachedInode, data: bool) -> None:
        """Invalidate one file, waiting a little for a kernel that has just received its node but not used it
        yet.
        """
        for _ in range(_INSTANTS):
            if self._cache.drop(file.node, data=data) or file.seen or not file.lookups:
                return
            time.sleep(_INSTANT)

    def _unless_unmounted(self, do: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):  # the mount has gone
            do()


def _receive(channel: Channel, deadline: Deadline) -> Message:
    """Receive the server's next message; a payload behind it is an error."""
    head = channel.receive(deadline)
    channel.receive_payload(0, deadline)
    return head.message

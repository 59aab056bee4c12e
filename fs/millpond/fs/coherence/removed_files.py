# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): has the kernel of the device's mount forget files whose last name a host has removed.

A file keeps its blocks for as long as the mount has a descriptor of it, which is until the kernel forgets it:
of itself only when the machine is short of memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.fs.proto import delegations as m
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import ROOT, KernelCache, KnownFile, Node
from millpond.linux.sockets import connect
from millpond.wire.channel import Channel

_INSTANT, _INSTANTS = 0.001, 100  # until the kernel has forgotten what it does not use
_AGAIN_SECONDS = 1.0  # until files that programs have open are tried again
_CONNECT_SECONDS, _PAUSE = 0.25, 0.2
_SILENT_SECONDS = 10.0  # the manager says something more often
_JOIN_SECONDS = 5.0
_DELETED = b" (deleted)"  # what the kernel adds to the path of a file without a name


class RemovedFiles:
    """The files of ``tree`` that have no name any more and that the kernel has not forgotten. The manager
    whose socket is at ``path`` tells of those that hosts have removed. Threads may call at once.
    """

    def __init__(self, tree: BackingFs, path: Path) -> None:
        self._tree, self._path = tree, path
        self._asked: set[int] = set()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._channel: Channel | None = None
        self._threads: list[threading.Thread] = []

    def start(self, kernel: KernelCache) -> None:
        """Begin, with the kernel of a mount that is up."""
        for target, name in ((lambda: self._run(kernel), "removed files"), (self._listen, "removals")):
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """End: the mount has gone."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            if self._channel:
                self._channel.shut_down()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _listen(self) -> None:
        """Look at what the manager tells of, also after it was started again."""
        while True:
            with contextlib.suppress(MillpondError, OSError), self._connected() as channel:
                while True:
                    removed = channel.expect(m.NamesRemoved, Deadline.after(_SILENT_SECONDS))
                    self.look(removed.inodes)
            with self._changed:
                if self._changed.wait_for(lambda: self._is_stopped, _PAUSE):
                    return

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Channel]:
        with Channel(connect(self._path, _CONNECT_SECONDS), "the delegation manager") as channel:
            with self._changed:
                self._channel = channel
                if self._is_stopped:
                    channel.shut_down()
            channel.send(m.WatchRemovals(), Deadline.after(_CONNECT_SECONDS))
            yield channel

    def look(self, inodes: Collection[int]) -> None:
        """Look at files of which names may have been removed, at all with ALL_KNOWN. Never waits."""
        with self._changed:
            self._asked.update(inodes)
            self._changed.notify_all()

    def _run(self, kernel: KernelCache) -> None:
        left: set[Node] = set()
        while True:
            with self._changed:
                seconds = _AGAIN_SECONDS if left else None
                self._changed.wait_for(lambda: self._asked or self._is_stopped, seconds)
                asked, self._asked = self._asked, set()
            if self._is_stopped:
                return
            left = self._forget(
                kernel, left.union(self._tree.nodes_of(None if m.ALL_KNOWN in asked else asked))
            )

    def _forget(self, kernel: KernelCache, nodes: Iterable[Node]) -> set[Node]:
        """Have the kernel forget those of the nodes that have no name. Returns those that it uses. This
        thread closes the files, and not one that serves programs: it takes as long as to free the blocks.
        """
        with contextlib.ExitStack() as kept:
            unnamed = {node for node in nodes if self._is_unnamed(node, kept)}
            if unnamed:
                kernel.prune([self._place(kernel, node) for node in unnamed])
            for _ in range(_INSTANTS):
                unnamed = {node for node in unnamed if self._tree.knows(node)}
                if not unnamed:
                    break
                time.sleep(_INSTANT)
        return unnamed

    def _is_unnamed(self, node: Node, kept: contextlib.ExitStack) -> bool:
        """Return whether a file has no name; then its descriptor stays open as long as ``kept``."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as using:  # forgotten meanwhile
            if not os.fstat(using.enter_context(self._tree.pinned(node))).st_nlink:
                kept.push(using.pop_all())
                return True
        return False

    def _place(self, kernel: KernelCache, node: Node) -> KnownFile:
        """Return the directory and the name that a file had last; others if the kernel does not need them,
        or they are not known.
        """
        if not kernel.prunes:
            with contextlib.suppress(OSError):
                path = os.fsencode(self._tree.path_of(node)).removesuffix(_DELETED)
                *names, name = path.split(b"/")
                directory = self._tree.walk(ROOT, names).node
                self._tree.forget(directory, 1)
                return node, directory, name
        return node, ROOT, b"/"

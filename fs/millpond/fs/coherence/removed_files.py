# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): has the kernel of the device's mount forget files whose last name a host has removed.

A file keeps its blocks for as long as the mount has a descriptor of it, which is until the kernel forgets it:
of itself only when the machine is short of memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable

from millpond.fs.coherence.shared_bitmap import SharedBitmapView
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import ROOT, KernelCache, KnownFile, Node

_INSTANT, _INSTANTS = 0.001, 100  # until the kernel has forgotten what it does not use
_LOOK_SECONDS = 0.25
_AGAIN_TURNS = 4  # until files that programs have open are tried again
_JOIN_SECONDS = 5.0
_DELETED = b" (deleted)"  # what the kernel adds to the path of a file without a name


class RemovedFiles:
    """The files of ``tree`` that have no name any more and that the kernel has not forgotten. ``bitmap``
    returns the delegation manager's, which shows those that hosts have removed; of a manager that was started
    again all files are looked at.
    """

    def __init__(self, tree: BackingFs, bitmap: Callable[[], SharedBitmapView | None]) -> None:
        self._tree, self._bitmap = tree, bitmap
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, kernel: KernelCache) -> None:
        """Begin, with the kernel of a mount that is up."""
        self._thread = threading.Thread(target=self._run, args=(kernel,), name="removed files", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End: the mount has gone."""
        self._stopped.set()
        if self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _run(self, kernel: KernelCache) -> None:
        known: SharedBitmapView | None = None
        seen, left = 0, set[Node]()
        for turn in itertools.count():
            if self._stopped.wait(_LOOK_SECONDS):
                return
            inodes: set[int] | None = set()
            if bitmap := self._bitmap():
                is_new, known = bitmap is not known, bitmap
                seen, inodes = bitmap.removals(0 if is_new else seen)
                inodes = None if is_new else inodes
            if inodes is None or inodes or (left and turn % _AGAIN_TURNS == 0):
                left = self._forget(kernel, left.union(self._tree.nodes_of(inodes)))

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

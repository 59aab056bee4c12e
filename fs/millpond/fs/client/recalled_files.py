# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): has a host's kernel, and then the server, forget files whose delegation was recalled.

Somebody else has changed such a file, and may have removed it: the server has it open, and it takes its room
on the flash, until it is forgotten. To use a file that was only changed costs a lookup, as its name is not
cached any more.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterable

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.inodes import InodeCache
from millpond.fs.vfs.inode_api import KernelCache, KnownFile

_AGAIN_SECONDS = 1.0  # until files that the kernel uses are tried again


class RecalledFiles:
    """The files of ``inodes``, guarded by ``lock``, that were recalled and not granted or forgotten since."""

    def __init__(self, inodes: InodeCache, lock: threading.Lock, kernel: KernelCache) -> None:
        self._inodes, self._kernel = inodes, kernel
        self._changed = threading.Condition(lock)
        self._files: dict[int, CachedInode] = {}
        self._is_new = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="recalled files", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; a kernel that holds it up is not waited for."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def forgettable(self, files: Iterable[CachedInode]) -> list[CachedInode]:
        """Return those of the files that the kernel can be told to forget, before they are recalled. A kernel
        that finds them by name would cut off programs that are in a directory.
        """
        if self._kernel.prunes:
            return [file for file in files if file is not self._inodes.root]
        return [file for file in files if file.attributes and not stat.S_ISDIR(file.attributes.mode)]

    def forget(self, files: Iterable[CachedInode]) -> None:
        """With the lock: begin to forget recalled files. Never waits."""
        self._files.update((file.node, file) for file in files)
        self._is_new = True
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                seconds = _AGAIN_SECONDS if self._files else None
                self._changed.wait_for(lambda: self._is_new or self._is_stopped, seconds)
                if self._is_stopped:
                    return
                self._is_new = False
                used = self._still_used()
            if used:
                self._kernel.prune(used)

    def _still_used(self) -> list[KnownFile]:
        """With the lock: drop what is granted or forgotten; return what the kernel knows."""
        for node, file in list(self._files.items()):
            if file.granted or self._inodes.evict(file):
                del self._files[node]
        return [
            (file.node, file.parent, file.name) for file in self._files.values() if file.parent is not None
        ]

# SPDX-License-Identifier: Apache-2.0
"""Edge: file locks as locks of the flash's files: open file description locks and flock(2).

Each process that serves a volume, to hosts or to programs of the device, opens a locked file once for each
owner. So the kernel's lock table is the only one, and locks end with the process that took them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.lock_types import OFFSET_MAX, Family, HeldLocks, Lock, Mode, Place
from millpond.fs.vfs.path_api import Handle, os_error

if TYPE_CHECKING:
    from millpond.fs.store.backing_fs import BackingFs

_FLOCK = struct.Struct("hhqqi4x")
_KINDS = {Mode.READ: fcntl.F_RDLCK, Mode.WRITE: fcntl.F_WRLCK, Mode.UNLOCK: fcntl.F_UNLCK}
_FLOCKS = {Mode.READ: fcntl.LOCK_SH, Mode.WRITE: fcntl.LOCK_EX, Mode.UNLOCK: fcntl.LOCK_UN}
_FLAGS = {
    (Family.FLOCK, Mode.READ): (os.O_RDONLY, os.O_WRONLY),
    (Family.FLOCK, Mode.WRITE): (os.O_RDONLY, os.O_WRONLY),
    (Family.POSIX, Mode.READ): (os.O_RDWR, os.O_RDONLY),
    (Family.POSIX, Mode.WRITE): (os.O_RDWR, os.O_WRONLY),
}
_MAX_FILES, _MAX_LOCKS = 1024, 4096
_SHARES = 8  # of the descriptors, of which one host's locks take one at most


class FileLocks:
    """Locking over the files of a backing directory, for the owners of one mount or of one host. ``before``
    is called before a lock is taken; ``confirm`` returns afterwards whether it may be kept, or was perhaps
    released by a process that has died, whose successor is to have it again. At most so many files and ranges
    are locked, so that no host can take all descriptors. Threads may call at once.
    """

    def __init__(
        self,
        tree: BackingFs,
        before: Callable[[], None] = lambda: None,
        confirm: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tree, self._before, self._confirm = tree, before, confirm
        self._lock = threading.Lock()
        self._open: dict[tuple[int, Family, int], Handle] = {}
        self._held = HeldLocks()

    def close(self) -> None:
        """Release all locks."""
        with self._lock:
            while self._open:
                self._tree.release(self._open.popitem()[1])
            self._held = HeldLocks()

    def first_conflict(self, node: Node, lock: Lock) -> Lock | None:
        """Return a POSIX lock that conflicts, None if there is none."""
        if lock.mode is Mode.UNLOCK:
            raise os_error(errno.EINVAL)
        inode = self._tree.inode(node)
        with self._lock:
            handle = self._open.get((inode, Family.POSIX, lock.owner))
            asked = self._tree.open(node, os.O_RDONLY) if handle is None else handle
            try:
                answer = fcntl.fcntl(self._tree.descriptor(asked), fcntl.F_OFD_GETLK, _packed(lock))
            finally:
                if handle is None:
                    self._tree.release(asked)
            kind, _, start, length, _ = _FLOCK.unpack(answer)
            if kind == fcntl.F_UNLCK:
                return None
            end = start + length - 1 if length else OFFSET_MAX
            pid = self._held.pid((inode, Family.POSIX), start, end)
            return Lock(0, Mode.WRITE if kind == fcntl.F_WRLCK else Mode.READ, start, end, pid)

    def lock(self, node: Node, family: Family, lock: Lock) -> int:
        """Lock or unlock. Returns 0, or an errno: EAGAIN if others hold a lock that conflicts."""
        if lock.mode is not Mode.UNLOCK:
            self._before()
        place = self._tree.inode(node), family
        with self._lock:
            is_first = not self._held.of(place, lock.owner)
            try:
                self._set(node, place, lock)
                if is_first and lock.mode is not Mode.UNLOCK and not self._confirm():
                    self._held.put(place, lock.owner, [])
                    return errno.EAGAIN
            except OSError as error:
                if family is Family.FLOCK:  # flock(2): changing the mode loses the lock
                    self._held.put(place, lock.owner, [])
                return error.errno or errno.EIO
            finally:
                if not self._held.of(place, lock.owner):
                    self._close(place, lock.owner)
            return 0

    def _set(self, node: Node, place: Place, lock: Lock) -> None:
        file = (*place, lock.owner)
        if file not in self._open:
            if lock.mode is Mode.UNLOCK:
                return
            if len(self._open) >= min(_MAX_FILES, self._tree.max_descriptors // _SHARES):
                raise os_error(errno.ENOLCK)
            self._open[file] = self._opened(node, place[1], lock.mode)
        if lock.mode is not Mode.UNLOCK and len(self._held) >= _MAX_LOCKS:
            raise os_error(errno.ENOLCK)
        descriptor = self._tree.descriptor(self._open[file])
        if place[1] is Family.FLOCK:
            fcntl.flock(descriptor, _FLOCKS[lock.mode] | fcntl.LOCK_NB)
        else:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _packed(lock))
        self._held.add(place, lock)

    def _opened(self, node: Node, family: Family, mode: Mode) -> Handle:
        """Open a file as the lock needs it; for both, if possible: its owner may ask for the other next."""
        for flags in _FLAGS[family, mode]:
            try:
                return self._tree.open(node, flags)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EROFS, errno.ETXTBSY):
                    raise
                failure = error
        raise failure

    def _close(self, place: Place, owner: int) -> None:
        handle = self._open.pop((*place, owner), None)
        if handle is not None:
            self._tree.release(handle)

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Release all locks of this owner."""
        if self._open:
            self.release_file(self._tree.inode(node), family, owner)

    def release_file(self, inode: int, family: Family, owner: int) -> None:
        """Release all locks of this owner of the file with this number."""
        with self._lock:
            self._held.put((inode, family), owner, [])
            self._close((inode, family), owner)

    def require(self, node: Node) -> None:
        """Return: no lock is lost while this process lives."""


def _packed(lock: Lock) -> bytes:
    length = 0 if lock.end == OFFSET_MAX else lock.end - lock.start + 1
    return _FLOCK.pack(_KINDS[lock.mode], os.SEEK_SET, lock.start, length, 0)

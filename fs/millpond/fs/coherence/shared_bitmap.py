# SPDX-License-Identifier: Apache-2.0
"""Edge (memory that processes share): marks of inodes, which another process looks at without a message.

The delegation manager marks a new file before its host gathers writes to it. Several inodes share a slot,
which counts them: a counting Bloom filter with one hash. Behind the slots are the inodes of which hosts may
have removed names, in a ring.

The manager's process is confined and may be taken over, the mount's is root: the memory is sealed at its
size, or a page that is truncated away would end the mount (SIGBUS), and nobody but its owner can write to it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Iterable
from typing import Final

from millpond.fs.vfs.path_api import os_error

_SLOTS: Final = 4096
_RECENT: Final = 1024  # removals that the ring holds
_SIZE: Final = 4 * _SLOTS + 8 * (1 + _RECENT)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE: all but the mapping that is there can only read


def _parts(memory: mmap.mmap | bytearray) -> tuple[memoryview, memoryview]:
    """Return the slots, and the number of removals with the ring behind it."""
    view = memoryview(memory)
    return view[: 4 * _SLOTS].cast("I"), view[4 * _SLOTS : _SIZE].cast("Q")


class SharedBitmap:
    """The end that marks: a count in each slot. One thread may call at once."""

    def __init__(self) -> None:
        self._view, self._removed = _parts(bytearray(_SIZE))
        self._descriptor = -1

    def descriptor(self) -> int:
        """Return the memfd of the slots, to be passed on; it stays open here. Raises OSError."""
        if self._descriptor < 0:
            descriptor = os.memfd_create("millpond-bitmap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, _SIZE)
                view, removed = _parts(mmap.mmap(descriptor, _SIZE))
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | _FUTURE_WRITE)
            except OSError:
                os.close(descriptor)
                raise
            view[:], removed[:] = self._view, self._removed
            self._view, self._removed, self._descriptor = view, removed, descriptor
        return self._descriptor

    def add(self, inode: int) -> None:
        """Mark an inode."""
        self._view[inode % _SLOTS] += 1

    def remove(self, inode: int) -> None:
        """Take one mark of an inode away."""
        self._view[inode % _SLOTS] -= 1

    def add_all(self) -> None:
        """Mark all inodes."""
        for slot in range(_SLOTS):
            self.add(slot)

    def remove_all(self) -> None:
        """Take one mark of each inode away."""
        for slot in range(_SLOTS):
            self.remove(slot)

    def note_removals(self, inodes: Iterable[int]) -> None:
        """Note that names of these files may have been removed."""
        for inode in inodes:
            count = self._removed[0]
            self._removed[1 + count % _RECENT] = inode
            self._removed[0] = count + 1

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class SharedBitmapView:
    """The end that looks: a read-only view. Closes ``descriptor``. Raises OSError: EPROTO for memory that is
    too small, or not sealed at its size.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            if not _is_sealed(descriptor) or os.fstat(descriptor).st_size < _SIZE:
                raise os_error(errno.EPROTO)
            self._view, self._removed = _parts(mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def has(self, inode: int) -> bool:
        """Return whether this inode, or one that shares its slot, is marked."""
        return self._view[inode % _SLOTS] > 0

    def removals(self, seen: int) -> tuple[int, set[int] | None]:
        """Return the number of removals, and the inodes of those behind the first ``seen``; None if some of
        them are not known any more.
        """
        count, ring = self._removed[0], self._removed
        inodes = {ring[1 + number % _RECENT] for number in range(max(seen, count - _RECENT), count)}
        return count, inodes if self._removed[0] - seen <= _RECENT else None


def send_bitmap(sock: socket.socket, bitmap: SharedBitmap) -> None:
    """Send one byte, and with it the bitmap's memory, over a Unix socket. Raises OSError."""
    socket.send_fds(sock, [b"m"], [bitmap.descriptor()])


def receive_bitmap(sock: socket.socket, seconds: float) -> SharedBitmapView:
    """Receive what ``send_bitmap`` sends, in ``seconds`` at most. Raises OSError."""
    sock.settimeout(seconds)
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    if not descriptors:
        raise os_error(errno.EPROTO)
    os.set_inheritable(descriptors[0], False)
    return SharedBitmapView(descriptors[0])


def _is_sealed(descriptor: int) -> bool:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # EINVAL: not a memfd
        return False

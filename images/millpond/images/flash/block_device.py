# SPDX-License-Identifier: Apache-2.0
"""Edge (a block device or a file): what an image is written to, and read back from."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from millpond.images.format.manifest import BLOCK, EDGE, MAX_RANGE

_BLKRRPART = 0x125F
_BLKFLSBUF = 0x1261
_BLKDISCARD = 0x1277
_DISCARD_BYTES = 1 << 30  # at once, so that Ctrl-C is heard in between
_REREAD_TRIES = 10
_REREAD_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """A target as it is shown before it is overwritten; ``new`` if it did not exist.

    ``names`` tells the disk from its like, such as ``serial S4XN``; ``proof`` is the end of its
    serial number. ``alike`` counts the disks of its model and size, itself included.
    """

    bytes: int
    model: str = ""
    contents: tuple[str, ...] = ()
    new: bool = False
    names: tuple[str, ...] = ()
    proof: str = ""
    alike: int = 1


class BlockMedium:
    """A block device that this process has opened exclusively. Raises OSError."""

    def __init__(self, path: Path, descriptor: int, about: TargetDescription) -> None:
        self.path, self.about, self.size = path, about, about.bytes
        self.descriptor = descriptor
        self._direct: int | None = None
        self._buffer = mmap.mmap(-1, MAX_RANGE)  # aligned, as O_DIRECT wants it

    def wipe(self) -> None:
        """Take away every partition table, and then all else if that is quick."""
        ends = min(EDGE, self.size)
        self.write(bytes(BLOCK), 0)  # without it there is no table, in whatever order the rest goes
        self.sync()
        self.write(bytes(ends), 0)
        self.write(bytes(ends), self.size - ends)
        self.sync()
        self._discard(EDGE, self.size - EDGE)

    def _discard(self, start: int, end: int) -> None:
        with contextlib.suppress(OSError):  # most disks can't; nothing depends on it
            while start < end:
                length = min(end - start, _DISCARD_BYTES)
                fcntl.ioctl(self.descriptor, _BLKDISCARD, struct.pack("=QQ", start, length))
                start += length

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data``."""
        left = memoryview(data)
        while left:
            count = os.pwrite(self.descriptor, left, offset)
            left, offset = left[count:], offset + count

    def sync(self) -> None:
        """Return when all written data is on the medium."""
        os.fsync(self.descriptor)

    def settle(self) -> None:
        """Sync, and drop caches, so that later reads come from the medium."""
        self.sync()
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with contextlib.suppress(OSError):  # no disk, or not root; O_DIRECT does without
            fcntl.ioctl(self.descriptor, _BLKFLSBUF)
        self._close_direct()
        with contextlib.suppress(OSError):  # a file system that has no such thing
            way = f"/proc/self/fd/{self.descriptor}"
            self._direct = os.open(way, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)

    def read(self, length: int, offset: int) -> memoryview:
        """Return ``length`` bytes at ``offset``, fewer at the end, valid until the next call. Both are
        multiples of 4096.
        """
        done = 0
        while done < length:
            count = self._read_once(memoryview(self._buffer)[done:length], offset + done)
            if not count:
                break
            done += count
        return memoryview(self._buffer)[:done]

    def _read_once(self, into: memoryview, offset: int) -> int:
        if self._direct is not None:
            try:
                return os.preadv(self._direct, [into], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._close_direct()  # wants another alignment
        return os.preadv(self.descriptor, [into], offset)

    def finish(self) -> bool:
        """Have the kernel look at the new partition table. False if it goes on with the old one."""
        for _ in range(_REREAD_TRIES):
            try:
                fcntl.ioctl(self.descriptor, _BLKRRPART)
            except OSError as error:
                if error.errno != errno.EBUSY:  # EINVAL: a device that has no partitions
                    return error.errno == errno.EINVAL
                time.sleep(_REREAD_SECONDS)  # udev looks at what has just been closed
            else:
                return True
        return False

    def close(self) -> None:
        """Close the medium."""
        self._close_direct()
        os.close(self.descriptor)

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


class FileMedium(BlockMedium):
    """A file that becomes a disk image, with holes where nothing is written.

    With ``secret`` only its owner may read it.
    """

    def __init__(
        self, path: Path, descriptor: int, about: TargetDescription, *, secret: bool = False
    ) -> None:
        super().__init__(path, descriptor, about)
        self._secret = secret

    def wipe(self) -> None:
        """Make it empty, and then as large as the disk is to be."""
        os.ftruncate(self.descriptor, 0)
        if self._secret:
            os.fchmod(self.descriptor, 0o600)
        os.ftruncate(self.descriptor, self.size)
        self.sync()

    def finish(self) -> bool:
        """Return True: no kernel keeps a partition table of a file."""
        return True

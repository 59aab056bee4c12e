# SPDX-License-Identifier: Apache-2.0
"""Edge: use a regular file or block device as the blocks of a namespace. Calls block until they are done."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from millpond.base.errors import LocalError

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_CHUNK = bytes(1 << 20)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class BackingFile:
    """A ``namespace.BlockStore`` over a file. Raises LocalError if the file cannot be used."""

    def __init__(self, path: Path, block_size: int) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LocalError(f"{path}: {error.strerror}") from None
        self.blocks = os.lseek(self._descriptor, 0, os.SEEK_END) // block_size
        if not self.blocks:
            self.close()
            raise LocalError(f"{path} is smaller than one block of {block_size} bytes")

    def read(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes. Raises OSError, also when the file was truncated."""
        found = os.pread(self._descriptor, size, offset)
        if len(found) != size:
            raise OSError(errno.EIO, "the backing file has shrunk")
        return found

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``. Raises OSError."""
        while data:
            done = os.pwrite(self._descriptor, data, offset)
            data, offset = data[done:], offset + done

    def flush(self) -> None:
        """Make all writes durable (fdatasync). Raises OSError."""
        os.fdatasync(self._descriptor)

    def zero(self, offset: int, size: int) -> None:
        """Zero a range, by a hole where the file system supports that. Raises OSError."""
        if size and _libc.fallocate(self._descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
            for start in range(0, size, len(_CHUNK)):
                self.write(offset + start, memoryview(_CHUNK)[: size - start])

    discard = zero

    def close(self) -> None:
        """Release the file."""
        os.close(self._descriptor)

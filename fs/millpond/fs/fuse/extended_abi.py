# SPDX-License-Identifier: Apache-2.0
"""Pure: packs and parses the messages of /dev/fuse about extended attributes, and FUSE_STATX."""

from __future__ import annotations

import errno
import os
from struct import Struct

from millpond.fs.fuse.abi import names
from millpond.fs.vfs.path_api import Attributes, os_error

_SIZES = Struct("=II")
"""Of GETXATTR and LISTXATTR: the size of the caller's buffer; of SETXATTR: that of the value, and flags."""
_SIZE_IS = Struct("=I4x")
_BASIC, _BIRTH = 0x7FF, 0x800
_STATX_IS = Struct("=QII16x" + "IIQIIIH2xQQQQ" + "qI4x" * 4 + "IIII112x")
"""For how long attributes may be cached, flags; struct fuse_statx."""


def parse_get(body: memoryview) -> tuple[int, bytes]:
    """Parse GETXATTR: the size of the caller's buffer, 0 to ask for the value's size, and the name."""
    size, _ = _SIZES.unpack_from(body)
    (name,) = names(body[_SIZES.size :])
    return size, name


def parse_list(body: memoryview) -> int:
    """Parse LISTXATTR: the size of the caller's buffer, 0 to ask for that of the names."""
    return int(_SIZES.unpack_from(body)[0])


def parse_set(body: memoryview) -> tuple[bytes, bytes, int]:
    """Parse SETXATTR: name, value, flags. Raises OSError: EIO for anything else."""
    size, flags = _SIZES.unpack_from(body)
    name, found, value = bytes(body[_SIZES.size :]).partition(b"\0")
    if not found or len(value) != size:
        raise os_error(errno.EIO)
    return name, value, flags


def pack_size(size: int) -> bytes:
    """Pack the size of a value or of a list."""
    return _SIZE_IS.pack(size)


def pack_statx(a: Attributes, birth: int | None, seconds: float = 0.0) -> bytes:
    """Pack attributes that the kernel may cache for ``seconds``, with the birth time in nanoseconds."""
    whole = int(seconds)
    valid = (whole, int((seconds - whole) * 10**9), 0)
    mask = _BASIC if birth is None else _BASIC | _BIRTH
    owner = (a.links, a.uid, a.gid, a.mode)
    times = [part for time in (a.atime, birth or 0, a.ctime, a.mtime) for part in divmod(time, 10**9)]
    device = (os.major(a.rdev), os.minor(a.rdev), 0, 0)
    head = (*valid, mask, a.block_size, 0, *owner, a.inode, a.size, a.blocks, 0)
    return _STATX_IS.pack(*head, *times, *device)

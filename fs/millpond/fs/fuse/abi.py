# SPDX-License-Identifier: Apache-2.0
"""Pure: packs and parses the messages of /dev/fuse: <linux/fuse.h>, protocol 7.40.

A request is a header and a body whose layout the operation code determines; a reply is a header and a body
that belongs to the request. All numbers are in this machine's byte order.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from struct import Struct
from typing import NamedTuple

from millpond.fs.vfs.path_api import Attributes, Statistics, os_error

MAJOR, MINOR = 7, 40


class Code(IntEnum):
    """The FUSE operation codes that the server knows."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46


class Notice(IntEnum):
    """The notifications to the kernel (FUSE_NOTIFY_*)."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    INC_EPOCH = 8
    PRUNE = 9


INC_EPOCH_SINCE = 44
"""The minor protocol version from which the kernel accepts FUSE_NOTIFY_INC_EPOCH."""

PRUNE_SINCE = 45
"""The same for FUSE_NOTIFY_PRUNE."""

UNANSWERED = frozenset({Code.FORGET, Code.BATCH_FORGET})


class Feature(IntFlag):
    """The INIT flags that both sides must want, of both words."""

    POSIX_LOCKS = 1 << 1
    ASYNC_READ = 1 << 0
    BIG_WRITES = 1 << 5
    AUTO_INVAL_DATA = 1 << 12
    FLOCK_LOCKS = 1 << 10
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37


class Valid(IntFlag):
    """The flags that tell which fields of a SETATTR are set (FATTR_*)."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    HANDLE = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    KILL_SUIDGID = 1 << 11


OPEN_DIRECT_IO = 1 << 0
OPEN_KEEP_CACHE = 1 << 1
OPEN_PASSTHROUGH = 1 << 7
FSYNC_DATA_ONLY = 1
LOCK_FLOCK = 1 << 0
RELEASE_FLOCK_UNLOCK = 1 << 1
WRITE_CACHE = 1 << 0
WRITE_KILL_SUIDGID = 1 << 2

HEADER = Struct("=IIQQIIIHH")
"""Total length, operation, unique number, node; uid, gid and pid of the caller."""
REPLY = Struct("=IiQ")
"""Total length, negative errno or 0, unique number of the request."""

GETATTR = Struct("=IIQ")
SETATTR = Struct("=IIQQQQQQIIIIIIII")
MKNOD = Struct("=IIII")
MKDIR = Struct("=II")
RENAME = Struct("=Q")
RENAME2 = Struct("=QII")
LINK = Struct("=Q")
OPEN = Struct("=II")
CREATE = Struct("=IIII")
READ = Struct("=QQIIQII")
WRITE = READ
RELEASE = Struct("=QIIQ")
"""Handle, its flags, those of the release, lock owner."""
FLUSH = Struct("=Q8xQ")
"""Handle, lock owner."""
INTERRUPT = Struct("=Q")
"""The unique number of the request to be interrupted."""
FSYNC = Struct("=QII")
FALLOCATE = Struct("=QQQII")
LSEEK = Struct("=QqII")
"""Handle, flags, command, its argument as a number, size of the input, size of the output."""
FORGET = Struct("=Q")
BATCH_FORGET = Struct("=II")
FORGOTTEN = Struct("=QQ")
INIT = Struct("=IIIII")

_ATTRIBUTES = Struct("=QQQqqqIIIIIIIIII")
_ATTRIBUTES_ARE = Struct("=QII")
_ENTRY = Struct("=QQQQII")
_OPENED = Struct("=QIi")
_WRITTEN = Struct("=II")
_STATISTICS = Struct("=QQQQQIIII24x")
_OFFSET = Struct("=Q")
_INVAL_INODE = Struct("=Qqq")
_LOCK = Struct("=QQQQIII4x")
_LOCK_IS = Struct("=QQII")
_INIT_IS = Struct("=IIIIHHIIHHII24x")
_INVAL_ENTRY = Struct("=QII")
_PRUNE = Struct("=IIQ")
_XATTR_SIZES = Struct("=II")
"""Of GETXATTR and LISTXATTR: the size of the caller's buffer; of SETXATTR: that of the value, and flags."""
_XATTR_SIZE_IS = Struct("=I4x")
DIRENT = Struct("=QQII")
DIRENTPLUS = Struct("=QQQQII" + "QQQqqqIIIIIIIIII" + "QQII")
"""An entry, attributes, and a DIRENT; the name follows."""


class Header(NamedTuple):
    """The head of a request. ``code`` is None for an unknown operation."""

    size: int
    code: Code | None
    unique: int
    node: int
    uid: int
    gid: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class LockBody:
    """The body of a GETLK, SETLK or SETLKW. ``end`` is the last byte, ``kind`` fcntl's F_RDLCK, F_WRLCK or
    F_UNLCK.
    """

    handle: int
    owner: int
    start: int
    end: int
    kind: int
    pid: int
    flock: bool


_CODES = {code.value: code for code in Code}


def parse_header(data: memoryview) -> Header:
    """Parse a request's header. Raises OSError: EIO for bytes that are no request."""
    if len(data) < HEADER.size:
        raise os_error(errno.EIO)
    size, code, unique, node, uid, gid, pid, _, _ = HEADER.unpack_from(data)
    if size != len(data):
        raise os_error(errno.EIO)
    return Header(size, _CODES.get(code), unique, node, uid, gid, pid)


def names(data: memoryview, count: int = 1) -> list[bytes]:
    """Parse ``count`` strings that end with NUL. Raises OSError: EIO for anything else."""
    *found, rest = bytes(data).split(b"\0")
    if rest or len(found) != count:
        raise os_error(errno.EIO)
    return found


def parse_lock(data: memoryview) -> LockBody:
    """Parse a lock request. Raises OSError: EIO for bytes that are no lock."""
    if len(data) != _LOCK.size:
        raise os_error(errno.EIO)
    handle, owner, start, end, kind, pid, flags = _LOCK.unpack(data)
    return LockBody(handle, owner, start, end, kind, pid, bool(flags & LOCK_FLOCK))


def parse_getxattr(body: memoryview) -> tuple[int, bytes]:
    """Parse GETXATTR: the size of the caller's buffer, 0 to ask for the value's size, and the name."""
    size, _ = _XATTR_SIZES.unpack_from(body)
    (name,) = names(body[_XATTR_SIZES.size :])
    return size, name


def parse_listxattr(body: memoryview) -> int:
    """Parse LISTXATTR: the size of the caller's buffer, 0 to ask for that of the names."""
    return int(_XATTR_SIZES.unpack_from(body)[0])


def parse_setxattr(body: memoryview) -> tuple[bytes, bytes, int]:
    """Parse SETXATTR: name, value, flags. Raises OSError: EIO for anything else."""
    size, flags = _XATTR_SIZES.unpack_from(body)
    name, found, value = bytes(body[_XATTR_SIZES.size :]).partition(b"\0")
    if not found or len(value) != size:
        raise os_error(errno.EIO)
    return name, value, flags


def pack_init(
    features: Feature, max_write: int, stack_depth: int, background: tuple[int, int] = (0, 0)
) -> bytes:
    """Pack the reply to INIT; ``stack_depth`` is how many file systems passthrough may stack, ``background``
    how many asynchronous requests there may be at once, and from how many on the kernel counts as congested
    (0: 12 and 9).
    """
    low, high = int(features) & 0xFFFFFFFF, int(features) >> 32
    pages = max_write // os.sysconf("SC_PAGESIZE")
    return _INIT_IS.pack(MAJOR, MINOR, max_write, low, *background, max_write, 1, pages, 0, high, stack_depth)


def pack_attributes(a: Attributes, seconds: float = 0.0) -> bytes:
    """Pack attributes that the kernel may cache for ``seconds``."""
    return _ATTRIBUTES_ARE.pack(*split_seconds(seconds), 0) + _packed(a)


def pack_entry(node: int, a: Attributes, seconds: float = 0.0, name_seconds: float = 0.0) -> bytes:
    """Pack a name's node and attributes, and for how long the kernel may cache them and the name."""
    whole, part = split_seconds(seconds)
    name_whole, name_part = split_seconds(name_seconds)
    return _ENTRY.pack(node, 0, name_whole, whole, name_part, part) + _packed(a)


def pack_absence(seconds: float) -> bytes:
    """Pack a negative entry that the kernel may cache for ``seconds``."""
    whole, part = split_seconds(seconds)
    return _ENTRY.pack(0, 0, whole, 0, part, 0) + bytes(_ATTRIBUTES.size)


def split_seconds(seconds: float) -> tuple[int, int]:
    """Return whole seconds, and nanoseconds beside them."""
    whole = int(seconds)
    return whole, int((seconds - whole) * 10**9)


def pack_inval_inode(node: int, offset: int, length: int) -> bytes:
    """Pack FUSE_NOTIFY_INVAL_INODE: a node's attributes and pages. Offset -1: no pages; length 0: all behind
    the offset.
    """
    return _INVAL_INODE.pack(node, offset, length)


def pack_inval_entry(node: int, name: bytes) -> bytes:
    """Pack FUSE_NOTIFY_INVAL_ENTRY: a name in the directory ``node``."""
    return _INVAL_ENTRY.pack(node, len(name), 0) + name + b"\0"


def pack_prune(nodes: Sequence[int]) -> bytes:
    """Pack FUSE_NOTIFY_PRUNE: nodes that the kernel is to forget unless it uses them."""
    return _PRUNE.pack(len(nodes), 0, 0) + Struct(f"={len(nodes)}Q").pack(*nodes)


def _packed(a: Attributes) -> bytes:
    atime, atime_ns = divmod(a.atime, 10**9)
    mtime, mtime_ns = divmod(a.mtime, 10**9)
    ctime, ctime_ns = divmod(a.ctime, 10**9)
    times = (atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns)
    rest = (a.mode, a.links, a.uid, a.gid, a.rdev, a.block_size, 0)
    return _ATTRIBUTES.pack(a.inode, a.size, a.blocks, *times, *rest)


def pack_opened(handle: int, flags: int = 0, backing: int = 0) -> bytes:
    """Pack the reply to OPEN; ``backing`` is the backing file's number, with PASSTHROUGH."""
    return _OPENED.pack(handle, flags, backing)


def pack_written(count: int) -> bytes:
    """Pack how many bytes were written."""
    return _WRITTEN.pack(count, 0)


def pack_offset(offset: int) -> bytes:
    """Pack the offset that a seek found."""
    return _OFFSET.pack(offset)


def pack_lock(start: int, end: int, kind: int, pid: int) -> bytes:
    """Pack the reply to GETLK: the conflicting lock, or F_UNLCK."""
    return _LOCK_IS.pack(start, end, kind, pid)


def pack_statistics(s: Statistics) -> bytes:
    """Pack how full the file system is."""
    blocks = (s.blocks, s.free, s.available, s.files, s.files_free)
    return _STATISTICS.pack(*blocks, s.block_size, s.name_max, s.fragment_size, 0)


def pack_xattr_size(size: int) -> bytes:
    """Pack the size of a value or of a list."""
    return _XATTR_SIZE_IS.pack(size)

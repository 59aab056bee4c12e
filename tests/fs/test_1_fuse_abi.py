# SPDX-License-Identifier: Apache-2.0
"""The messages of /dev/fuse: sizes and offsets as <linux/fuse.h> has them."""

from __future__ import annotations

import errno
import fcntl
import struct
from collections.abc import Iterator
from typing import cast

import pytest

from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Code, LockBody
from millpond.fs.fuse.directories import list_names
from millpond.fs.vfs.inode_api import InodeFs
from millpond.fs.vfs.path_api import DirectoryEntry, Handle


def request(code: int, body: bytes = b"", size: int | None = None) -> memoryview:
    length = abi.HEADER.size + len(body) if size is None else size
    return memoryview(abi.HEADER.pack(length, code, 77, 5, 1000, 1001, 42, 0, 0) + body)


def test_the_head_of_a_request() -> None:
    header = abi.parse_header(request(Code.LOOKUP, b"name\0"))
    assert (header.code, header.unique, header.node, header.uid, header.gid) == (
        Code.LOOKUP,
        77,
        5,
        1000,
        1001,
    )
    assert abi.HEADER.size == 40
    assert abi.parse_header(request(40)).code is None  # FUSE_POLL


@pytest.mark.parametrize("data", [b"", bytes(39), bytes(request(1, b"x", 40)), bytes(request(1, b"x", 42))])
def test_what_is_no_request(data: bytes) -> None:
    with pytest.raises(OSError, match="Input/output error") as caught:
        abi.parse_header(memoryview(data))
    assert caught.value.errno == errno.EIO


def test_names_end_with_nul() -> None:
    assert abi.names(memoryview(b"one\0")) == [b"one"]
    assert abi.names(memoryview(b"one\0\xfftwo\0"), 2) == [b"one", b"\xfftwo"]
    for data, count in ((b"one", 1), (b"one\0two", 1), (b"one\0two\0", 1), (b"one\0", 2), (b"", 1)):
        with pytest.raises(OSError, match="Input/output error"):
            abi.names(memoryview(data), count)


class Listed:
    """Just the listing of a tree."""

    def __init__(self, entries: list[DirectoryEntry]) -> None:
        self._entries = entries

    def readdir(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        assert (handle, offset) == (7, 5)
        return iter(self._entries)


def test_a_listing_holds_whole_entries_only() -> None:
    entries = [
        DirectoryEntry("a", 1, 0o040000, 1),
        DirectoryEntry("seven77", 2, 0o100000, 2),
        DirectoryEntry("\udcff" * 9, 3, 0o120000, 3),
    ]

    def listed(size: int) -> bytes:
        (packed,) = list_names(
            cast(InodeFs, Listed(entries)), memoryview(abi.READ.pack(7, 5, size, *(0,) * 4))
        )
        return packed

    whole = listed(4096)
    assert len(whole) == 32 + 32 + 40
    assert struct.unpack_from("=QQII", whole) == (1, 1, 1, 4) and whole[24:25] == b"a"
    assert struct.unpack_from("=QQII", whole, 32) == (2, 2, 7, 8) and whole[56:63] == b"seven77"
    assert struct.unpack_from("=QQII", whole, 64) == (3, 3, 9, 10) and whole[88:97] == b"\xff" * 9
    for size, held in ((104, 104), (103, 64), (64, 64), (63, 32), (32, 32), (31, 0)):
        assert listed(size) == whole[:held]


@pytest.mark.parametrize(("flags", "flock"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_lock_that_is_asked_for(flags: int, flock: bool) -> None:
    owner, last = 0xFEDCBA9876543210, (1 << 63) - 1
    body = struct.pack("=QQQQIIII", 3, owner, 100, last, fcntl.F_WRLCK, 42, flags, 0)
    assert len(body) == 48
    asked = abi.parse_lock(memoryview(body))
    assert asked == LockBody(3, owner, 100, last, fcntl.F_WRLCK, 42, flock)
    for wrong in (body[:-1], body + b"\0", b""):
        with pytest.raises(OSError, match="Input/output error"):
            abi.parse_lock(memoryview(wrong))

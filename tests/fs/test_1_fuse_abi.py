# SPDX-License-Identifier: Apache-2.0
"""Requests of /dev/fuse that are not as <linux/fuse.h> has them; a real kernel sends those that are."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from millpond.fs.fuse import abi

from .support import errno_of

XATTR_HEAD = abi.BATCH_FORGET.pack(3, 1)


def head(code: int, size: int) -> bytes:
    return abi.HEADER.pack(size, code, 77, 5, 1000, 1001, 42, 0, 0) + b"x"


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        *((abi.parse_header, body) for body in (b"", bytes(39), head(1, 40), head(1, 42))),
        *((abi.names, body) for body in (b"", b"one", b"one\0two", b"one\0two\0")),
        *((abi.parse_lock, bytes(size)) for size in (0, 47, 49)),
        *((abi.parse_setxattr, XATTR_HEAD + body) for body in (b"user.a", b"user.a\0xy")),
    ],
)
def test_what_is_no_request(parse: Callable[[memoryview], object], body: bytes) -> None:
    assert errno_of(parse, memoryview(body)) == errno.EIO


def test_a_request_of_an_unknown_kind_is_told_apart() -> None:
    assert abi.parse_header(memoryview(head(40, 41))).code is None  # FUSE_POLL

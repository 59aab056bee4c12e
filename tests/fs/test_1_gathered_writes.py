# SPDX-License-Identifier: Apache-2.0
"""Small writes of a file that are gathered into extents."""

from __future__ import annotations

import errno

import pytest

from millpond.fs.client.cache.gathered import EXTENT, Extent, may_follow, merged
from millpond.fs.client.cache.write_verifier import WriteVerifier
from millpond.fs.vfs.inode_api import Now, SetAttr


def test_what_follows_is_added_and_all_else_begins_another_extent() -> None:
    extent = Extent(10, False, 0.0, bytearray(b"abc"))
    assert extent.accepts(3, 13, False)
    for size, offset, append in ((3, 12, False), (3, 14, False), (3, 13, True), (EXTENT, 13, False)):
        assert not extent.accepts(size, offset, append)
    extent.sealed = True
    assert not extent.accepts(3, 13, False)


def test_appends_follow_each_other_wherever_the_kernel_thinks_the_end_is() -> None:
    extent = Extent(10, True, 0.0, bytearray(b"abc"))
    assert extent.accepts(3, 99, True) and not extent.accepts(3, 13, False)


def test_attributes_come_after_the_last_byte() -> None:
    extent = Extent(0, False, 0.0, bytearray(b"abc"), SetAttr(mode=0o600))
    assert not extent.accepts(1, 3, False)
    first = merged(None, SetAttr(mode=0o600, mtime=5))
    assert merged(first, SetAttr(atime=Now.NOW, mtime=6)) == SetAttr(mode=0o600, atime=Now.NOW, mtime=6)
    for other in (SetAttr(size=0), SetAttr(uid=0), SetAttr(gid=0), SetAttr(mode=0o4755)):
        assert not may_follow(other)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_loss_has_its_reason_until_another_comes(code: int) -> None:
    verifier = WriteVerifier()
    verifier.fail(code)
    assert verifier.error == code and verifier.report(0) == 1 and verifier.report(1) is None
    verifier.change()
    verifier.storage_changed()
    assert verifier.error == errno.EIO and verifier.lost_seq < verifier.error_seq

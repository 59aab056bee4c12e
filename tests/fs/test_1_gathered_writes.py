# SPDX-License-Identifier: Apache-2.0
"""Small writes of a file that are gathered into extents."""

from __future__ import annotations

import errno

import pytest

from millpond.fs.client.cache.gathered import EXTENT, GatheredWrites
from millpond.fs.client.cache.write_verifier import WriteVerifier
from millpond.fs.vfs.inode_api import Now, SetAttr


def test_what_follows_is_added_and_all_else_begins_another_extent() -> None:
    writes = GatheredWrites()
    extent = writes.begin(b"abc", 10, False, 0.0)
    assert extent.accepts(3, 13, False)
    for size, offset, append in ((3, 12, False), (3, 14, False), (3, 13, True), (EXTENT, 13, False)):
        assert not extent.accepts(size, offset, append)
    writes.begin(b"x", 0, False, 0.0)
    assert extent.sealed and not extent.accepts(3, 13, False) and writes.size == 4


def test_appends_follow_each_other_wherever_the_kernel_thinks_the_end_is() -> None:
    extent = GatheredWrites().begin(b"abc", 10, True, 0.0)
    assert extent.accepts(3, 99, True) and not extent.accepts(3, 13, False)


def test_so_many_extents_wait() -> None:
    writes = GatheredWrites()
    while not writes.are_full:
        writes.begin(b"x", 5, False, 0.0)
    assert 2 <= len(writes.extents) <= 8


def test_attributes_come_after_the_last_byte() -> None:
    writes = GatheredWrites()
    assert not writes.set(SetAttr(mode=0o600))
    extent = writes.begin(b"abc", 0, False, 0.0)
    assert writes.set(SetAttr(mode=0o600, mtime=5)) and writes.set(SetAttr(atime=Now.NOW, mtime=6))
    assert extent.changes == SetAttr(mode=0o600, atime=Now.NOW, mtime=6)
    assert not extent.accepts(1, 3, False)
    for other in (SetAttr(size=0), SetAttr(uid=0), SetAttr(gid=0), SetAttr(mode=0o4755)):
        assert not writes.set(other)
    extent.sealed = True
    assert not writes.set(SetAttr(mtime=7))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_loss_has_its_reason_until_another_comes(code: int) -> None:
    verifier = WriteVerifier()
    verifier.fail(code, lost=True)
    assert verifier.error == code and verifier.report(0) == 1 and verifier.report(1) is None
    verifier.change()
    verifier.storage_changed()
    assert verifier.error == errno.EIO and verifier.failed_seq < verifier.error_seq


def test_a_refusal_of_attributes_is_no_loss_of_data() -> None:
    verifier = WriteVerifier()
    verifier.fail(errno.EPERM, lost=False)
    assert (verifier.lost_seq, verifier.failed_seq, verifier.error) == (0, 1, errno.EPERM)
    assert verifier.report(0) == 1 and verifier.report(1) is None

# SPDX-License-Identifier: Apache-2.0
"""The owners of files as a mount shows them."""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest

from millpond.fs.vfs.inode_api import SetAttr
from millpond.fs.vfs.ownership import OwnerMap
from millpond.fs.vfs.path_api import Attributes, Owner

FILE = Attributes(1, stat.S_IFREG | 0o644, 1, 64001, 64002, 0, 0, 4096, 0, 0, 0)
SERVER, ROOT, USER = Owner(64001, 64002), Owner(0, 0), Owner(1000, 1001)


def shown(owners: OwnerMap, uid: int = 64001, gid: int = 64002) -> tuple[int, int]:
    found = owners.shown(replace(FILE, uid=uid, gid=gid))
    return found.uid, found.gid


def test_a_group_of_its_own() -> None:
    owners = OwnerMap(lambda: SERVER, ROOT, gid=1001)
    assert shown(owners) == (0, 1001) and shown(owners, 5, 6) == (5, 1001)
    assert owners.stored(SetAttr(uid=0, gid=1001)) == SetAttr(uid=64001)


@pytest.mark.parametrize("owners", [OwnerMap(), OwnerMap(lambda: None, ROOT)])
def test_nothing_is_changed_where_numbers_mean_the_same(owners: OwnerMap) -> None:
    assert owners.shown(FILE) is FILE
    assert owners.stored(SetAttr(uid=0, gid=0)) == SetAttr(uid=0, gid=0)

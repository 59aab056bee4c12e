# SPDX-License-Identifier: Apache-2.0
"""The owners of files as a mount shows them."""

from __future__ import annotations

import errno
import stat
from dataclasses import replace

import pytest

from millpond.fs.vfs.inode_api import SetAttr
from millpond.fs.vfs.ownership import OwnerMap
from millpond.fs.vfs.path_api import Attributes, Owner

from .support import errno_of

FILE = Attributes(1, stat.S_IFREG | 0o644, 1, 64001, 64002, 0, 0, 4096, 0, 0, 0)
SERVER, ROOT, USER = Owner(64001, 64002), Owner(0, 0), Owner(1000, 1001)


def shown(owners: OwnerMap, uid: int = 64001, gid: int = 64002) -> tuple[int, int]:
    found = owners.shown(replace(FILE, uid=uid, gid=gid))
    return found.uid, found.gid


@pytest.mark.parametrize("own", [ROOT, USER])
def test_the_servers_files_are_the_users_own(own: Owner) -> None:
    owners = OwnerMap(lambda: SERVER, own)
    assert shown(owners) == (own.uid, own.gid)
    assert shown(owners, 5, 6) == (5, 6)
    assert owners.stored(SetAttr(uid=own.uid, gid=own.gid)) == SetAttr(uid=64001, gid=64002)
    assert owners.stored(SetAttr(uid=own.uid)) == SetAttr(uid=64001)
    assert owners.stored(SetAttr(uid=5, gid=6, mode=7)) == SetAttr(uid=5, gid=6, mode=7)


@pytest.mark.parametrize("server", [None, SERVER])
def test_all_files_are_one_users(server: Owner | None) -> None:
    owners = OwnerMap(lambda: server, ROOT, 1000, 1001)
    assert shown(owners) == shown(owners, 0, 0) == (1000, 1001)
    assert owners.stored(SetAttr(uid=1000, gid=1001)) == SetAttr()
    assert errno_of(owners.stored, SetAttr(uid=0)) == errno.EPERM
    assert errno_of(owners.stored, SetAttr(uid=1000, gid=0)) == errno.EPERM
    assert owners.stored(SetAttr(mode=0o600)) == SetAttr(mode=0o600)


def test_a_group_of_its_own() -> None:
    owners = OwnerMap(lambda: SERVER, ROOT, gid=1001)
    assert shown(owners) == (0, 1001) and shown(owners, 5, 6) == (5, 1001)
    assert owners.stored(SetAttr(uid=0, gid=1001)) == SetAttr(uid=64001)


@pytest.mark.parametrize("owners", [OwnerMap(), OwnerMap(lambda: None, ROOT)])
def test_nothing_is_changed_where_numbers_mean_the_same(owners: OwnerMap) -> None:
    assert owners.shown(FILE) is FILE
    assert owners.stored(SetAttr(uid=0, gid=0)) == SetAttr(uid=0, gid=0)

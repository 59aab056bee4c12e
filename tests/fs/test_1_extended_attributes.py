# SPDX-License-Identifier: Apache-2.0
"""Extended attributes: names, the backing directory, the quota, messages of the kernel."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.errors import ProtocolError
from millpond.fs.proto.extended import pack_names, unpack_names
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.usage import public_usage
from millpond.fs.vfs.inode_api import ROOT, Node

from .support import errno_of


@pytest.fixture
def backing(top: Path) -> Iterator[BackingFs]:
    root = os.open(top, os.O_PATH)
    made = BackingFs(root)
    yield made
    made.close()
    os.close(root)


def found(tree: BackingFs, name: bytes = b"f") -> Node:
    return tree.lookup(ROOT, name).node


def test_what_others_set_is_not_shown(backing: BackingFs, top: Path) -> None:
    (top / "f").touch()
    os.setxattr(top / "f", "user.shown", b"1")
    try:
        os.setxattr(top / "f", "trusted.hidden", b"2")
    except OSError as error:
        pytest.skip(f"no trusted attributes here: {error}")
    assert backing.extended.names(found(backing)) == (b"user.shown",)


def test_a_root_that_holds_both_parts_has_none(top: Path) -> None:
    (top / "public").mkdir()
    os.setxattr(top, "user.private", b"1")
    root = os.open(top, os.O_PATH)
    tree = BackingFs(root, public=b"public")
    assert tree.extended.names(ROOT) == ()
    assert errno_of(tree.extended.get, ROOT, b"user.private") == errno.ENODATA
    assert errno_of(tree.extended.set, ROOT, b"user.private", b"2", 0) == errno.EROFS
    assert errno_of(tree.extended.remove, ROOT, b"user.private") == errno.EROFS
    os.close(root)


def test_the_quota_counts_them(top: Path) -> None:
    (top / "public").mkdir()
    (top / "public" / "f").touch()
    root = os.open(top, os.O_PATH)
    tree = BackingFs(root, public=b"public", limit=public_usage(top)[0] + 8192)
    node = tree.walk(ROOT, [b"public", b"f"]).node
    tree.extended.set(node, b"user.a", bytes(2000), 0)
    tree.quota.count()
    assert tree.quota.used == public_usage(top)[0]
    assert errno_of(tree.extended.set, node, b"user.b", bytes(1000), 0) == errno.ENOSPC
    tree.extended.remove(node, b"user.a")  # a full quota does not hinder it
    assert tree.extended.names(node) == ()
    tree.close()
    os.close(root)


def test_lists_of_a_hostile_device() -> None:
    assert unpack_names(pack_names([b"user.a", b"user.b"])) == (b"user.a", b"user.b")
    assert unpack_names(b"") == ()
    for bad in (
        b"user.a",
        b"user.a\0\0",
        b"security.capability\0",
        b"user.\0",
        bytes(9),
        b"user.x\0" * 10_000,
    ):
        with pytest.raises(ProtocolError):
            unpack_names(bad)

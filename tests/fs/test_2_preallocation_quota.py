# SPDX-License-Identifier: Apache-2.0
"""A preallocated file counts in the quota until it is removed and forgotten, even if it was closed before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.fs.store.layout import prepare
from millpond.fs.store.quota_fs import QuotaFs
from millpond.fs.store.usage import public_usage
from millpond.fs.vfs.inode_api import ROOT, Node

from .support import errno_of

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[QuotaFs]:
    top = tmp_path / "flash"
    prepare(top)
    root = os.open(top, os.O_PATH | os.O_DIRECTORY)
    made = QuotaFs(root, 8 * MIB, lambda: public_usage(top), public=b"public")
    yield made
    made.close()
    os.close(root)


def linked(tree: QuotaFs, node: Node, parent: Node, name: bytes) -> None:
    tree.link(node, parent, name)


def told(tree: QuotaFs, node: Node, parent: Node, name: bytes) -> None:
    tree.link_unnamed(node, parent, name, 0o600, 5)


@pytest.mark.parametrize("named", [linked, told])
def test_it_counts_though_it_was_closed_before_it_was_named(
    tree: QuotaFs, named: Callable[[QuotaFs, Node, Node, bytes], None]
) -> None:
    public, before = tree.lookup(ROOT, b"public").node, (tree.quota.used, tree.quota.files)
    found, handle = tree.create_unnamed(public)
    tree.write(handle, bytes(MIB), 0)
    tree.release(handle)
    closed = tree.quota.used, tree.quota.files
    assert closed >= (before[0] + MIB, before[1] + 1)  # it may get a name yet
    assert errno_of(named, tree, found.node, public, b"")  # no name at all
    assert (tree.quota.used, tree.quota.files) == closed
    assert tree.recount() == (0, 0)
    named(tree, found.node, public, b"f")
    assert tree.quota.used >= before[0] + MIB and tree.quota.files == before[1] + 1
    assert tree.recount() == (0, 0)
    tree.unlink(public, b"f")
    assert tree.quota.used >= before[0] + MIB and tree.recount() == (0, 0)
    tree.forget(found.node, 2 if named is linked else 1)
    assert (tree.quota.used, tree.quota.files) == before and not tree._files_open

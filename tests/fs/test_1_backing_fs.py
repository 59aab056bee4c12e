# SPDX-License-Identifier: Apache-2.0
"""The file system by inode number, on a plain directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import ROOT, Node, SetAttr
from millpond.fs.vfs.path_api import Owner
from millpond.linux.confinement.userns import has_many_uids

from .support import errno_of


@pytest.fixture
def tree(top: Path) -> Iterator[BackingFs]:
    root = os.open(top, os.O_PATH | os.O_DIRECTORY)
    made = BackingFs(root, chown_new=os.geteuid() == 0 and has_many_uids())
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    os.close(root)


def put(tree: BackingFs, parent: Node, name: bytes, data: bytes = b"") -> Node:
    found, handle = tree.create(parent, name, os.O_WRONLY | os.O_TRUNC, 0o644, None)
    assert tree.write(handle, memoryview(data), 0) == len(data)
    tree.release(handle)
    return found.node


def get(tree: BackingFs, node: Node) -> bytes:
    handle = tree.open(node, os.O_RDONLY)
    try:
        return tree.read(handle, 1 << 20, 0)
    finally:
        tree.release(handle)


def test_a_number_stays_with_its_file(tree: BackingFs, top: Path) -> None:
    node = put(tree, ROOT, b"a", b"one")
    assert tree.lookup(ROOT, b"a").node == node
    directory = tree.mkdir(ROOT, b"d", 0o755, None).node
    tree.rename(ROOT, b"a", directory, b"b")
    assert tree.lookup(directory, b"b").node == node
    assert tree.link(node, ROOT, b"c").node == node
    assert tree.getattr(node).attributes.links == 2
    put(tree, ROOT, b"a", b"another")
    assert get(tree, node) == b"one"
    tree.unlink(directory, b"b")
    tree.unlink(ROOT, b"c")
    assert tree.getattr(node).attributes.links == 0 and get(tree, node) == b"one"
    assert tree.setattr(node, SetAttr(size=1)).attributes.size == 1
    assert get(tree, node) == b"o"
    assert os.listdir(top / "d") == []  # noqa: PTH208


def test_a_number_is_forgotten_as_often_as_it_was_found(tree: BackingFs) -> None:
    node = put(tree, ROOT, b"a")
    tree.lookup(ROOT, b"a")
    tree.lookup(ROOT, b"a")
    tree.forget(node, 2)
    assert tree.getattr(node).attributes.links == 1
    tree.forget(node, 1)
    assert errno_of(tree.getattr, node) == errno.ESTALE
    assert errno_of(tree.lookup, node, b"x") == errno.ESTALE
    again = tree.lookup(ROOT, b"a").node
    assert again != node  # never used twice
    for nobody in (node, Node(99), ROOT):
        tree.forget(nobody, 100)
    assert stat.S_ISDIR(tree.getattr(ROOT).attributes.mode)


def test_forgetting_leaves_open_files_open(tree: BackingFs) -> None:
    node = put(tree, ROOT, b"a", b"data")
    handle = tree.open(node, os.O_RDWR)
    tree.forget(node, 1)
    assert tree.read(handle, 10, 0) == b"data"
    tree.release(handle)
    assert errno_of(tree.read, handle, 10, 0) == errno.EBADF
    assert errno_of(tree.release, handle) == errno.EBADF


def test_symbolic_links_are_not_followed(tree: BackingFs, top: Path) -> None:
    (top / "out").symlink_to("../secret")
    link = tree.lookup(ROOT, b"out").node
    assert tree.readlink(link) == b"../secret"
    assert stat.S_ISLNK(tree.getattr(link).attributes.mode)
    assert errno_of(tree.open, link, os.O_RDONLY) == errno.EPERM
    assert errno_of(tree.lookup, link, b"x") == errno.ENOTDIR
    assert errno_of(tree.create, ROOT, b"out", os.O_RDWR, 0o644, None) == errno.ESTALE
    assert tree.link(link, ROOT, b"again").node == link
    tree.setattr(link, SetAttr(mtime=5 * 10**9))
    assert (top / "out").lstat().st_mtime == 5 and (top.parent / "secret").stat().st_mtime != 5
    assert tree.symlink(ROOT, b"new", b"\xff/..", None).attributes.size == 4
    assert os.readlink(top / "new") == "\udcff/.."  # noqa: PTH115


def test_the_dots_of_a_listing_have_their_directories_numbers(tree: BackingFs, top: Path) -> None:
    for node, parent in ((ROOT, top), (tree.mkdir(ROOT, b"d", 0o755, None).node, top)):
        handle = tree.opendir(node)
        numbers = {entry.name: entry.inode for entry in tree.readdir(handle, 0)}
        assert (numbers["."], numbers[".."]) == (tree.getattr(node).attributes.inode, parent.stat().st_ino)
        tree.release(handle)


def test_what_cannot_be_made_whole_is_not_there(top: Path) -> None:
    root = os.open(top, os.O_PATH | os.O_DIRECTORY)
    tree = BackingFs(root, chown_new=True)
    nobody = Owner(1 << 40, 0)
    for call, arguments in (
        (tree.create, (ROOT, b"f", os.O_RDWR, 0o644, nobody)),
        (tree.mkdir, (ROOT, b"d", 0o755, nobody)),
        (tree.mknod, (ROOT, b"n", stat.S_IFIFO | 0o644, 0, nobody)),
        (tree.symlink, (ROOT, b"s", b"x", nobody)),
    ):
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        assert errno_of(call, *arguments) == errno.EINVAL
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert os.listdir(top) == []  # noqa: PTH208
    os.close(root)

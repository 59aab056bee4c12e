# SPDX-License-Identifier: Apache-2.0
"""Files that one thread forgets or closes while another is in the middle of an operation on them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.fs.store import backing_fs
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import PUBLIC
from millpond.fs.vfs.inode_api import ROOT, Node, SetAttr
from millpond.fs.vfs.path_api import Handle

from .support import errno_of

FILES = ("a", "b")
ONE, OTHER = 0o600, 0o640


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / PUBLIC
    made.mkdir()
    for name, mode in zip(FILES, (ONE, OTHER), strict=True):
        (made / name).write_text(f"text of {name}")
        (made / name).chmod(mode)
        (made / f"d{name}").mkdir()
        (made / f"d{name}" / "f").touch()
    return made


@pytest.fixture
def tree(directory: Path) -> Iterator[BackingFs]:
    made = BackingFs(os.open(directory, os.O_PATH | os.O_DIRECTORY))
    yield made
    made.close()


class Between:
    """Replaces a function by one that first, once, has another thread forget or close what is in use, and
    open something else that gets the lowest free descriptor.
    """

    def __init__(self, patch: pytest.MonkeyPatch, place: Any, name: str, do: Callable[[], object]) -> None:
        self._real, self._do = getattr(place, name), do
        self.done = False
        patch.setattr(place, name, self)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        if not self.done:
            self.done = True
            self._do()
        return self._real(*arguments, **more)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def node_of(tree: BackingFs, name: bytes) -> Node:
    return tree.lookup(ROOT, name).node


NODES: dict[str, tuple[bytes, Any, str, Callable[[BackingFs, Node], object]]] = {
    "getattr": (b"a", os, "fstat", lambda tree, node: tree.getattr(node).attributes.mode & 0o777),
    "setattr": (
        b"a",
        backing_fs,
        "set_mode",
        lambda tree, node: tree.setattr(node, SetAttr(mode=0o604)).attributes.mode & 0o777,
    ),
    "truncate": (
        b"a",
        backing_fs,
        "open_past_lease",
        lambda tree, node: tree.setattr(node, SetAttr(size=3)).attributes.size,
    ),
    "open": (
        b"a",
        backing_fs,
        "open_past_lease",
        lambda tree, node: tree.read(tree.open(node, os.O_RDONLY), 99, 0),
    ),
    "lookup": (b"da", os, "open", lambda tree, node: tree.lookup(node, b"f") and None),
    "unlink": (b"da", os, "unlink", lambda tree, node: tree.unlink(node, b"f")),
    "mkdir": (b"da", os, "mkdir", lambda tree, node: tree.mkdir(node, b"new", 0o700, None) and None),
    "link": (
        b"da",
        os,
        "link",
        lambda tree, node: errno_of(tree.link, tree.create_unnamed(node)[0].node, node, b"new"),
    ),
    "rename": (b"da", os, "rename", lambda tree, node: tree.rename(node, b"f", node, b"g")),
    "opendir": (
        b"da",
        os,
        "open",
        lambda tree, node: [entry.name for entry in tree.readdir(tree.opendir(node), 0)] and None,
    ),
}
EXPECTED = {"getattr": ONE, "setattr": 0o604, "truncate": 3, "open": b"text of a", "link": errno.ESTALE}


@pytest.mark.parametrize("operation", NODES)
def test_a_node_that_is_forgotten_meanwhile(
    operation: str, tree: BackingFs, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, place, function, do = NODES[operation]
    node, before = node_of(tree, name), descriptors()
    with monkeypatch.context() as patch:

        def between() -> None:
            tree.forget(node, 1)
            node_of(tree, name.replace(b"a", b"b"))

        between_calls = Between(patch, place, function, between)
        assert do(tree, node) == EXPECTED.get(operation)
        assert between_calls.done
    assert errno_of(tree.getattr, node) is not None
    assert (directory / "b").stat().st_mode & 0o777 == OTHER
    assert (directory / "b").read_text() == "text of b"
    assert [path.name for path in (directory / "db").iterdir()] == ["f"]
    more = {"open": 1, "lookup": 1, "mkdir": 1, "link": 2, "opendir": 1}.get(operation, 0)
    assert descriptors() == before + more  # that of the other file instead of the forgotten one's


HANDLES: dict[str, tuple[str, Callable[[BackingFs, Handle], object]]] = {
    "read": ("pread", lambda tree, handle: tree.read(handle, 99, 0)),
    "write": ("pwritev", lambda tree, handle: tree.write(handle, b"TEXT", 0)),
    "truncate": (
        "ftruncate",
        lambda tree, handle: tree.setattr(node_of(tree, b"a"), SetAttr(size=3), handle).attributes.size,
    ),
    "seek": ("lseek", lambda tree, handle: tree.seek(handle, 0, os.SEEK_END)),
    "duplicate": ("dup", lambda tree, handle: os.close(tree.duplicate(handle))),
}
RESULTS = {"read": b"text of a", "write": 4, "truncate": 3, "seek": 9}


@pytest.mark.parametrize("operation", HANDLES)
def test_a_handle_that_is_closed_meanwhile(
    operation: str, tree: BackingFs, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "b").write_text("another text of b")
    function, do = HANDLES[operation]
    a, b = node_of(tree, b"a"), node_of(tree, b"b")
    handle, before = tree.open(a, os.O_RDWR), descriptors()
    with monkeypatch.context() as patch:

        def between() -> None:
            tree.release(handle)
            tree.open(b, os.O_RDWR)

        between_calls = Between(patch, os, function, between)
        assert do(tree, handle) == RESULTS.get(operation)
        assert between_calls.done
    assert errno_of(tree.read, handle, 1, 0) is not None and descriptors() == before
    assert (directory / "b").read_text() == "another text of b"

# SPDX-License-Identifier: Apache-2.0
"""The device's mount hears of what hosts remove, and has its kernel forget what has no name any more."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from millpond.fs.coherence import removed_files
from millpond.fs.coherence.delegation_table import DEVICE
from millpond.fs.coherence.removed_files import RemovedFiles
from millpond.fs.proto.delegations import ALL_KNOWN
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.identity import FileIdentity
from millpond.fs.vfs.inode_api import ROOT, KnownFile, Node

from ..waiting import eventually
from .caching_client import Kernel, Listening, managed
from .support import lasts

D, F, G = 2, 10, 11


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[Listening, set[int]]]:
    """A manager, and what it tells a mount of."""
    heard = set[int]()

    class Hearing(RemovedFiles):
        def look(self, inodes: Collection[int]) -> None:
            heard.update(inodes)

    with managed(tmp_path / "locks") as server:
        root = os.open(tmp_path, os.O_PATH)
        mount = Hearing(BackingFs(root), tmp_path / "locks")
        mount.start(Kernel())
        eventually(lambda: ALL_KNOWN in heard, "the mount looks at all that it knows at first")
        heard.clear()
        yield server, heard
        mount.stop()
        os.close(root)


def test_a_manager_that_was_started_again_tells_of_all(
    told: tuple[Listening, set[int]], tmp_path: Path
) -> None:
    server, heard = told
    server.kill()
    with managed(tmp_path / "locks") as again:
        eventually(lambda: heard == {ALL_KNOWN}, "the mount looks at all that it knows")
        with again.manager.write_intent(again.client(), D, inodes=(F,)):
            pass
        eventually(lambda: F in heard, "it is told")


def test_the_mount_is_told_whose_names_a_host_may_have_removed(told: tuple[Listening, set[int]]) -> None:
    server, heard = told
    host = server.client()
    with server.manager.write_intent(host, D, inodes=(F,)) as change:
        change.recall(G)
        assert lasts(lambda: not heard)
    eventually(lambda: heard == {F, G}, "both are told")


@pytest.mark.parametrize("device", [True, False])
def test_what_removes_no_name_of_a_host_is_not_told(told: tuple[Listening, set[int]], device: bool) -> None:
    server, heard = told
    holder, directories = (DEVICE, (D,)) if device else (server.client(), ())
    with server.manager.write_intent(holder, *directories, inodes=(F,)):
        pass
    with server.manager.write_intent(server.client(), D):
        pass
    assert lasts(lambda: not heard)


def test_of_very_many_the_mount_is_told_in_a_word(told: tuple[Listening, set[int]]) -> None:
    server, heard = told
    with server.manager.write_intent(server.client(), D, inodes=tuple(range(F, F + 5000))):
        pass
    eventually(lambda: heard == {ALL_KNOWN}, "one message")


class Forgetting(Kernel):
    """Forgets what it is to forget, but for what is ``used``."""

    def __init__(self, tree: BackingFs, *, prunes: bool) -> None:
        super().__init__()
        self._tree, self.prunes = tree, prunes
        self.used: Collection[Node] = ()

    def prune(self, files: Sequence[KnownFile]) -> None:
        super().prune(files)
        for node, _, _ in files:
            if node not in self.used:
                self._tree.forget(node, 1)


class Mounted:
    """The files of a directory and of one below it, which the kernel knows; ``nodes`` by their names."""

    def __init__(self, top: Path, *, prunes: bool = True) -> None:
        self.top = top
        (top / "d").mkdir()
        for name in ("f", "g", "d/f", "d/x (deleted)"):
            (top / name).touch()
        self._root = os.open(top, os.O_PATH)
        self.tree = BackingFs(self._root)
        names = ("d", "f", "g", "d/f", "d/x (deleted)")
        self.nodes = {name: self.tree.walk(ROOT, os.fsencode(name).split(b"/")).node for name in names}
        self.numbers = {name: self.tree.inode(node) for name, node in self.nodes.items()}
        self.kernel, self.removed = (
            Forgetting(self.tree, prunes=prunes),
            RemovedFiles(self.tree, top / "no manager"),
        )
        self.removed.start(self.kernel)

    def forgotten(self) -> set[str]:
        return {name for name, node in self.nodes.items() if not self.tree.knows(node)}

    def look(self, *names: str) -> None:
        self.removed.look({self.numbers[name] for name in names})

    def close(self) -> None:
        self.removed.stop()
        self.tree.close()
        os.close(self._root)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    made = Mounted(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("foreign", [True, False])
def test_what_has_no_name_is_forgotten_and_all_else_kept(mounted: Mounted, foreign: bool) -> None:
    if foreign:  # as if they were on another file system, mounted in the volume
        mounted.tree.identity = FileIdentity(1)
        mounted.numbers = {name: mounted.tree.inode(node) for name, node in mounted.nodes.items()}
    os.link(mounted.top / "g", mounted.top / "h")
    for name in ("f", "g", "d/f"):
        (mounted.top / name).unlink()
    mounted.removed.look([-1, 1 << 63, 99])
    mounted.look("f", "g", "d")
    eventually(lambda: mounted.forgotten() == {"f"}, "the one is forgotten")
    mounted.removed.look([ALL_KNOWN])
    eventually(lambda: mounted.forgotten() == {"f", "d/f"}, "the other, too")


def test_what_is_used_is_tried_until_it_is_forgotten(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removed_files, "_AGAIN_SECONDS", 0.01)
    mounted.kernel.used = [mounted.nodes["f"]]
    for name in ("f", "g"):
        (mounted.top / name).unlink()
    mounted.look("f")
    eventually(lambda: len(mounted.kernel.pruned) > 2, "it is tried again")
    mounted.look("g")
    eventually(lambda: mounted.forgotten() == {"g"}, "another is forgotten meanwhile")
    mounted.kernel.used = ()
    eventually(lambda: mounted.forgotten() == {"f", "g"}, "it is forgotten")
    tried = len(mounted.kernel.pruned)
    assert lasts(lambda: len(mounted.kernel.pruned) == tried)


def test_an_earlier_kernel_is_told_where_it_was(tmp_path: Path) -> None:
    mounted = Mounted(tmp_path, prunes=False)
    for name in ("f", "d/x (deleted)"):
        (tmp_path / name).unlink()
    mounted.look("f", "d/x (deleted)")
    eventually(lambda: mounted.forgotten() == {"f", "d/x (deleted)"}, "they are forgotten")
    there = {(directory, name) for _, directory, name in mounted.kernel.pruned}
    assert there == {(ROOT, b"f"), (mounted.nodes["d"], b"x (deleted)")}
    mounted.close()

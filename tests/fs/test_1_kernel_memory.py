# SPDX-License-Identifier: Apache-2.0
"""A kernel is told to forget files when it knows too many, or a lookup has found no descriptor."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from millpond.fs.coherence.device_client import DeviceDelegationBreaker
from millpond.fs.coherence.device_fs import DeviceFs
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs import kernel_memory
from millpond.fs.vfs.inode_api import ROOT, KnownFile, Node
from millpond.fs.vfs.kernel_memory import KernelMemory

from ..waiting import eventually
from .caching_client import Kernel
from .support import SOON, Doing, lasts


class Remembering(Kernel):
    """A kernel that knows files 1 to ``count`` and forgets what it is told to once it ``may``."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.known = [(Node(number), ROOT, b"") for number in range(1, count + 1)]
        self.may, self.rounds = threading.Event(), 0
        self.may.set()

    def prune(self, files: Sequence[KnownFile]) -> None:
        assert self.may.wait(SOON)
        self.rounds += 1
        self.known = [file for file in self.known if file not in files]


def memory_of(kernel: Remembering, most: int) -> KernelMemory:
    made = KernelMemory(most, lambda: len(kernel.known), lambda: kernel.known)
    made.start(kernel)
    return made


def test_the_least_needed_are_forgotten_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_memory, "_AT_ONCE", 10)
    kernel = Remembering(101)
    memory = memory_of(kernel, 100)
    kernel.may.clear()
    for count in (100, 101, 101, 102):  # nothing at first, then one round at a time
        memory.check(count)
    kernel.may.set()
    eventually(lambda: not memory._lock.locked(), "the round is over")
    assert kernel.known == [(Node(number), ROOT, b"") for number in range(31, 102)] and kernel.rounds == 3


class Slow(Remembering):
    """A kernel that takes a while to forget the files of a tree."""

    def __init__(self, tree: BackingFs) -> None:
        super().__init__(0)
        self._tree = tree
        self.may.clear()

    def prune(self, files: Sequence[KnownFile]) -> None:
        super().prune(files)
        for node, _, _ in files:
            self._tree.forget(node, 1)


def test_a_lookup_without_a_descriptor_waits_for_one(tmp_path: Path) -> None:
    """Before: it failed with EMFILE if the kernel was not told in time."""
    for name in "abc":
        (tmp_path / name).touch()
    root = os.open(tmp_path, os.O_PATH)
    tree = BackingFs(root)
    kernel, nobody = Slow(tree), tmp_path / "no manager"

    def found() -> Sequence[KnownFile]:
        return [(node, ROOT, b"") for node in tree.nodes_of(None)]

    memory = KernelMemory(1000, lambda: len(found()), found)
    memory.start(kernel)
    mount = DeviceFs(tree, DeviceDelegationBreaker(nobody), memory)
    first = [mount.lookup(ROOT, name) for name in (b"a", b"b")]
    with tree.pinned(first[-1].node) as last:
        tree.last_descriptor = last
    looking = Doing(mount.lookup, ROOT, b"c")
    assert lasts(lambda: not looking.done)
    kernel.may.set()
    assert looking.result().attributes.size == 0
    assert not tree.knows(first[0].node) and not tree.knows(first[1].node)
    tree.close()
    os.close(root)

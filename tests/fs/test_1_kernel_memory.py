# SPDX-License-Identifier: Apache-2.0
"""A kernel is told to forget files when a lookup has found no descriptor."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from millpond.fs.coherence.device_client import DeviceDelegationBreaker
from millpond.fs.coherence.device_fs import DeviceFs
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import ROOT, KnownFile
from millpond.fs.vfs.kernel_memory import KernelMemory

from .caching_client import Kernel
from .support import SOON, Doing, lasts


class Slow(Kernel):
    """A kernel that takes a while to forget the files of a tree."""

    def __init__(self, tree: BackingFs) -> None:
        super().__init__()
        self._tree, self.may = tree, threading.Event()

    def prune(self, files: Sequence[KnownFile]) -> None:
        assert self.may.wait(SOON)
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

# SPDX-License-Identifier: Apache-2.0
"""A real kernel: attributes in a reply that is overtaken by their recall are not cached."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.fs.fuse.abi import Code
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.server import FuseServer
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import CachedAttributes, FoundEntry, Node

from .conftest import InNamespace
from .world import World

NEW_SIZE = 7


class Overtaken(BackingFs):
    """A tree whose kernel may cache for long what it is told. ``overtake`` is called with the node in the
    next reply that has attributes, before that is sent.
    """

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.overtake: Callable[[Node], None] | None = None

    def _replied(self, node: Node) -> None:
        if self.overtake:
            does, self.overtake = self.overtake, None
            does(node)

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        found = replace(super().lookup(parent, name), seconds=100.0, name_seconds=100.0)
        self._replied(found.node)
        return found

    def getattr(self, node: Node) -> CachedAttributes:
        known = replace(super().getattr(node), seconds=100.0)
        self._replied(node)
        return known

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        overtake, self.overtake = self.overtake, None  # not of the lookup that is part of it
        found = super().link(node, parent, name)  # as a lookup of the new name
        self.overtake = overtake
        self._replied(node)
        return found


ASKING: dict[str, Callable[[Path], object]] = {
    "FUSE_GETATTR": lambda file: file.stat(),
    "FUSE_SETATTR of nothing": lambda file: os.chown(file, -1, -1),
    "FUSE_LINK": lambda file: file.with_name("g").hardlink_to(file),
}
WithKernel = Callable[[Callable[[Overtaken, FuseDevice, Path], None]], None]


@pytest.fixture
def with_kernel(world: World, in_namespace: InNamespace) -> WithKernel:
    """Run a function with a tree, the kernel that it is mounted in, and a file whose attributes that kernel
    has cached.
    """

    def run(body: Callable[[Overtaken, FuseDevice, Path], None]) -> None:
        def inside() -> None:
            world.backing.mkdir()
            (world.backing / "f").touch()
            root = os.open(world.backing, os.O_PATH)
            tree, kernel = Overtaken(root), FuseDevice(world.device, "csd0", root)
            threading.Thread(target=FuseServer(kernel, tree).serve, daemon=True).start()
            if not kernel.caches_names:
                pytest.skip("the kernel looks each name up, and has its attributes anew (before Linux 6.16)")
            file = world.device / "f"
            file.stat()
            asked = sum(kernel.asked.values())
            assert not file.stat().st_size and sum(kernel.asked.values()) == asked
            body(tree, kernel, file)

        in_namespace(inside)

    return run


@pytest.mark.parametrize("how", ASKING)
def test_a_reply_that_its_recall_overtakes(world: World, with_kernel: WithKernel, how: str) -> None:
    def body(tree: Overtaken, kernel: FuseDevice, file: Path) -> None:
        def overtake(node: Node) -> None:
            os.truncate(world.backing / "f", NEW_SIZE)
            assert kernel.drop(node, data=False)

        tree.overtake = overtake
        if how == "FUSE_GETATTR":
            for node in tree.nodes_of(None):
                kernel.drop(node, data=False)
        ASKING[how](file)
        assert tree.overtake is None, "there was such a reply"
        assert file.stat().st_size == NEW_SIZE

    with_kernel(body)


@pytest.mark.parametrize("how", ["FUSE_SETATTR of nothing", "FUSE_LINK"])
def test_replies_that_the_kernel_takes_however_old_they_are(with_kernel: WithKernel, how: str) -> None:
    """Linux takes the attributes in a reply to FUSE_LINK also if they were dropped meanwhile; before 6.16 in
    one to FUSE_SETATTR, too.
    """

    def body(_tree: Overtaken, kernel: FuseDevice, file: Path) -> None:
        place = os.open(file, os.O_PATH)  # that the kernel asks for no other attributes
        ASKING[how](file)
        asked = kernel.asked[Code.GETATTR]
        os.fstat(place)
        assert kernel.asked[Code.GETATTR] == asked + 1
        os.close(place)

    with_kernel(body)

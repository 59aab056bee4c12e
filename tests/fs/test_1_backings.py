# SPDX-License-Identifier: Apache-2.0
"""Backing files for passthrough stay registered for a while after their last close."""

from __future__ import annotations

import itertools

from millpond.fs.fuse.backings import Backings
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Handle


class Kernel:
    """Files that are registered, by their numbers."""

    passthrough_refusal = ""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def open_backing(self, descriptor: int) -> int:
        number = next(self._numbers)
        self.registered[number] = descriptor
        return number

    def close_backing(self, backing: int) -> None:
        del self.registered[backing]


def test_those_closed_longest_ago_go_first() -> None:
    kernel = Kernel()
    backings = Backings(kernel, 2)
    for number, node in enumerate(map(Node, (10, 11, 12, 10, 11))):
        backings.open(node, Handle(number), lambda handle: 100 + handle)
        backings.close(node, Handle(number))
        assert len(kernel.registered) <= 2
    assert sorted(kernel.registered.values()) == [103, 104]

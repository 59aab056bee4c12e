# SPDX-License-Identifier: Apache-2.0
"""Backing files for passthrough are registered while they are open."""

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


def test_a_file_is_registered_once_while_it_is_open() -> None:
    kernel, node = Kernel(), Node(10)
    backings = Backings(kernel)
    numbers = [backings.open(node, Handle(handle), lambda handle: 100 + handle) for handle in (1, 2)]
    assert numbers == [1, 1] and kernel.registered == {1: 101}
    backings.close(node, Handle(1))
    backings.close(node, Handle(1))
    assert kernel.registered
    backings.close(node, Handle(2))
    assert not kernel.registered

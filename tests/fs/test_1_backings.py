# SPDX-License-Identifier: Apache-2.0
"""Backing files for passthrough stay registered for a while after their last close."""

from __future__ import annotations

import errno
import itertools

from millpond.fs.fuse.backings import Backings
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Handle, os_error

F, G, H = Node(10), Node(11), Node(12)


class Kernel:
    """Files that are registered, by their numbers."""

    passthrough_refusal = ""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.full = False
        self._numbers = itertools.count(1)

    def open_backing(self, descriptor: int) -> int:
        if self.full:
            raise os_error(errno.ENFILE)
        number = next(self._numbers)
        self.registered[number] = descriptor
        return number

    def close_backing(self, backing: int) -> None:
        del self.registered[backing]


def descriptor(handle: Handle) -> int:
    return 100 + handle


def test_a_file_is_registered_once() -> None:
    kernel = Kernel()
    backings = Backings(kernel)
    assert backings.open(F, Handle(1), descriptor) == backings.open(F, Handle(2), descriptor) == 1
    backings.close(F, Handle(1))
    backings.close(F, Handle(2))
    assert backings.open(F, Handle(3), descriptor) == 1 and kernel.registered == {1: 101}


def test_a_file_that_the_kernel_forgets_is_not_kept() -> None:
    kernel = Kernel()
    backings = Backings(kernel)
    backings.open(F, Handle(1), descriptor)
    backings.forget(F)  # of one lookup of many: it is open
    assert kernel.registered
    backings.close(F, Handle(1))
    backings.forget(F)
    backings.forget(F)
    assert not kernel.registered
    assert backings.open(F, Handle(2), descriptor) == 2


def test_those_closed_longest_ago_go_first() -> None:
    kernel = Kernel()
    backings = Backings(kernel, 2)
    for number, node in enumerate((F, G, H, F, G)):
        backings.open(node, Handle(number), descriptor)
        backings.close(node, Handle(number))
        assert len(kernel.registered) <= 2
    assert sorted(kernel.registered.values()) == [103, 104]


def test_what_the_kernel_refuses_is_not_used() -> None:
    kernel = Kernel()
    backings = Backings(kernel)
    kernel.full = True
    assert backings.open(F, Handle(1), descriptor) is None
    backings.close(F, Handle(1))
    kernel.full, kernel.passthrough_refusal = False, "for this test"
    assert backings.open(F, Handle(1), descriptor) is None

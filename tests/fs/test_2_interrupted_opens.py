# SPDX-License-Identifier: Apache-2.0
"""A program that is interrupted while it opens a file leaves nothing open on the device."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest

from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.operation import Operation, current

from ..waiting import eventually
from .support import SOON, Doing, Server, errno_of


@pytest.mark.parametrize("is_late", [False, True])
def test_a_create_that_is_interrupted_leaves_no_open_file(
    tree: RemoteFs, server: Server, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Whether the flash is done before or after the next request."""
    made, answering, creating = threading.Event(), threading.Event(), BackingFs.create
    operation = Operation(time.monotonic())

    def create(*arguments: Any, **more: Any) -> Any:
        found = creating(*arguments, **more)
        made.set()
        assert answering.wait(4 * SOON)
        return found

    def make() -> None:
        current.set(operation)
        tree.create(ROOT, b"f", os.O_RDWR, 0o644, None)

    monkeypatch.setattr(BackingFs, "create", create)
    making = Doing(errno_of, make)
    assert made.wait(SOON)
    operation.interrupt()
    assert making.result() == errno.EINTR
    if is_late:
        tree.statfs()
    answering.set()
    tree.statfs()
    eventually(lambda: not server.open_files, "nothing is open")
    assert tree.lookup(ROOT, b"f").attributes.size == 0

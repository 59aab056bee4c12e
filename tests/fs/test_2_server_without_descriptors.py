# SPDX-License-Identifier: Apache-2.0
"""The server without free descriptors, and a change whose client has stopped waiting."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.vfs.inode_api import ROOT

from .support import SOON, Server


def test_more_files_than_descriptors(tree: RemoteFs, server: Server, top: Path) -> None:
    """What was found longest ago is found again by its name; what is open is not affected."""
    (top / "public").mkdir()
    for number in range(60):
        (top / "public" / f"{number}").write_text(f"{number}")
    public = tree.lookup(ROOT, b"public").node
    held = tree.lookup(public, b"0").node
    handle = tree.open(held, os.O_RDONLY)
    server.tree.max_descriptors = 20
    nodes = [tree.lookup(public, b"%d" % number).node for number in range(60)]
    assert len(set(nodes)) == 60
    for number in (1, 59, 30, 1):
        assert tree.getattr(nodes[number]).attributes.size == len(f"{number}")
    assert bytes(tree.read(handle, 10, 0)) == b"0"
    assert tree.getattr(held).attributes.size == 1


@pytest.fixture
def shared(top: Path) -> Iterator[Server]:
    made = Server(top, public=b"public")
    yield made
    made.drop()
    made.sessions.close()
    os.close(made.root)


def test_a_change_that_nobody_waits_for_is_not_done(shared: Server, top: Path) -> None:
    """Its client has hung up while it waited for another that does not give up what it keeps."""
    server, tree = shared, RemoteFs(shared.dial, timeout=SOON)
    (top / "public").mkdir()
    (top / "public" / "a").write_text("a")
    public = tree.lookup(ROOT, b"public").node
    inode = (top / "public").stat().st_ino
    manager, done = server.sessions.delegations, threading.Event()
    other = manager.join()
    manager.begin_lease(other, lambda: False)
    assert manager.grant_read(other, inode)

    def remove() -> None:
        try:
            tree.unlink(public, b"a")
        except OSError:
            done.set()

    thread = threading.Thread(target=remove)
    thread.start()
    while not manager.next_recall(other, 0.05)[0]:
        assert thread.is_alive()
    for channel in list(server.channels):
        channel.shut_down()
    assert done.wait(20)
    manager.expire(other)
    tree.close()
    thread.join()
    assert (top / "public" / "a").exists()


def test_a_removed_file_is_not_kept_on_the_flash(tree: RemoteFs, server: Server, top: Path) -> None:
    """Once nobody uses it here, the server hears so with the next request."""
    (top / "public").mkdir()
    (top / "public" / "a").write_text("a")
    public = tree.lookup(ROOT, b"public").node
    found = tree.lookup(public, b"a").node
    before = len(list(Path("/proc/self/fd").iterdir()))
    tree.unlink(public, b"a")
    tree.forget(found, 1)
    tree.statfs()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1

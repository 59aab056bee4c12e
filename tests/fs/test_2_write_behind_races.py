# SPDX-License-Identifier: Apache-2.0
"""A client gathers writes to new files while others look, make files and close descriptors."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Handle

from .caching_client import Client, Device, make
from .gathering_clients import client, close, device, patience, public, server
from .support import Doing, Server, errno_of

__all__ = ["client", "device", "patience", "public", "server"]


def test_what_is_written_while_the_first_descriptor_is_released_is_kept(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    second = client.tree.open(node, os.O_RDWR)
    assert client.gather(node, b"data")
    client.gate.shut("fs.written")
    releasing = Doing(client.tree.release, handle)
    client.gate.reached()
    gathered = client.gather(node, b"more", 4)
    client.gate.open()
    releasing.result()
    assert gathered or client.tree.write(second, b"more", 4) == 4
    close(client, second)
    assert (public / "f").read_bytes() == b"datamore"


def test_a_file_that_was_looked_at_before_its_reply_came_is_written_through(
    client: Client, device: Device
) -> None:
    """Though the client has been granted the file since."""
    client.gate.shut("fs.opened")
    making = Doing(make, client, b"f")
    client.gate.reached()
    assert Doing(device.find, b"f").result() and client.find(b"f")
    client.gate.open()
    assert not client.gather(making.result()[0], b"data")


def test_a_create_that_fails_takes_nothing_from_another_file(
    client: Client, device: Device, server: Server, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though that file may have been given the inode number of the one without a name."""
    (public / "f").touch()
    (public / "d").mkdir()
    directory, delegations = client.find(b"d"), server.sessions.delegations
    made, forget = dict[bytes, tuple[Node, Handle]](), delegations.forget

    def make_others_and_forget(holder: Holder, inode: int) -> None:
        monkeypatch.setattr(delegations, "forget", forget)
        made.update({name: make(client, name, directory) for name in (b"a", b"b", b"c")})
        forget(holder, inode)

    monkeypatch.setattr(delegations, "forget", make_others_and_forget)
    assert errno_of(make, client, b"f") == errno.EEXIST and made
    for name, (node, _) in made.items():
        assert client.gather(node, b"data")
        found = Doing(device.tree.lookup, device.find(b"d"), name).result()
        assert found.attributes.size == 4


def test_a_create_while_the_devices_mount_goes_is_done_once(
    client: Client, server: Server, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel binding performs it: where it would wait, once more. Who wants a new file gets one."""
    creating = BackingFs.create

    def create(*arguments: Any, **more: Any) -> Any:
        made = creating(*arguments, **more)
        server.sessions.delegations.lose_device(None)
        return made

    monkeypatch.setattr(BackingFs, "create", create)
    assert Doing(make, client, b"f", may_wait=False).result() and (public / "f").exists()

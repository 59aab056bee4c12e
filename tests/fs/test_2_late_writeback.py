# SPDX-License-Identifier: Apache-2.0
"""Dirty pages of a client's kernel are written back, unless they come too late."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millpond.fs.coherence.coherent_fs import CoherentFs
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.vfs.inode_api import page_writeback
from millpond.fs.vfs.path_api import Handle

from ..waiting import eventually
from .caching_client import Client, Device
from .recall_clients import client, device, server
from .support import Doing, Server, errno_of

__all__ = ["client", "device", "server"]


@pytest.fixture
def lease() -> float:
    """So long that no lease ends by itself."""
    return 120.0


@pytest.fixture
def manager(server: Server) -> DelegationManager:
    return server.sessions.delegations


def write_back(client: Client, handle: Handle, data: bytes) -> int:
    """As the kernel does with what was stored to a mapping."""
    page_writeback.set(True)
    try:
        return client.tree.write(handle, data, 0)
    finally:
        page_writeback.set(False)


def test_what_is_written_back_while_it_is_recalled_is_in_time(client: Client, device: Device) -> None:
    f = client.find(b"f")
    client.read(f)
    with client.opened(f, os.O_RDWR) as handle:
        writing: list[Doing] = []

        def before(_node: int) -> None:
            if not writing:
                writing.append(Doing(write_back, client, handle, b"in time"))
                assert writing[0].result() == 7

        client.kernel.before = before
        device.put(b"f", b"x")
        assert writing and client.read(f) == b"x"


def test_what_others_have_changed_since_the_lease_was_over_stays(
    client: Client, device: Device, server: Server, manager: DelegationManager
) -> None:
    f, g = client.find(b"f"), client.find(b"g")
    client.read(f), client.read(g)
    known = server.sessions.find(client.tree.rpc.client)
    assert known and known.callback_channel
    with client.opened(f, os.O_RDWR) as to_f, client.opened(g, os.O_RDWR) as to_g:
        manager.expire(known.holder)
        assert write_back(client, to_f, b"nobody minds") == 12
        device.put(b"f", b"longer")
        assert errno_of(write_back, client, to_f, b"late") == errno.EIO
        assert write_back(client, to_g, b"unchanged") == 9
        assert client.tree.write(to_f, b"l", 0) == 1  # which is done now
        known.callback_channel.shut_down()
        eventually(
            lambda: not manager.is_stale(known.holder, client.inode(f)), "what was late has been given up"
        )
        client.await_lease()
        assert write_back(client, to_f, b"L") == 1 and client.read(f) == b"Longer"


def test_what_becomes_late_just_before_it_is_written(
    client: Client,
    device: Device,
    server: Server,
    manager: DelegationManager,
    top: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    f = client.find(b"f")
    client.read(f)
    known = server.sessions.find(client.tree.rpc.client)
    assert known
    original = CoherentFs.write

    def after_the_device(*arguments: object, **more: object) -> int:
        monkeypatch.setattr(CoherentFs, "write", original)
        Doing(device.put, b"f", b"the device's").result()
        return original(*arguments, **more)  # type: ignore[arg-type]

    with client.opened(f, os.O_RDWR) as handle:
        manager.expire(known.holder)
        monkeypatch.setattr(CoherentFs, "write", after_the_device)
        assert errno_of(write_back, client, handle, b"late") == errno.EIO
    assert (top / "public" / "f").read_bytes() == b"the device's"

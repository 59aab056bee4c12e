# SPDX-License-Identifier: Apache-2.0
"""Fixtures of a client that gathers small writes to new files, which nothing sends by the clock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.client import write_behind
from millpond.fs.coherence.lease_file import open_leases
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Handle

from .caching_client import Client, Device, make, shared
from .support import Server

LEASE = 1.5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    leases = open_leases(tmp_path / "leases")
    with shared(tmp_path, LEASE, leases) as made:
        yield made
    os.close(leases)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent by the clock."""
    monkeypatch.setattr(write_behind, "_TICK_SECONDS", 1000.0)
    monkeypatch.setattr(write_behind, "_JOIN_SECONDS", 0.1)


@pytest.fixture
def device(server: Server) -> Device:
    return Device(server)


@pytest.fixture
def client(server: Server, device: Device, patience: None) -> Iterator[Client]:
    made = Client(server)
    yield made
    with contextlib.suppress(OSError):
        made.close()


@pytest.fixture
def public(tmp_path: Path) -> Path:
    return tmp_path / "public"


def written(client: Client, name: bytes = b"f", data: bytes = b"data") -> tuple[Node, Handle]:
    """A new file with data that the server does not have."""
    node, handle = make(client, name)
    assert client.gather(node, data)
    return node, handle


def close(client: Client, handle: Handle) -> None:
    """As the kernel does for the last descriptor."""
    try:
        client.tree.write_behind.close_descriptor(handle)
    finally:
        client.tree.release(handle)

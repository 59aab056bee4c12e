# SPDX-License-Identifier: Apache-2.0
"""A client that caches attributes, and files with several names."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Attributes

from .caching_client import Client, Device, make, shared
from .support import errno_of

LEASE = 2.0


@pytest.fixture
def client(top: Path) -> Iterator[Client]:
    with shared(top, LEASE) as server:
        device = Device(server)
        device.put(b"f", b"one")
        device.put(b"other", b"two")
        made = Client(server)
        made.await_lease()
        yield made
        made.close()


def remove(client: Client) -> None:
    client.tree.unlink(client.public, b"f")


def replace(client: Client) -> None:
    client.tree.rename(client.public, b"other", client.public, b"f")


def move(client: Client) -> None:
    client.tree.rename(client.public, b"f", client.public, b"new")


def fill(client: Client) -> Node:
    """A directory that cannot be removed."""
    made = client.tree.mkdir(client.public, b"d", 0o755, None).node
    client.tree.release(client.tree.create(made, b"in it", os.O_WRONLY, 0o644, None)[1])
    return made


@pytest.mark.parametrize("change", [remove, replace, move])
def test_a_name_that_is_taken_away_counts_though_the_file_was_found_by_another(
    client: Client, top: Path, change: Callable[[Client], None]
) -> None:
    """Names are forgotten when a change of their directory fails; a kernel knows them still."""
    fill(client)
    node = client.find(b"f")
    client.tree.link(node, client.public, b"g")
    assert errno_of(client.tree.rmdir, client.public, b"d") == errno.ENOTEMPTY
    assert client.find(b"g") == node and client.tree.getattr(node).attributes.links == 2
    change(client)
    now = (top / "public" / "g").stat()
    assert told(client.tree.getattr(node).attributes) == (now.st_nlink, now.st_ctime_ns)


def told(attributes: Attributes) -> tuple[int, int]:
    return attributes.links, attributes.ctime


def test_of_two_names_of_a_file_both_stay_if_one_is_moved_to_the_other(client: Client) -> None:
    """As rename(2) has it; kernels see to it themselves, other users of a client do not."""
    node, handle = make(client, b"a")
    client.tree.link(node, client.public, b"b")
    client.tree.rename(client.public, b"a", client.public, b"b")
    assert client.find(b"a") == client.find(b"b") == node and {"a", "b"} <= client.names()
    client.tree.release(handle)

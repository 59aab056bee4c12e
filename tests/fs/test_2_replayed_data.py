# SPDX-License-Identifier: Apache-2.0
"""Data that a client had gathered of open files when its server was killed is told to the next one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from .caching_client import Client, make
from .gathering_clients import client, close, device, patience, public
from .killed_servers import back, cut_at, down, server, was_cut
from .support import errno_of

__all__ = ["client", "device", "patience", "public", "server"]
pytestmark = pytest.mark.usefixtures("patience")
BIG = os.urandom(100_000)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("closing", [True, False])
def test_gathered_data_of_a_file_that_is_open(
    client: Client, public: Path, named: bool, closing: bool
) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, BIG)
    if named:
        client.tree.async_create.flush()
    down(client)
    if closing:
        client.server.refusing = False
        close(client, handle)
    back(client)
    assert (public / "f").read_bytes() == BIG == client.read(node)
    if not closing:
        close(client, handle)


def test_gathered_data_of_which_the_reply_was_lost(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, BIG)
    cut_at(client, "fs.gathered", done=True)
    assert errno_of(client.tree.write_behind.close_descriptor, handle) == errno.EIO and was_cut()
    down(client)
    back(client)
    client.tree.write_behind.close_descriptor(handle)
    assert (public / "f").read_bytes() == BIG
    client.tree.release(handle)


@pytest.mark.expected_log("are lost that did not reach")
@pytest.mark.parametrize("why", ["expired", "appended"])
def test_gathered_data_that_others_may_have_seen_or_may_be_there_twice(
    client: Client, public: Path, why: str
) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, BIG, 0, os.O_RDWR | os.O_APPEND if why == "appended" else os.O_RDWR)
    client.tree.async_create.flush()
    down(client, expired=why == "expired")
    back(client)
    assert [errno_of(client.tree.write_behind.close_descriptor, handle) for _ in range(2)] == [
        errno.EIO,
        None,
    ]
    assert (public / "f").read_bytes() == b""

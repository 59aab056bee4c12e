# SPDX-License-Identifier: Apache-2.0
"""Files that a client has opened without the server's knowledge, and other replies that cross a recall."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millpond.fs.vfs.inode_api import CacheMode, Node
from millpond.fs.vfs.path_api import Handle

from ..waiting import eventually
from .caching_client import WHOLE, Client, Device
from .recall_clients import client, device, lease, other, server
from .support import Doing, Held, Server, errno_of

__all__ = ["client", "device", "lease", "other", "server"]


def opened_silently(client: Client, node: Node) -> Handle:
    """A handle of which the server knows nothing."""
    assert client.kept(node)
    handle = client.tree.open(node, os.O_RDONLY)
    assert client.tree.files.get(handle).local
    return handle


def test_a_file_that_is_open_without_a_word_is_not_written_by_the_kernel(
    client: Client, device: Device
) -> None:
    node = client.find(b"f")
    handles = [opened_silently(client, node) for _ in range(2)]
    assert not device.written_by_kernel(b"f")
    client.tree.release(handles[0])
    assert client.kept(node)
    assert not device.written_by_kernel(b"f")
    client.tree.release(handles[1])
    client.tree.statfs()
    assert device.written_by_kernel(b"f")


def test_a_file_that_is_closed_while_it_is_recalled(client: Client, device: Device) -> None:
    """Before the server has heard that it was open: it must not think so for good."""
    node = client.find(b"f")
    handle = opened_silently(client, node)
    closed: list[int] = []

    def before(dropped: int) -> None:
        if dropped == node and not closed:
            closed.append(dropped)
            client.tree.release(handle)

    client.kernel.before = before
    device.put(b"f", b"two")
    assert closed
    client.tree.statfs()
    eventually(lambda: device.written_by_kernel(b"f"), "the kernel may write the file")


@pytest.mark.parametrize("how", ["its connection is lost", "the server forgets it"])
def test_a_file_that_is_open_without_a_word_is_named_again(
    client: Client, device: Device, server: Server, how: str
) -> None:
    node = client.find(b"f")
    opened_silently(client, node)
    assert not device.written_by_kernel(b"f")
    known = server.sessions.find(client.tree.session.client)
    assert known and known.callback_channel
    if how == "the server forgets it":
        server.forget()
    known.callback_channel.shut_down()
    eventually(lambda: node in [which for which, _ in client.kernel.dropped[1:]], "the file is dropped")
    client.await_lease()
    assert client.kept(node)
    assert not device.written_by_kernel(b"f")


def test_a_file_that_the_kernel_came_to_write_can_still_be_read(
    client: Client, device: Device, server: Server
) -> None:
    """It was opened without a word, the lease ended, and the device's kernel writes it by now."""
    node = client.find(b"f")
    handle = opened_silently(client, node)
    known = server.sessions.find(client.tree.session.client)
    assert known and known.callback_channel
    server.refusing = True
    known.callback_channel.shut_down()
    eventually(lambda: not server.sessions.delegations.has_lease(known.holder), "the lease is over")
    writing = device.tree.open(device.find(b"f"), os.O_RDWR)
    assert device.tree.cache_mode(writing) is CacheMode.PASSTHROUGH
    os.pwrite(device.tree.descriptor(writing), b"two", 0)
    server.refusing = False
    client.await_lease()
    assert bytes(client.tree.read(handle, WHOLE, 0)) == b"two"
    os.pwrite(device.tree.descriptor(writing), b"six", 0)
    assert bytes(client.tree.read(handle, WHOLE, 0)) == b"six"
    device.tree.release(writing)


def test_a_file_that_is_forgotten_while_another_slot_finds_it(client: Client, device: Device) -> None:
    """What was granted with it must not count then: the server will not recall it."""
    node = client.find(b"f")
    client.tree.forget(node, 1)
    client.gate.shut("fs.found")
    book = client.tree.session.inodes
    with client.tree.session.lock:
        book.forget_idle()
    doing = Doing(client.find, b"f")  # the server has found it, the client has not heard of it
    client.gate.reached()
    device.put(b"other", b"")
    for number in range(64):  # so many that the server is told
        device.put(b"%d" % number, b"")
        client.tree.forget(client.find(b"%d" % number), 1)
    with client.tree.session.lock:
        book.forget_idle()
    client.tree.statfs()
    client.gate.open()
    again = doing.result()
    device.put(b"f", b"longer")
    assert client.size(again) == 6


def test_a_change_that_failed_nobody_knows_how_is_looked_at(device: Device, server: Server) -> None:
    """It takes too long, is given up, and is done after all."""
    device.put(b"f", b"one")
    device.put(b"g", b"another")
    slow = Client(server, timeout=0.5)
    node = slow.find(b"f")
    assert slow.names() == {"f", "g"} and slow.size(node) == 3
    unlinking = Held(server.tree, "unlink")
    assert errno_of(slow.tree.unlink, slow.public, b"f") == errno.ETIMEDOUT
    unlinking.go_on.set()
    named = Path(f"/proc/self/fd/{server.root}") / "public" / "f"
    eventually(lambda: not named.exists(), "the name is gone after all")
    eventually(lambda: slow.names() == {"g"}, "the client sees that the name is gone")
    slow.close()

# SPDX-License-Identifier: Apache-2.0
"""A client gives up its cached state when its lease is over."""

from __future__ import annotations

import threading
import time

import pytest

from millpond.base.deadline import Deadline
from millpond.fs.client import callbacks
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

from ..waiting import eventually
from .caching_client import Client, Device
from .recall_clients import LEASE, client, device, lease, other, server
from .support import SOON, Server

__all__ = ["client", "device", "lease", "other", "server"]


class TestLeases:
    """That end."""

    @pytest.fixture
    def lease(self) -> float:
        return LEASE

    def test_a_lease_is_kept_up(self, client: Client, device: Device) -> None:
        node = client.find(b"f")
        client.read(node)
        end = time.monotonic() + 2 * LEASE
        while time.monotonic() < end:
            time.sleep(0.1)
            assert client.kept(node)
        assert not client.kernel.dropped

    def test_everything_is_dropped_at_the_end_of_a_lease(
        self, client: Client, device: Device, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node = client.find(b"f")
        client.read(node)
        silence = threading.Event()
        real = server.sessions.delegations.next_recall

        def silent(*arguments: object) -> object:
            silence.wait(4 * SOON)
            return real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(server.sessions.delegations, "next_recall", silent)
        eventually(lambda: (node, True) in client.kernel.dropped, "the file is dropped")
        assert not client.kept(node)  # it is known, but not for long
        assert client.size(node) == 3
        device.put(b"f", b"longer")
        assert client.size(node) == 6
        silence.set()
        client.await_lease()
        assert client.kept(node) and client.size(node) == 6


class TestLeasesThatAreLong:
    """So long that none ends by itself."""

    @pytest.fixture
    def lease(self) -> float:
        return 1000.0

    def test_a_quarter_of_the_lease_is_left_to_drop_everything(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the kernel has mapped is read without asking, until it is dropped."""
        left: list[float | None] = []
        real = callbacks._receive

        def receive(channel: Channel, deadline: Deadline) -> Message:
            left.append(deadline.remaining())
            return real(channel, deadline)

        monkeypatch.setattr(callbacks, "_receive", receive)
        eventually(lambda: len(left) > 2, "the client waits for recalls")
        assert all(each is not None and 600 < each <= 800 for each in left)

    def test_open_files_are_dropped_first(self, client: Client, server: Server) -> None:
        read, opened, known = client.find(b"f"), client.find(b"g"), client.public
        client.read(read)
        with client.opened(opened):
            callback = getattr(server.sessions.find(client.tree.rpc.client), "callback_channel", None)
            assert isinstance(callback, Channel)
            callback.shut_down()
            eventually(lambda: len(client.kernel.dropped) > 3, "everything is dropped")
        order = [node for node, _ in client.kernel.dropped]
        assert order[:2] == [opened, read] and known in order[2:]

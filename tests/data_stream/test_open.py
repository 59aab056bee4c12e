# SPDX-License-Identifier: Apache-2.0
"""Where a stream is: an address, or a device of the launch that the process is in."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

import millpond.data
from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.data.streaming.client import TcpAddress
from millpond.data.streaming.open import located
from millpond.train.distributed import data_services
from millpond.train.distributed.data_service_messages import REQUESTS_CHANNEL, DataFound, FindData
from millpond.train.distributed.group_messages import GROUP_CHANNEL
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """The other end of this process's channel to a launch."""
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(REQUESTS_CHANNEL, str(theirs.detach()))
    data_services._channel.cache_clear()
    with Channel(ours, "a script") as channel:
        yield channel
    data_services._channel().close()
    data_services._channel.cache_clear()


def answered(launch: Channel, answer: Message) -> threading.Thread:
    def run() -> None:
        assert launch.expect(FindData, Deadline.after(10)) == FindData("csd0")
        launch.send(answer, Deadline.after(10))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_device_of_the_launch_is_found(launch: Channel) -> None:
    thread = answered(launch, DataFound("10.77.0.2", 4000, "secret"))
    assert located("csd0:public/a/b", "") == (TcpAddress("10.77.0.2", 4000), "a/b", "secret")
    thread.join()


def test_a_refusal_is_one_line(launch: Channel) -> None:
    thread = answered(launch, Failure("unknown", "csd0: no device of this launch, which has csd1"))
    with pytest.raises(LocalError, match=r"^csd0: no device of this launch, which has csd1$"):
        millpond.data.stream("csd0:public/a")
    thread.join()


def test_an_address_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUESTS_CHANNEL, raising=False)
    assert located("csd0:7001/a/b", "s") == (TcpAddress("csd0", 7001), "a/b", "s")
    assert located("[::1]:7001/a", "") == (TcpAddress("::1", 7001), "a", "")


@pytest.mark.parametrize("where", ["csd0:private/a", "csd0:public", "csd0:public/", "csd0:other/a"])
def test_public_folders_alone(where: str) -> None:
    with pytest.raises(LocalError, match="of a device, public folders alone are, such as csd0:public/folder"):
        millpond.data.stream(where)


def test_names_are_known_in_launches_with_a_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUESTS_CHANNEL, raising=False)
    with pytest.raises(LocalError, match="is known in a script of 'millpond launch' alone"):
        millpond.data.stream("csd0:public/a")
    monkeypatch.setenv(GROUP_CHANNEL, "5")
    with pytest.raises(LocalError, match="a private launch has no network"):
        millpond.data.stream("csd0:public/a")


def test_a_program_that_the_script_starts_has_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = os.dup(0)
    os.close(closed)
    monkeypatch.setenv(REQUESTS_CHANNEL, str(closed))
    data_services._channel.cache_clear()
    with pytest.raises(LocalError, match="the script's own process and its forks alone"):
        millpond.data.stream("csd0:public/a")


@pytest.mark.parametrize("where", ["images", "host/images", "host:x/images", ":1/a", "host:99999/a"])
def test_what_is_no_address_is_refused(where: str) -> None:
    with pytest.raises(LocalError, match="no address of streamed data"):
        millpond.data.stream(where)

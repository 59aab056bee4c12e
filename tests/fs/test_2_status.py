# SPDX-License-Identifier: Apache-2.0
"""The status reports of a volume's server and of a mount."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as some

from millpond.base.deadline import Deadline
from millpond.fs.client.metrics import MountStats, OperationMeter, answered_here
from millpond.fs.mount.stats_socket import read_stats, serve_stats
from millpond.fs.proto.status import GetStatus, StatusIs
from millpond.fs.store.layout import PUBLIC, prepare
from millpond.fs.store.usage import public_usage
from millpond.fs.vfs.latencies import percentile
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.linux import sockets
from millpond.wire.channel import Channel

from .support import SOON, Server


def asked(server: Server, *, count: bool = False) -> StatusIs:
    with Channel(server.raw(), "server") as channel:
        return channel.call(GetStatus(count), StatusIs, Deadline.after(SOON))


def test_a_server_tells_of_its_clients(server: Server, volume: PathAdapter, top: Path) -> None:
    assert asked(server).clients == ()
    handle = volume.open("f", os.O_RDWR | os.O_CREAT, 0o644)
    found = asked(server)
    (client,) = found.clients
    assert (client.open, client.connected, client.heard, client.kept) == (1, True, None, 0)
    assert (found.quota, found.used, found.device, found.written) == (None, None, True, 0)
    volume.release(handle)
    assert asked(server, count=True).used is None  # no public part here


def test_a_server_counts_when_it_is_asked_to(tmp_path: Path) -> None:
    backing = tmp_path / "flash"
    prepare(backing)
    (backing / PUBLIC / "f").write_bytes(bytes(10_000))
    (backing / "private" / "secret").write_bytes(bytes(100_000))
    server, usage = Server(backing, public=PUBLIC.encode()), public_usage(backing)
    assert asked(server).used is None
    found = asked(server, count=True)
    assert (found.used, found.files, found.quota) == (*usage, None)
    server.close()
    server = Server(backing, public=PUBLIC.encode(), limit=1 << 20)
    server.sessions.sandbox = "a sandbox"
    (backing / PUBLIC / "g").write_bytes(bytes(4096))
    found = asked(server)
    assert (found.used, found.files, found.quota) == (*usage, 1 << 20)
    assert found.sandbox == "a sandbox"
    found = asked(server, count=True)
    assert (found.used, found.files) == public_usage(backing) != usage
    server.close()


@given(some.lists(some.floats(0, 1000), min_size=1, max_size=50), some.floats(0.01, 1))
def test_percentiles_are_right_to_within_a_half(seconds: list[float], share: float) -> None:
    meter = OperationMeter()
    for each in seconds:
        meter.add("kind", each)
    exact = sorted(seconds)[max(0, -int(-share * len(seconds) // 1) - 1)]
    assert abs(percentile(meter.kinds["kind"], share) - exact) <= exact / 2 + 1e-6


def test_nothing_measured_is_nothing() -> None:
    assert percentile([0] * 32, 0.5) == 0
    numbers = MountStats("csd0", "/mnt")
    assert answered_here(numbers) == {"lookup": (0, 0), "getattr": (0, 0), "read": (0, 0)}


def test_what_was_not_asked_of_the_device_was_answered_here() -> None:
    took = {"fs.walk": (0, 2, 1), "fs.read": (1,), "fs.readfile": (4,)}
    numbers = MountStats("csd0", "/mnt", "", {"lookup": 10, "getattr": 5, "read": 3}, took)
    assert answered_here(numbers) == {"lookup": (7, 10), "getattr": (5, 5), "read": (0, 3)}


def test_mounts_tell_their_numbers_while_they_live(tmp_path: Path) -> None:
    directory = tmp_path / "mounts"
    assert read_stats(directory, "csd0") == []
    first = MountStats("csd0", "/a", "somehow", {"read": 1}, {"fs.read": (1, 2)}, 3, 2)
    with serve_stats(directory, lambda: first), serve_stats(directory, lambda: MountStats("csd1", "/b")):
        assert read_stats(directory, "csd0") == [first]
        dead = directory / "0.sock"
        sockets.listen(dead).close()
        assert read_stats(directory, "csd1") == [MountStats("csd1", "/b")]
        assert not dead.exists()
    assert list(directory.iterdir()) == []

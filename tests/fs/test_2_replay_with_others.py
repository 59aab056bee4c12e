# SPDX-License-Identifier: Apache-2.0
"""The replay to the next server beside other hosts, other threads, and programs that go on at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.fs.client import callbacks as recalling
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.write_behind import WriteGathered
from millpond.fs.vfs.inode_api import Node, WouldBlock
from millpond.fs.vfs.lock_types import HERE, Family, Lock, LockOwner, Mode
from millpond.fs.vfs.path_api import Handle

from ..waiting import eventually
from .caching_client import Client, Device, hold, make
from .gathering_clients import client, close, device, patience, public
from .killed_servers import LEASE, Killed, down, server
from .support import NAME, Cutting, Doing, errno_of
from .test_2_contents_with_names import closed
from .test_2_replayed_data import BIG
from .test_2_write_behind_losses import cutting

__all__ = ["client", "device", "patience", "public", "server"]
pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture
def by_hand(server: Killed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told to the next server before the test has it told."""
    monkeypatch.setattr(recalling, "_AGAIN_SECONDS", 4 * LEASE)


def quiet(client: Client, *, expired: bool = False) -> Killed:
    """Its server is killed, and the thread that hears recalls does nothing more for a long while."""
    server, channel = down(client, expired=expired), client.recalls._channel
    assert channel
    eventually(lambda: channel.sock.fileno() < 0, "the client has seen it")
    server.refusing = False
    return server


@pytest.fixture
def others() -> Iterator[list[Client]]:
    made: list[Client] = []
    yield made
    for each in made:
        each.close()


@pytest.mark.usefixtures("by_hand")
def test_hosts_do_not_wait_for_each_other_with_gathered_data(
    client: Client, server: Killed, public: Path, others: list[Client]
) -> None:
    other = Client(server)
    others.append(other)
    for each, name in ((client, b"one"), (other, b"two")):
        place = each.tree.mkdir(each.public, name, 0o755, None).node
        hold(each, place)
        assert each.gather(make(each, b"f", place)[0], BIG)
        each.tree.async_create.flush()
    quiet(client)
    eventually(lambda: not other.tree.rpc.inodes.lease_end, "the other client has seen it")
    for each in [Doing(each.tree.write_behind.flush_below, None) for each in (client, other)]:
        each.result(LEASE / 2)
    assert (public / "one" / "f").read_bytes() == BIG == (public / "two" / "f").read_bytes()


def closed_in(client: Client, directory: Node) -> None:
    """A file there that the server has not heard of."""
    node, handle = make(client, b"f", directory)
    assert client.gather(node, b"data")
    close(client, handle)


def take(other: Client, directory: Node) -> None:
    """Another host has the directory exclusively."""
    for name in (b"third", b"fourth"):
        other.tree.release(make(other, name, directory)[1])
    assert directory in other.tree.async_create.names.held


@pytest.mark.usefixtures("by_hand")
def test_what_is_made_again_stays_so_if_others_must_be_waited_for(
    client: Client, device: Device, public: Path, others: list[Client]
) -> None:
    """Else its removal by others meanwhile would be told as a loss."""
    places = [client.tree.mkdir(client.public, name, 0o755, None).node for name in (b"d", b"e")]
    for place in places:
        hold(client, place)
    handle = client.tree.opendir(places[0])
    client.tree.fsync(handle, False)
    for place in places:
        closed_in(client, place)
    quiet(client, expired=True)
    others.append(Client(client.server))
    take(others[0], others[0].find(b"e"))
    with pytest.raises(WouldBlock):
        Doing(client.tree.async_create.flush, may_wait=False).result()
    assert (public / "d" / "f").read_bytes() == b"data" and not (public / "e" / "f").exists()
    device.tree.unlink(device.tree.lookup(device.public, b"d").node, b"f")
    client.tree.async_create.flush()
    assert (public / "e" / "f").read_bytes() == b"data"
    assert errno_of(client.tree.fsync, handle, False) is None


@pytest.mark.usefixtures("by_hand")
def test_a_server_that_did_nothing_proves_nothing_about_the_one_before(
    client: Client, public: Path, others: list[Client]
) -> None:
    """One makes the file and is killed before it answers; for the next one another host must be waited for,
    within the same request.
    """
    handle = client.tree.opendir(client.public)
    client.tree.fsync(handle, False)
    closed(client)
    server = quiet(client, expired=True)

    def next_one() -> None:
        server.sessions.delegations._leases = None
        server.drop()
        server.forget()
        others.append(Client(server))
        take(others[0], others[0].public)

    cutting(client)
    Cutting.then = staticmethod(lambda: Doing(next_one).result())
    Cutting.cut_after = "fs.replay"
    with pytest.raises(WouldBlock):
        Doing(client.tree.async_create.flush, may_wait=False).result()
    assert Cutting.cut_after is None and (public / "f").read_bytes() == b"data"
    client.tree.async_create.flush()
    assert errno_of(client.tree.fsync, handle, False) is None


USES: dict[str, Callable[[Client, Node, Handle], object]] = {
    "read": lambda c, _, handle: bytes(c.tree.read(handle, 9, 0)) == b"",
    "look": lambda c, node, _: c.size(node) == 0,
    "lock": lambda c, node, _: (
        c.tree.locks.lock(node, Family.POSIX, Lock(LockOwner(HERE, 1), Mode.WRITE, 0, 9, 1), None) == 0
    ),
    "seek": lambda c, _, handle: errno_of(c.tree.seek, handle, 0, os.SEEK_DATA) == errno.ENXIO,
    "write": lambda c, _, handle: c.tree.write(handle, b"data", 0) == 4,
}


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("how", USES)
def test_an_empty_file_is_used_before_all_else_is_told(client: Client, public: Path, how: str) -> None:
    node, handle = make(client, b"f")
    quiet(client)
    assert USES[how](client, node, handle)
    assert (public / "f").exists()
    close(client, handle)


def test_a_hostile_client_reclaims_no_file_as_its_own_directory(server: Killed, public: Path) -> None:
    """The write would wait for itself for three leases, and all that look at the file with it."""
    (public / "f").write_bytes(b"data")
    server._leases().renew(NAME)
    server.sessions.delegations._leases = None
    server.forget()
    with server.talk() as talk:
        handle = talk.call(p.Open(talk.find(b"public", b"f"), os.O_RDWR), p.Opened).handle
        said = talk.ask(WriteGathered(handle, 0, (public / "f").stat().st_ino, 0), b"DATA")
    assert said == p.Error(errno.ESTALE) and (public / "f").read_bytes() == b"data"

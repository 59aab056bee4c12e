# SPDX-License-Identifier: Apache-2.0
"""What a client had made and not told when its server was killed is told to the next one."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from millpond.fs.client import callbacks as recalling
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto import async_create as n
from millpond.fs.proto import file_ops as p
from millpond.fs.server import connection as serving
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import Node, SetAttr, WouldBlock
from millpond.fs.vfs.path_api import os_error

from ..waiting import eventually
from .caching_client import Client, Device, hold, make
from .gathering_clients import client, close, device, patience, public, sent
from .killed_servers import LEASE, Killed, back, cut_at, down, flush_in_doubt, server, unreachable, was_cut
from .support import Doing, errno_of, lasts
from .test_2_contents_with_names import closed, stock
from .test_2_hostile_client import World, world
from .test_2_space_reservation import Limited, limited

__all__ = ["client", "device", "limited", "patience", "public", "server", "world"]
pytestmark = pytest.mark.usefixtures("patience")
LOST = pytest.mark.expected_log("new names are lost")
EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def test_what_was_closed_is_there_after_the_server_was_killed(client: Client, public: Path) -> None:
    files = {b"f%d" % number: os.urandom(100 + number) for number in range(200)}
    nodes = {}
    for name, data in files.items():
        nodes[name], handle = make(client, name, mode=0o604)
        assert client.gather(nodes[name], data)
        client.tree.setattr(nodes[name], SetAttr(atime=3, mtime=5))
        close(client, handle)
    down(client)
    assert len(client.tree.async_create.names.pending) >= 70  # the last, at least
    back(client)
    for name, data in files.items():
        there = (public / os.fsdecode(name)).stat()
        assert (public / os.fsdecode(name)).read_bytes() == data == client.read(nodes[name])
        assert (there.st_mtime_ns, stat.S_IMODE(there.st_mode)) == (5, 0o604)
        assert client.tree.getattr(nodes[name]).attributes.inode == there.st_ino
        assert client.find(name) == nodes[name]
    assert sent(client, "fs.replay") <= 2 and not client.tree.async_create.names.are_any


def test_an_empty_file_and_one_that_is_open(client: Client, public: Path) -> None:
    client.tree.release(make(client, b"empty")[1])
    node, handle = make(client, b"open")
    assert client.gather(node, b"data")
    client.tree.write_behind.close_descriptor(handle)  # of two
    down(client)
    back(client)
    assert (public / "empty").read_bytes() == b"" and (public / "open").read_bytes() == b"data"
    assert client.tree.write(handle, b"more", 4) == 4 and bytes(client.tree.read(handle, 9, 0)) == b"datamore"
    client.tree.fsync(handle, False)
    assert client.inode(node) == (public / "open").stat().st_ino
    close(client, handle)
    assert (public / "open").read_bytes() == b"datamore"


def test_what_is_done_with_it_afterwards(client: Client, public: Path) -> None:
    nodes = [closed(client, name) for name in (b"a", b"b", b"c", b"d")]
    down(client).refusing = False
    client.tree.unlink(client.public, b"a")
    client.tree.rename(client.public, b"b", client.public, b"B")
    assert client.tree.setattr(nodes[2], SetAttr(size=2)).attributes.size == 2
    client.tree.link(nodes[3], client.public, b"D")
    there = {path.name: path.read_bytes() for path in public.iterdir() if path.name in "aAbBcCdD"}
    assert there == {"B": b"data", "c": b"da", "d": b"data", "D": b"data"}


def test_the_numbers_of_files_may_be_dealt_anew(client: Client, public: Path) -> None:
    """As ext4 does, which gives those that are free again to the next files."""
    stock(client, 3)
    nodes = {name: closed(client, name, name) for name in (b"a", b"b", b"c")}
    inodes = client.tree.rpc.inodes
    numbers = [inodes.file(node).inode for node in nodes.values()]
    for node, number in zip(nodes.values(), (*numbers[1:], numbers[0]), strict=True):
        inodes.renumber(inodes.file(node), number)
    assert [inodes.by_inode(number) for number in (*numbers[1:], numbers[0])] == [
        inodes.file(node) for node in nodes.values()
    ]
    down(client)
    back(client)
    for name, node in nodes.items():
        assert client.find(name) == node and client.read(node) == name
        assert client.inode(node) == (public / os.fsdecode(name)).stat().st_ino


@pytest.mark.parametrize("expired", [False, True])
def test_a_reply_that_was_lost_before(client: Client, public: Path, expired: bool) -> None:
    nodes = {name: closed(client, name) for name in (b"f", b"g")}
    flush_in_doubt(client, done=True, expired=expired)
    before = {name: (public / os.fsdecode(name)).stat().st_ino for name in nodes}
    back(client)
    for name, node in nodes.items():
        assert client.read(node) == b"data" and client.inode(node) == before[name]
    assert not client.tree.async_create.names.are_any


def test_a_request_that_was_lost_before(client: Client, public: Path) -> None:
    closed(client)
    flush_in_doubt(client, done=False, expired=False)
    assert not (public / "f").exists()
    back(client)
    assert (public / "f").read_bytes() == b"data"


@LOST
def test_what_others_may_have_removed_is_not_made_again(client: Client, device: Device, public: Path) -> None:
    """Its lease is over: whether the server has made it, and others removed it, nobody knows."""
    directory = client.tree.opendir(client.public)
    for name in (b"f", b"g"):
        closed(client, name)
    flush_in_doubt(client, done=True, expired=True)
    assert errno_of(client.tree.fsync, directory, False) == errno.EIO  # since the server cannot be reached
    device.tree.unlink(device.public, b"f")
    back(client)
    assert not (public / "f").exists() and (public / "g").read_bytes() == b"data"
    assert [errno_of(client.tree.fsync, directory, False) for _ in range(2)] == [errno.EIO, None]


@LOST
@pytest.mark.parametrize("sent_before", [False, True])
def test_a_name_that_somebody_else_has_taken_is_an_error(
    client: Client, device: Device, public: Path, sent_before: bool
) -> None:
    directory = client.tree.opendir(client.public)
    closed(client, b"f", b"data")
    closed(client, b"g", b"data")
    if sent_before:
        flush_in_doubt(client, done=False, expired=True)
    else:
        down(client, expired=True)
    device.put(b"f", b"DATA")
    device.put(b"g", b"data")  # not by the time, which is another
    back(client)
    assert (public / "f").read_bytes() == b"DATA" and (public / "g").stat().st_size == 4
    assert [errno_of(client.tree.fsync, directory, False) for _ in range(2)] == [errno.EIO, None]
    assert client.read(client.find(b"f")) == b"DATA"


def test_nobody_can_take_a_name_before_its_client_is_back(
    client: Client, device: Device, public: Path
) -> None:
    closed(client)
    down(client)
    taking = Doing(device.tree.create, device.public, b"f", EXCLUSIVE, 0o644, None)
    assert lasts(lambda: not taking.done)
    back(client)
    with pytest.raises(FileExistsError):
        taking.result()
    assert (public / "f").read_bytes() == b"data"


def test_a_job_starts_once_its_clients_are_back(client: Client, public: Path) -> None:
    closed(client)
    server = down(client)
    starting = Doing(server.sessions.delegations.recall_directories, 0)
    assert lasts(lambda: not starting.done)
    back(client)
    starting.result()
    assert (public / "f").read_bytes() == b"data"


@pytest.mark.parametrize(("done", "expired"), [(True, False), (False, False), (True, True)])
def test_another_kill_in_the_replay(client: Client, public: Path, done: bool, expired: bool) -> None:
    nodes = {name: closed(client, name, name) for name in (b"f", b"g")}
    down(client, expired=expired)
    for _ in range(2):
        cut_at(client, "fs.replay", done=done)
        client.server.refusing = False
        eventually(was_cut, "the names are replayed")
        down(client, expired=expired)
    back(client)
    for name, node in nodes.items():
        assert client.read(node) == name == (public / os.fsdecode(name)).read_bytes()
        assert client.inode(node) == (public / os.fsdecode(name)).stat().st_ino
    assert len(list(public.glob("[fg]"))) == 2


@LOST
@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_directory_that_is_not_there_any_more(
    client: Client, device: Device, public: Path, how: str
) -> None:
    made = client.tree.mkdir(client.public, b"d", 0o755, None).node
    hold(client, made)
    for path in (public / "d").iterdir():
        client.tree.unlink(made, os.fsencode(path.name))
    directory = client.tree.opendir(made)
    node, handle = make(client, b"f", made)
    assert client.gather(node, b"data")
    close(client, handle)
    closed(client, b"g")
    down(client, expired=True)
    if how == "removed":
        device.tree.rmdir(device.public, b"d")
    else:
        device.tree.rename(device.public, b"d", device.public, b"e")
    if how == "replaced":
        device.tree.mkdir(device.public, b"d", 0o755, None)
    back(client)
    assert not list(public.glob("*/f")) and (public / "g").read_bytes() == b"data"
    assert errno_of(client.tree.fsync, directory, False) in (errno.EIO, errno.ESTALE)


def test_another_host_that_has_taken_the_directory(
    client: Client, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for it back, and what it has made there first is first. A thread that must not wait leaves
    that to another one.
    """
    monkeypatch.setattr(recalling, "_AGAIN_SECONDS", 4 * LEASE)  # nothing is told before the test has it told
    closed(client, b"f")
    down(client, expired=True)
    client.server.refusing = False
    other = Client(client.server)
    for name in (b"third", b"fourth"):
        other.tree.release(make(other, name)[1])
    closed(other, b"g", b"of the other")
    for _ in range(2):
        with pytest.raises(WouldBlock):
            Doing(client.tree.async_create.flush, may_wait=False).result()
    assert not (public / "f").exists()
    client.tree.async_create.flush()
    assert (public / "f").read_bytes() == b"data" and (public / "g").read_bytes() == b"of the other"
    assert {"f", "g"} <= client.names() == other.names()
    other.close()


def test_hosts_do_not_wait_for_each_other(client: Client, server: Killed, public: Path) -> None:
    other = Client(server)
    places = []
    for each, name in ((client, b"one"), (other, b"two")):
        place = each.tree.mkdir(each.public, name, 0o755, None).node
        hold(each, place)
        node, handle = make(each, b"f", place)
        assert each.gather(node, name)
        close(each, handle)
        places.append(public / os.fsdecode(name) / "f")
    down(client)
    server.refusing = False
    both = [Doing(each.tree.async_create.flush) for each in (client, other)]
    for each in both:
        each.result(LEASE / 2)
    assert [place.read_bytes() for place in places] == [b"one", b"two"]
    other.close()


def limited_down(client: Client, limited: Limited) -> None:
    unreachable(client)
    limited.drop()
    limited.sessions.close()
    limited.sessions = SessionTable(limited.tree, DelegationManager())


def fill_up(client: Client, limited: Limited) -> Node:
    """A directory in which files are preallocated, and nothing else is left of the quota."""
    directory = client.tree.mkdir(client.public, b"d", 0o755, None).node
    hold(client, directory)
    quota = limited.bounded.quota
    quota.limit = quota.used + quota._held
    assert quota._held and not quota.left
    return directory


def closed_in(client: Client, directory: Node, name: bytes, data: bytes) -> None:
    found, handle = client.tree.create(directory, name, os.O_RDWR | os.O_CREAT, 0o640, None)
    assert client.gather(found.node, data)
    close(client, handle)


def test_a_quota_that_had_room_for_it_has_it_still(limited: Limited) -> None:
    client, data = Client(limited), os.urandom(8 << 10)
    directory, quota = fill_up(client, limited), limited.bounded.quota
    spare = len(client.tree.async_create.names.held[directory].preallocated)
    for number in range(spare):
        closed_in(client, directory, b"f%d" % number, data)
    limited_down(client, limited)
    limited.refusing = False
    client.tree.async_create.flush()
    there = Path(f"/proc/self/fd/{limited.root}/public/d")
    assert spare and all((there / f"f{number}").read_bytes() == data for number in range(spare))
    assert limited.bounded.recount() == (0, 0) and quota.used <= quota.limit
    client.close()


@LOST
def test_a_quota_that_others_have_filled_meanwhile_is_told_by_the_next_sync(limited: Limited) -> None:
    client = Client(limited)
    directory, quota = fill_up(client, limited), limited.bounded.quota
    handle = client.tree.opendir(directory)
    closed_in(client, directory, b"f", os.urandom(8 << 10))
    limited_down(client, limited)
    quota.limit = quota.used
    limited.refusing = False
    client.tree.async_create.flush()
    assert not Path(f"/proc/self/fd/{limited.root}/public/d/f").exists()
    assert limited.bounded.recount() == (0, 0)
    assert [errno_of(client.tree.fsync, handle, False) for _ in range(2)] == [errno.EIO, None]
    client.close()


@LOST
def test_a_flash_that_cannot_write_one_loses_that_one(
    client: Client, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, write = client.tree.opendir(client.public), BackingFs.write

    def fail(tree: BackingFs, handle: int, data: bytes, *place: int, **more: bool) -> int:
        if bytes(data) == b"bad":
            raise os_error(errno.ENOSPC)
        return write(tree, handle, data, *place, **more)  # type: ignore[arg-type]

    stock(client, 2)
    for name, data in ((b"f", b"bad"), (b"g", b"good")):
        closed(client, name, data)
    down(client)
    with monkeypatch.context() as full:
        full.setattr(BackingFs, "write", fail)
        back(client)
    assert not (public / "f").exists() and (public / "g").read_bytes() == b"good"
    assert [errno_of(client.tree.fsync, directory, False) for _ in range(2)] == [errno.EIO, None]


def test_a_server_that_does_not_come_back_has_the_next_sync_fail(client: Client, public: Path) -> None:
    directory = client.tree.opendir(client.public)
    closed(client)
    down(client)
    assert {errno_of(client.tree.fsync, directory, False) for _ in range(3)} == {errno.EIO}
    assert not (public / "f").exists()
    back(client)
    assert (public / "f").read_bytes() == b"data"


@LOST
@pytest.mark.parametrize("says", [((5,), (0,)), ((), ()), ((5, 6, 7), (0, 0, 0))])
def test_a_reply_about_other_files_is_a_loss(
    client: Client, monkeypatch: pytest.MonkeyPatch, says: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    stock(client, 2)
    directory = client.tree.opendir(client.public)
    for name in (b"f", b"g"):
        closed(client, name)
    down(client)
    monkeypatch.setattr("millpond.fs.server.handlers.replay_names", lambda *_: n.NamesReplayed(*says))
    back(client)
    assert not client.tree.async_create.names.are_any
    assert [errno_of(client.tree.fsync, directory, False) for _ in range(2)] == [errno.EIO, None]


@LOST
def test_a_server_of_before_that_knows_of_no_replay_has_the_next_sync_fail(
    client: Client, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = client.tree.opendir(client.public)
    closed(client)
    down(client)
    known = tuple(kind for kind in serving._WITH_PAYLOAD if kind is not n.ReplayNames)
    monkeypatch.setattr(serving, "_WITH_PAYLOAD", known)
    back(client)
    assert not (public / "f").exists() and not client.tree.async_create.names.are_any
    assert [errno_of(client.tree.fsync, directory, False) for _ in range(2)] == [errno.EIO, None]


@pytest.mark.parametrize("says", [((5, -1), (0, 0)), ((0, 5), (0, 0)), ((5, 6), (0, errno.EIO))])
def test_a_reply_that_cannot_be_proves_nothing(
    client: Client,
    public: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    stock(client, 2)
    for name in (b"f", b"g"):
        closed(client, name)
    down(client)
    with monkeypatch.context() as lying:
        lying.setattr("millpond.fs.server.handlers.replay_names", lambda *_: n.NamesReplayed(*says))
        client.server.refusing = False
        assert errno_of(client.tree.async_create.flush) == errno.EIO
    back(client)
    assert (public / "f").read_bytes() == (public / "g").read_bytes() == b"data"


def replayed(**changes: object) -> n.ReplayedName:
    fields = {"name": b"new", "mode": 0o644, "time": 5, "accessed": 5, "size": 4, "sent": False}
    return n.ReplayedName(**(fields | changes))  # type: ignore[arg-type]


def test_what_a_hostile_client_replays_replaces_nothing(world: World) -> None:
    def say(*files: n.ReplayedName, data: bytes = b"data") -> object:
        return world.say(n.ReplayNames(world.node, files), data)

    for size in (3, 5, -1, 1 << 63):
        assert say(replayed(size=size)) == p.Error(errno.EINVAL)
    for wrong in ({"time": -1}, {"accessed": -1}, {"mode": 0o4755}):
        assert say(replayed(**wrong)) == p.Error(errno.EINVAL)
    assert say(*[replayed(size=0)] * (n.MAX_BATCH + 1), data=b"") == p.Error(errno.EMSGSIZE)
    for sent_before in (True, False):
        assert say(replayed(name=b"f", sent=sent_before)) == n.NamesReplayed((0,), (errno.EEXIST,))
    assert say(replayed(sent=True)) == n.NamesReplayed((0,), (errno.ESTALE,))
    made = say(replayed(), replayed(name=b"f", size=0))
    assert made == n.NamesReplayed(((world.public / "new").stat().st_ino, 0), (0, errno.EEXIST))
    assert (world.public / "new").read_bytes() == b"data" and (world.public / "f").read_bytes() == b"public"
    assert isinstance(say(replayed(name=b"../private/x")), (p.Error, n.NamesReplayed))
    assert not (world.private / "x").exists()

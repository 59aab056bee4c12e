# SPDX-License-Identifier: Apache-2.0
"""The contents of small new files are flushed after their close, with their names; there is room for them."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.fs.proto import async_create as n
from millpond.fs.proto import file_ops as p
from millpond.fs.store import space_reservation
from millpond.fs.vfs.inode_api import Node, SetAttr
from millpond.fs.vfs.lock_types import HERE, Family, Lock, LockOwner, Mode
from millpond.fs.vfs.path_api import os_error

from .caching_client import Client, Device, brisk, hold, make
from .gathering_clients import client, close, device, patience, public, sent, server
from .support import Cutting, Doing, Server, errno_of, lasts
from .test_2_hostile_client import World, world
from .test_2_space_reservation import Limited, limited, until_full
from .test_2_write_behind_losses import cutting

__all__ = ["client", "device", "limited", "patience", "public", "server", "world"]
pytestmark = pytest.mark.usefixtures("patience")


def stock(client: Client, count: int) -> None:
    """Have so many files preallocated: the request for more would have everything flushed."""
    held, number = client.tree.async_create.names.held[client.public], 0
    while len(held.preallocated) < count:
        number += 1
        client.tree.release(make(client, b"stock%d" % number)[1])
    client.tree.async_create.flush()


def closed(client: Client, name: bytes = b"f", data: bytes = b"data") -> Node:
    """A new file that was written and closed, of which the server has heard nothing."""
    node, handle = make(client, name)
    assert client.gather(node, data)
    before = sent(client), sent(client, "fs.tell")
    close(client, handle)
    assert (sent(client), sent(client, "fs.tell")) == before
    return node


def test_many_files_are_one_request(client: Client, public: Path) -> None:
    files = {b"f%d" % number: os.urandom(100 + number) for number in range(60)}
    nodes, seen = {}, {}
    for name, data in files.items():
        nodes[name], handle = make(client, name)
        assert client.gather(nodes[name], data)
        seen[name] = client.tree.setattr(nodes[name], SetAttr(mtime=5, mode=0o604)).attributes
        close(client, handle)
    told = sent(client, "fs.tell")
    client.tree.async_create.flush()
    assert sent(client, "fs.tell") == told + 1 and sent(client, "fs.setattr") == 0
    before = copy.deepcopy(client.tree.rpc.meter.kinds)
    for name, data in files.items():
        there = (public / os.fsdecode(name)).stat()
        assert (public / os.fsdecode(name)).read_bytes() == data
        assert (there.st_mtime_ns, stat.S_IMODE(there.st_mode)) == (5, 0o604)
        assert client.tree.getattr(nodes[name]).attributes.ctime >= seen[name].ctime
        assert client.read(nodes[name]) == data
    assert client.tree.rpc.meter.kinds == before  # nothing had to be asked


def test_more_than_one_request_holds_is_several(client: Client, public: Path) -> None:
    data = os.urandom(8 << 10)
    for number in range(160):
        closed(client, b"f%d" % number, data)
    client.tree.async_create.flush()
    assert all((public / f"f{number}").read_bytes() == data for number in range(160))


def test_what_is_too_long_is_sent_at_the_close(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    room = client.tree.async_create.names.files[node].spare.room
    assert room >= 4096 and client.gather(node, bytes(room + 1))
    close(client, handle)
    assert (public / "f").stat().st_size == room + 1


def test_looking_at_a_file_before_its_close_sends_nothing(
    client: Client, server: Server, public: Path
) -> None:
    """fstat(2) between the last write and the close, as of ``git``, which compares all times later."""
    node, handle = make(client, b"f")
    assert client.gather(node, b"data")
    before = copy.deepcopy(client.tree.rpc.meter.kinds)
    seen = client.tree.getattr(node).attributes
    close(client, handle)
    assert client.tree.getattr(node).attributes == seen and seen.size == 4
    assert client.tree.rpc.meter.kinds == before and not (public / "f").exists()
    client.tree.async_create.flush()
    assert client.tree.getattr(node).attributes == seen
    other = Client(server)
    assert other.tree.getattr(other.find(b"f")).attributes == seen
    other.close()
    assert (public / "f").stat().st_mtime_ns == seen.mtime


def test_a_change_is_seen_by_its_time(client: Client, public: Path) -> None:
    node = closed(client)
    before = client.tree.getattr(node).attributes
    client.tree.async_create.flush()
    time.sleep(0.02)  # the flash's clock goes by ticks
    (public / "f").chmod(0o604)
    after = client.tree.setattr(node, SetAttr(mode=0o604)).attributes
    assert after.ctime == (public / "f").stat().st_ctime_ns > before.ctime


def test_an_empty_file_keeps_the_times_that_were_seen(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    seen = client.tree.getattr(node).attributes
    close(client, handle)
    client.tree.async_create.flush()
    assert (public / "f").exists()
    assert client.tree.getattr(node).attributes == seen


def test_empty_files_keep_the_times_that_were_seen_beside_a_large_one(client: Client, public: Path) -> None:
    """Their names go with its data."""
    node, handle = make(client, b"f")
    seen = client.tree.getattr(node).attributes
    close(client, handle)
    large, handle = make(client, b"g")
    assert client.gather(large, os.urandom(100_000))
    Doing(close, client, handle, may_wait=False).result()
    assert (public / "f").exists() and sent(client, "fs.tell") == 1  # of the directory's first files
    assert client.tree.getattr(node).attributes == seen
    assert client.tree.getattr(large).attributes.ctime == (public / "g").stat().st_ctime_ns


def test_what_is_written_after_a_look_is_gathered(client: Client, public: Path) -> None:
    """Somebody looks at a growing file."""
    node, handle = make(client, b"f")
    data, told = os.urandom(100_000), sent(client, "fs.tell")
    for begin in range(0, len(data), 1000):
        assert client.gather(node, data[begin : begin + 1000], begin)
        assert begin > 3000 or client.size(node) == begin + 1000
    assert (sent(client), sent(client, "fs.tell")) == (0, told) and not (public / "f").exists()
    close(client, handle)
    assert (public / "f").read_bytes() == data == client.read(node)
    assert sent(client) == 1 and not client.tree.async_create.names.with_contents


@pytest.mark.parametrize("when", ["before", "after"])
def test_times_set_around_a_look_are_not_lost_by_a_write(client: Client, public: Path, when: str) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, b"data")
    for step in ("before", "look", "after"):
        if step == "look":
            assert client.size(node) == 4
        elif step == when:
            client.tree.setattr(node, SetAttr(atime=3, mode=0o604))
    if not client.gather(node, b"more", 4):
        assert client.tree.write(handle, b"more", 4) == 4
    close(client, handle)
    client.tree.async_create.flush()
    there = (public / "f").stat()
    assert (there.st_atime_ns, stat.S_IMODE(there.st_mode)) == (3, 0o604)
    assert (public / "f").read_bytes() == b"datamore"


@pytest.mark.parametrize("how", ["read", "seek"])
def test_a_look_by_another_thread_does_not_take_the_data_from_a_reader(client: Client, how: str) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, b"data")
    one = client.tree.write_behind._dirty[node]
    with one.sending:  # the thread that sends by the clock is about to
        reading = Doing(
            lambda: (
                bytes(client.tree.read(handle, 9, 0))
                if how == "read"
                else client.tree.seek(handle, 0, os.SEEK_END)
            )
        )
        assert lasts(lambda: not reading.done)
        assert client.size(node) == 4
    assert reading.result() == {"read": b"data", "seek": 4}[how]
    close(client, handle)


def test_what_is_written_after_a_look_is_written_through(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, b"da")
    assert client.size(node) == 2
    assert client.tree.write(handle, b"ta", 2) == 2
    assert (public / "f").read_bytes() == b"data"
    close(client, handle)
    assert client.tree.getattr(node).attributes.ctime == (public / "f").stat().st_ctime_ns


READERS: dict[str, Callable[[Client, Node], object]] = {
    "read": lambda c, node: c.read(node) == b"data",
    "truncate": lambda c, node: c.tree.setattr(node, SetAttr(size=2)).attributes.size == 2,
    "list": lambda c, _: "f" in c.names(),
    "link": lambda c, node: c.tree.link(node, c.public, b"g").attributes.size == 4,
    "rename": lambda c, _: c.tree.rename(c.public, b"f", c.public, b"g") is None,
    "open": lambda c, node: c.tree.open(node, os.O_WRONLY),
    "fsync": lambda c, node: c.tree.fsync(c.tree.open(node, os.O_RDONLY), True) is None,
    "fsync of the directory": lambda c, _: c.tree.fsync(c.tree.opendir(c.public), False) is None,
    "lock": lambda c, node: (
        c.tree.locks.lock(node, Family.POSIX, Lock(LockOwner(HERE, 1), Mode.WRITE, 0, 9, 1), None) == 0
    ),
    "attribute": lambda c, node: c.tree.extended.set(node, b"user.a", b"1", 0) is None,
    "statfs": lambda c, _: c.tree.statfs(),
    "unmount": lambda c, _: c.close() is None,
}


@pytest.mark.parametrize("how", READERS)
def test_what_the_client_does_with_the_file_comes_after_it(client: Client, public: Path, how: str) -> None:
    node = closed(client)
    assert client.size(node) == 4 and not (public / "f").exists()
    assert READERS[how](client, node)
    path = public / ("g" if how == "rename" else "f")
    assert path.read_bytes() == (b"da" if how == "truncate" else b"data")


@pytest.mark.parametrize("how", ["find", "read", "names", "write", "remove", "rename"])
def test_the_device_sees_what_was_closed(client: Client, device: Device, public: Path, how: str) -> None:
    closed(client)
    looking: Callable[[], object] = {
        "find": lambda: device.tree.getattr(device.find(b"f")).attributes.size,
        "read": lambda: bytes(device.tree.read(device.tree.open(device.find(b"f"), os.O_RDONLY), 9, 0)),
        "names": lambda: list(device.tree.readdir(device.tree.opendir(device.public), 0)),
        "write": lambda: device.tree.write(device.tree.open(device.find(b"f"), os.O_WRONLY), b"D", 0),
        "remove": lambda: device.tree.unlink(device.public, b"f"),
        "rename": lambda: device.tree.rename(device.public, b"f", device.public, b"g"),
    }[how]
    seen = Doing(looking).result()
    assert {"find": 4, "read": b"data"}.get(how, seen) == seen
    if how == "write":
        assert (public / "f").read_bytes() == b"Data"
    if how in ("names", "rename"):
        assert (public / ("g" if how == "rename" else "f")).read_bytes() == b"data"


def test_another_host_sees_it(client: Client, server: Server) -> None:
    closed(client)
    other = Client(server)
    assert other.read(other.find(b"f")) == b"data"
    other.close()


def test_permissions_and_times_are_set_yet_after_the_close(client: Client, public: Path) -> None:
    node = closed(client)
    assert client.tree.setattr(node, SetAttr(atime=3, mtime=5)).attributes.mtime == 5
    assert client.tree.setattr(node, SetAttr(mode=0o600)).attributes.size == 4
    assert sent(client, "fs.setattr") == 0 and not (public / "f").exists()
    client.tree.async_create.flush()
    there = (public / "f").stat()
    assert (there.st_atime_ns, there.st_mtime_ns, stat.S_IMODE(there.st_mode)) == (3, 5, 0o600)
    client.tree.setattr(node, SetAttr(mtime=7))
    assert (public / "f").stat().st_mtime_ns == 7


def test_without_other_times_it_was_written_when_it_was(client: Client, public: Path) -> None:
    node = closed(client)
    known = client.tree.getattr(node).attributes
    client.tree.async_create.flush()
    there = (public / "f").stat()
    assert (there.st_mtime_ns, there.st_atime_ns) == (known.mtime, known.atime)


@pytest.mark.parametrize("mtime", [-5, 1 << 62])
def test_times_that_the_message_does_not_hold_are_set_otherwise(client: Client, mtime: int) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, b"data")
    client.tree.setattr(node, SetAttr(mtime=mtime))
    with contextlib.suppress(OSError):
        close(client, handle)
    assert client.read(client.find(b"f")) == b"data"


def test_another_descriptor_writes_on(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, b"data")
    client.tree.write_behind.close_descriptor(handle)  # of two
    assert not (public / "f").exists()
    assert not client.gather(node, b"more", 4)
    assert client.tree.write(handle, b"more", 4) == 4
    close(client, handle)
    assert (public / "f").read_bytes() == b"datamore"


def test_what_is_removed_in_time_leaves_nothing(client: Client, public: Path) -> None:
    for number in range(3):
        node = closed(client, b"f", b"secret")
        client.tree.unlink(client.public, b"f")
        client.tree.forget(node, 1)
        closed(client, b"g%d" % number, b"d")  # the same preallocated file
    client.tree.async_create.flush()
    assert {path.name for path in public.iterdir()} >= {"g0", "g1", "g2"} and not (public / "f").exists()
    assert all((public / f"g{number}").read_bytes() == b"d" for number in range(3))


def test_a_lost_reply_does_it_once(client: Client, public: Path) -> None:
    node = closed(client)
    cutting(client)
    Cutting.cut_after = "fs.tell"
    Doing(client.tree.async_create.flush, may_wait=False).result()
    assert Cutting.cut_after is None and (public / "f").read_bytes() == b"data"
    assert client.read(node) == b"data"


@pytest.mark.expected_log("new names are lost")
def test_a_flash_that_cannot_write_it_is_told_by_the_next_sync(
    client: Client, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, write = client.tree.opendir(client.public), space_reservation.write_whole
    stock(client, 2)
    made = [(make(client, name), data) for name, data in ((b"f", b"data"), (b"g", b"other"))]
    for (node, handle), data in made:
        assert client.gather(node, data)
        close(client, handle)

    def fail(file: int, data: bytes) -> None:
        if bytes(data) == b"data":
            raise os_error(errno.EFBIG)  # any that leaves no doubt
        write(file, data)

    with monkeypatch.context() as broken:
        broken.setattr("millpond.fs.store.backing_fs.write_whole", fail)
        client.tree.async_create.flush()
    assert not (public / "f").exists()  # never without its contents
    assert (public / "g").read_bytes() == b"other"
    assert [errno_of(client.tree.fsync, directory, False) for _ in range(2)] == [errno.EIO, None]


def test_the_quota_has_room_for_what_was_closed(limited: Limited) -> None:
    client = Client(limited)
    directory = client.tree.mkdir(client.public, b"d", 0o755, None).node
    for name in (b"first", b"second"):
        client.tree.release(client.tree.create(directory, name, os.O_RDWR | os.O_CREAT, 0o640, None)[1])
    client.tree.async_create.flush()
    until_full(client, b"filler")
    quota = limited.bounded.quota
    at_most = quota.used + quota._held
    data = os.urandom(8 << 10)
    made = []
    for number in range(len(client.tree.async_create.names.held[directory].preallocated)):
        found, handle = client.tree.create(directory, b"f%d" % number, os.O_RDWR | os.O_CREAT, 0o640, None)
        assert client.gather(found.node, data)
        close(client, handle)  # says no error: so there is none later
        made.append(f"f{number}")
    assert made
    client.tree.fsync(client.tree.opendir(directory), False)
    there = Path(f"/proc/self/fd/{limited.root}/public/d")
    assert all((there / name).read_bytes() == data for name in made)
    assert quota.used <= at_most and not quota.left
    assert limited.bounded.recount() == (0, 0)
    client.close()


@pytest.mark.expected_log("new names are lost")
def test_a_client_that_has_died_leaves_nothing_reserved(limited: Limited) -> None:
    with brisk():
        client = Client(limited)
        hold(client)
        closed(client)
        assert limited.bounded.quota._held
        limited.refusing = True
        limited.drop()
        limited.sessions.close()
        client.close()
    assert not limited.bounded.quota._held and limited.tree.reservation._file < 0


def test_what_is_reserved_is_used_when_the_flash_is_full(
    client: Client, server: Server, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed(client)
    left, write = server.tree.reservation._left, space_reservation.write_whole

    def full(file: int, data: bytes) -> None:
        if server.tree.reservation._left > left // 2:
            raise os_error(errno.ENOSPC)
        write(file, data)

    monkeypatch.setattr("millpond.fs.store.backing_fs.write_whole", full)
    client.tree.async_create.flush()
    assert (public / "f").read_bytes() == b"data" and server.tree.reservation._left <= left // 2


@pytest.mark.parametrize("size", [0, 3, 5, -1, 1 << 63])
def test_contents_of_another_length_are_refused(world: World, size: int) -> None:
    naming = world.naming()
    flush = n.FlushNames((naming,), contents=(n.Contents(naming.serial, size, 5, 5),))
    assert world.say(flush, b"data") == p.Error(errno.EINVAL)
    assert isinstance(world.say(replace(flush, contents=())), n.NamesFlushed)  # it had no name yet


def test_contents_that_there_is_no_room_for_are_refused(world: World) -> None:
    naming = world.naming()
    for size in (1 << 14, 1 << 20):
        flush = n.FlushNames((naming,), contents=(n.Contents(naming.serial, size, 5, 5),))
        assert world.say(flush, bytes(size)) == p.Error(errno.EFBIG)
    flush = n.FlushNames((naming,), contents=(n.Contents(naming.serial, 4, -1, 5),))
    assert isinstance(world.say(flush, b"data"), p.Error)
    many = tuple(n.Contents(number, 0, 5, 5) for number in range(n.MAX_BATCH + 1))
    assert isinstance(world.say(n.FlushNames((naming,), contents=many)), p.Error)
    flush = n.FlushNames((naming,), contents=(n.Contents(naming.serial, 4, 5, 5),))
    assert isinstance(told := world.say(flush, b"data"), n.NamesFlushed) and told.files[0].size == 4
    assert world.say(flush, b"more") == n.NamesFlushed()  # which was told already

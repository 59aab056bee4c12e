# SPDX-License-Identifier: Apache-2.0
"""A client gathers small writes to new files; whoever else looks sees them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs.client import write_behind
from millpond.fs.client.cache.gathered import EXTENT
from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.vfs.inode_api import Node, SetAttr
from millpond.fs.vfs.path_api import Handle

from ..waiting import eventually
from .caching_client import Client, Device, make
from .gathering_clients import client, close, device, patience, public, server, written
from .support import Doing, Server, errno_of

__all__ = ["client", "device", "patience", "public", "server"]


def test_create_and_write_with_attributes_and_close_are_two_requests(client: Client, public: Path) -> None:
    before = client.asked("fs.create"), client.asked("fs.write"), client.asked()
    node, handle = make(client, b"f")
    assert client.gather(node, b"abc") and client.gather(node, b"def", 3)
    assert client.tree.write_behind.dirty == 6
    assert client.tree.setattr(node, SetAttr(mtime=5)).attributes.size == 6
    known = client.tree.setattr(node, SetAttr(mode=0o604)).attributes
    assert (known.size, known.mtime, known.mode) == (6, 5, stat.S_IFREG | 0o604)
    assert (public / "f").stat().st_size == 0
    Doing(close, client, handle).result()
    assert not client.tree.write_behind.dirty
    after = client.asked("fs.create"), client.asked("fs.write"), client.asked()
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 2]
    there = (public / "f").stat()
    assert (there.st_size, there.st_mtime_ns, stat.S_IMODE(there.st_mode)) == (6, 5, 0o604)
    assert (public / "f").read_bytes() == b"abcdef"
    assert client.tree.getattr(node).attributes.ctime == there.st_ctime_ns and client.asked() == after[2]


def test_what_is_written_after_new_times_changes_them(client: Client, public: Path) -> None:
    node, handle = written(client)
    client.tree.setattr(node, SetAttr(mtime=5))
    assert client.gather(node, b"more", 4)
    close(client, handle)
    assert (public / "f").read_bytes() == b"datamore" and (public / "f").stat().st_mtime_ns != 5


def test_what_is_appended_and_what_is_written_elsewhere_is_told_apart(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, b"abc", 0, os.O_WRONLY | os.O_APPEND)
    assert client.gather(node, b"X", 0) or client.tree.write(handle, b"X", 0)
    assert client.gather(node, b"d", 0, os.O_WRONLY | os.O_APPEND)
    close(client, handle)
    assert (public / "f").read_bytes() == b"Xbcd"


def test_new_attributes_leave_the_contents_cached(client: Client, device: Device) -> None:
    """git's clone sets the times of each object that it has copied, and reads it when it checks out."""
    node, handle = written(client)
    close(client, handle)
    for changes in (SetAttr(mtime=5), SetAttr(mode=0o604)):
        client.tree.setattr(node, changes)
    before = client.asked("fs.read", "fs.readfile")
    assert client.read(node) == b"data" and client.tree.getattr(node).attributes.mtime == 5
    assert client.asked("fs.read", "fs.readfile") == before
    node, handle = written(client, b"cut")
    close(client, handle)
    client.tree.setattr(node, SetAttr(size=2, mtime=5))
    assert client.read(node) == b"da"
    node, handle = written(client, b"theirs")
    close(client, handle)
    client.tree.setattr(node, SetAttr(mtime=5))
    device.does(b"theirs", b"other").result()
    assert client.read(node) == b"other"


def test_what_was_just_written_is_read_without_a_request(client: Client, device: Device) -> None:
    node, handle = written(client)
    close(client, handle)
    before = dict(client.tree.session.meter.kinds)
    assert client.read(node) == b"data" and client.tree.session.meter.kinds == before
    node, handle = written(client, b"h")
    assert client.gather(node, b"xx", 1) or client.tree.write(handle, b"xx", 1)
    close(client, handle)
    assert client.read(node) == b"dxxa"
    node, handle = written(client, b"g")
    close(client, handle)
    Doing(device.put, b"g", b"other").result()
    assert client.read(node) == b"other"


def test_what_a_write_takes_set_id_bits_from_is_written_through(client: Client, public: Path) -> None:
    node, _ = written(client)
    client.tree.setattr(node, SetAttr(mode=0o6755))
    assert not client.gather(node, b"more", 4)
    assert (public / "f").stat().st_mode & 0o7777 == 0o6755 and (public / "f").read_bytes() == b"data"
    assert not client.gather(make(client, b"g", mode=0o4755)[0], b"data")


def test_a_file_that_is_not_new_is_written_through(client: Client) -> None:
    node, handle = written(client)
    close(client, handle)
    with client.opened(node, os.O_RDWR):
        assert not client.gather(node, b"data")


READERS: dict[str, Callable[[Client, Node, Handle], object]] = {
    "read": lambda c, _, handle: bytes(c.tree.read(handle, 9, 0)) == b"data",
    "another handle": lambda c, node, _: c.read(node) == b"data",
    "stat": lambda c, node, _: c.size(node) == 4,
    "lookup": lambda c, _, _h: c.tree.lookup(c.public, b"f").attributes.size == 4,
    "walk": lambda c, _, _h: c.tree.walk(c.public, [b"f"]).attributes.size == 4,
    "truncate": lambda c, node, _: c.tree.setattr(node, SetAttr(size=2)).attributes.size == 2,
    "chmod": lambda c, node, _: c.tree.setattr(node, SetAttr(uid=os.geteuid())).attributes.size == 4,
    "seek": lambda c, _, handle: c.tree.seek(handle, 0, os.SEEK_HOLE) == 4,
    "allocate": lambda c, _, handle: c.tree.allocate(handle, 0, 0, 4) is None,
    "fsync": lambda c, _, handle: c.tree.fsync(handle, True) is None,
    "link": lambda c, node, _: c.tree.link(node, c.public, b"g").attributes.size == 4,
    "open": lambda c, node, _: c.tree.open(node, os.O_WRONLY),
    "descriptor": lambda c, _, handle: c.tree.write_behind.close_descriptor(handle) is None,
    "release": lambda c, _, handle: c.tree.release(handle) is None,
    "write": lambda c, _, handle: c.tree.write(handle, b"", 0) == 0,
    "end": lambda c, _, _h: c.close() is None,
}


@pytest.mark.parametrize("how", READERS)
def test_what_the_client_does_with_the_file_comes_after_it(client: Client, public: Path, how: str) -> None:
    node, handle = written(client)
    assert READERS[how](client, node, handle)
    assert (public / "f").read_bytes() == (b"da" if how == "truncate" else b"data")


@pytest.mark.parametrize("names", [(b"f",), (b"f", b"first")])
def test_many_files_at_once_are_seen_as_they_are(
    client: Client, server: Server, names: tuple[bytes, ...]
) -> None:
    for name in names:
        written(client, name)
    other = Client(server)
    page = dict(Doing(lambda: list(other.tree.bulk.list(other.public, ()))).result())
    assert {page[name].size for name in names} == {4}
    for name in names:
        client.tree.unlink(client.public, name)
        written(client, name)
    read = Doing(lambda: list(other.tree.bulk.read(other.public, names))).result()
    assert [(one.name, one.data) for one in read] == [(name, b"data") for name in names]
    other.close()


def test_it_is_sent_before_long(server: Server, public: Path) -> None:
    client = Client(server)
    node, handle = written(client)
    eventually(lambda: (public / "f").read_bytes() == b"data", "it is sent")
    eventually(lambda: client.gather(node, b"more", 4), "gathered again")
    eventually(lambda: (public / "f").read_bytes() == b"datamore", "it is sent")
    close(client, handle)
    client.close()


def test_much_is_sent_while_more_is_gathered(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    block, at = bytes(range(256)) * 512, 0
    while at < 12 * EXTENT:
        if not client.tree.write_behind.add(node, os.O_RDWR, block, at):
            assert client.tree.write_behind.add_when_sent(node, os.O_RDWR, block, at)
        at += len(block)
    close(client, handle)
    assert (public / "f").read_bytes() == block * (at // len(block))
    assert client.asked("fs.write") == 12


def test_all_files_together_have_a_bound(
    client: Client, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "MOST_BYTES", 10)
    (one, first), (other, second) = make(client, b"f"), make(client, b"g")
    assert client.gather(one, b"123456") and not client.gather(other, b"12345")
    assert client.gather(other, b"1234")
    close(client, first)
    assert client.gather(other, b"56", 4)
    close(client, second)
    assert (public / "g").read_bytes() == b"123456" and not client.tree.write_behind._bytes


@pytest.mark.parametrize("time", [1 << 64, -(1 << 63) - 1])
def test_times_that_no_message_holds_are_refused_at_once(client: Client, public: Path, time: int) -> None:
    node, handle = written(client)
    assert errno_of(client.tree.setattr, node, SetAttr(mtime=time)) == errno.EINVAL
    assert (public / "f").read_bytes() == b"data"
    close(client, handle)


def test_a_directory_that_the_client_has_made_has_no_names_that_it_does_not_know(
    client: Client, device: Device
) -> None:
    made = client.tree.mkdir(client.public, b"d", 0o755, None).node
    before = client.asked("fs.walk")
    assert errno_of(client.find, b"f", made) == errno.ENOENT
    node, handle = make(client, b"f", made)
    assert client.find(b"f", made) == node
    client.tree.unlink(made, b"f")
    assert errno_of(client.find, b"f", made) == errno.ENOENT and client.asked("fs.walk") == before
    close(client, handle)
    assert errno_of(client.find, b"f" * 256, made) == errno.ENAMETOOLONG
    theirs = device.find(b"d")
    Doing(lambda: device.tree.release(device.tree.create(theirs, b"g", os.O_WRONLY, 0o644, None)[1])).result()
    assert client.find(b"g", made) and errno_of(client.find, b"h", made) == errno.ENOENT


def test_what_is_written_while_the_first_descriptor_is_released_is_kept(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    second = client.tree.open(node, os.O_RDWR)
    assert client.gather(node, b"data")
    client.gate.shut("fs.written")
    releasing = Doing(client.tree.release, handle)
    client.gate.reached()
    gathered = client.gather(node, b"more", 4)
    client.gate.open()
    releasing.result()
    assert gathered or client.tree.write(second, b"more", 4) == 4
    close(client, second)
    assert (public / "f").read_bytes() == b"datamore"


def test_a_file_that_was_looked_at_before_its_reply_came_is_written_through(
    client: Client, device: Device
) -> None:
    """Though the client has been granted the file since."""
    client.gate.shut("fs.opened")
    making = Doing(make, client, b"f")
    client.gate.reached()
    assert Doing(device.find, b"f").result() and client.find(b"f")
    client.gate.open()
    assert not client.gather(making.result()[0], b"data")


def test_a_create_that_fails_takes_nothing_from_another_file(
    client: Client, device: Device, server: Server, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though that file may have been given the inode number of the one without a name."""
    (public / "f").touch()
    (public / "d").mkdir()
    directory, delegations = client.find(b"d"), server.sessions.delegations
    made, forget = dict[bytes, tuple[Node, Handle]](), delegations.forget

    def make_others_and_forget(holder: Holder, inode: int) -> None:
        monkeypatch.setattr(delegations, "forget", forget)
        made.update({name: make(client, name, directory) for name in (b"a", b"b", b"c")})
        forget(holder, inode)

    monkeypatch.setattr(delegations, "forget", make_others_and_forget)
    assert errno_of(make, client, b"f") == errno.EEXIST and made
    for name, (node, _) in made.items():
        assert client.gather(node, b"data")
        found = Doing(device.tree.lookup, device.find(b"d"), name).result()
        assert found.attributes.size == 4


def test_a_create_while_the_devices_mount_goes_is_done_once(
    client: Client, server: Server, public: Path
) -> None:
    server.tree.after["create"] = lambda: server.sessions.delegations.lose_device(None)
    assert Doing(make, client, b"f").result() and (public / "f").exists()

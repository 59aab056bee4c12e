# SPDX-License-Identifier: Apache-2.0
"""A client with an exclusive directory delegation creates asynchronously; every other client sees it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.fs.client import async_create as edge
from millpond.fs.client import dir_delegations, write_behind
from millpond.fs.proto.async_create import MAX_BATCH
from millpond.fs.server import preallocation
from millpond.fs.server.preallocation import PreallocatedFiles
from millpond.fs.store import backing_fs
from millpond.fs.vfs.inode_api import NegativeEntry, Node, SetAttr, WouldBlock

from ..waiting import eventually
from .caching_client import Client, Device, hold, make, shared
from .support import SOON, Doing, Server, errno_of

LEASE = 1.5
_WHITEOUT = 4
LARGE = b"data" * (1 << 14)  # more than there is room for on the server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with shared(tmp_path, LEASE) as made:
        yield made


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told by the clock."""
    monkeypatch.setattr(edge, "_TICK_SECONDS", 1000.0)
    monkeypatch.setattr(write_behind, "_TICK_SECONDS", 1000.0)
    monkeypatch.setattr(write_behind, "_JOIN_SECONDS", 0.1)


@pytest.fixture
def client(server: Server, patience: None) -> Iterator[Client]:
    made = Client(server)
    yield made
    with contextlib.suppress(OSError):
        made.close()


@pytest.fixture
def device(server: Server) -> Device:
    return Device(server)


@pytest.fixture
def public(tmp_path: Path) -> Path:
    return tmp_path / "public"


def test_a_name_is_made_behind_and_told_before_anybody_looks(
    client: Client, device: Device, public: Path
) -> None:
    hold(client)
    node, handle = make(client, b"f")
    assert not (public / "f").exists()
    found = client.tree.lookup(client.public, b"f")
    assert found.node == node and stat.S_IMODE(found.attributes.mode) == 0o640
    looking = Doing(device.find, b"f")
    there = device.tree.getattr(looking.result()).attributes
    assert there.inode == found.attributes.inode and there.mode == found.attributes.mode
    assert (there.mtime, there.links, there.size) == (found.attributes.mtime, 1, 0)
    client.tree.write(handle, b"data", 0)
    assert (public / "f").read_bytes() == b"data"


def test_what_is_taken_away_before_it_was_told_leaves_nothing(client: Client, public: Path) -> None:
    hold(client)
    asked = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    inodes = set()
    for number in range(50):
        name = b"f%d" % number
        node, handle = make(client, name)
        inodes.add(client.inode(node))
        client.tree.release(handle)
        client.tree.unlink(client.public, name)
        with pytest.raises(NegativeEntry):
            client.tree.lookup(client.public, name)
        client.tree.forget(node, 1)
        assert client.tree.rpc.inodes.get(node) is None
    assert not client.tree.async_create.names.pending
    assert len(inodes) < 20 and len(os.listdir("/proc/self/fd")) <= asked  # noqa: PTH208
    assert sorted(os.listdir(public)) == ["first", "second"]  # noqa: PTH208
    client.tree.async_create.flush()


def test_a_whiteout_is_left_in_place_of_what_was_renamed(client: Client, public: Path) -> None:
    """RENAME_WHITEOUT: a character device under the old name, which the client has all names of."""
    hold(client)
    node, handle = make(client, b"f")
    try:
        client.tree.rename(client.public, b"f", client.public, b"g", _WHITEOUT)
    except OSError as error:
        pytest.skip(f"no whiteouts here: {error}")
    assert stat.S_ISCHR((public / "f").lstat().st_mode)
    assert stat.S_ISCHR(client.tree.lookup(client.public, b"f").attributes.mode)
    assert client.tree.lookup(client.public, b"g").node == node
    client.tree.release(handle)


@pytest.mark.parametrize("how", ["created", "opened"])
def test_a_file_without_its_name_lives_while_it_is_open(client: Client, how: str) -> None:
    hold(client)
    node, handle = make(client, b"f", mode=0o604)
    if how == "opened":
        client.tree.release(handle)
        handle = client.tree.open(node, os.O_RDONLY)
    client.tree.unlink(client.public, b"f")
    assert errno_of(client.tree.lookup, client.public, b"f") == errno.ENOENT
    status = client.tree.getattr(node).attributes
    assert (status.links, stat.S_IMODE(status.mode), status.size) == (0, 0o604, 0)
    if how == "created":
        assert client.tree.write(handle, b"data", 0) == 4
        assert bytes(client.tree.read(handle, 9, 0)) == b"data" and client.size(node) == 4
    client.tree.release(handle)
    client.tree.forget(node, 1)


def test_no_file_is_made_of_one_that_was_changed(client: Client, public: Path) -> None:
    hold(client)
    node, handle = make(client, b"f")
    client.tree.release(handle)
    client.tree.unlink(client.public, b"f")
    status = client.tree.getattr(node).attributes
    assert (status.links, stat.S_IMODE(status.mode)) == (0, 0o640)
    client.tree.setattr(node, SetAttr(size=4))  # somebody has it still, by its place
    client.tree.forget(node, 1)
    for number in range(20):  # none is made of it
        client.tree.release(make(client, b"%d" % number)[1])
    client.tree.async_create.flush()
    assert {(public / f"{number}").stat().st_size for number in range(20)} == {0}


def test_a_write_tells_the_names_in_the_same_request(client: Client, public: Path) -> None:
    hold(client)
    for name in (b"a", b"b"):
        make(client, name)
    node, handle = make(client, b"c")
    before = dict(client.tree.rpc.meter.kinds)
    counts = {kind: sum(classes) for kind, classes in before.items()}
    assert client.gather(node, LARGE) and not (public / "c").exists()
    Doing(client.tree.write_behind.close_descriptor, handle, may_wait=False).result()
    after = {kind: sum(classes) for kind, classes in client.tree.rpc.meter.kinds.items()}
    asked = {kind for kind in after if after[kind] != counts.get(kind)}
    assert asked - {"fs.hello"} == {"fs.gathered"}
    assert {path.name for path in public.iterdir()} == {"first", "second", "a", "b", "c"}
    assert (public / "c").read_bytes() == LARGE and not client.tree.async_create.names.pending
    status, there = client.tree.getattr(node).attributes, (public / "c").stat()
    assert (status.size, status.ctime, status.mtime) == (len(LARGE), there.st_ctime_ns, there.st_mtime_ns)
    assert "fs.getattr" not in client.tree.rpc.meter.kinds  # it came with the reply


@pytest.mark.parametrize(
    "how", ["setattr", "getattr of the directory", "list", "link", "rename", "sync", "statfs"]
)
def test_what_depends_on_it_tells_it_first(client: Client, public: Path, how: str) -> None:
    hold(client)
    node, handle = make(client, b"f")
    tree, at = client.tree, client.public
    if how == "setattr":
        assert tree.setattr(node, SetAttr(mode=0o600)).attributes.links == 1
    elif how == "getattr of the directory":
        assert tree.getattr(at).attributes.mtime <= time.time_ns()  # an estimate, for an instant
        eventually(
            lambda: tree.getattr(at).attributes.mtime == public.stat().st_mtime_ns,
            "the directory's time is the device's",
        )
    elif how == "list":
        assert client.names() == {"first", "second", "f"}
    elif how == "link":
        assert tree.link(node, at, b"g").attributes.links == 2
    elif how == "rename":
        tree.rename(at, b"f", at, b"h")
        assert tree.lookup(at, b"h").node == node and errno_of(tree.lookup, at, b"f") == errno.ENOENT
        assert errno_of(make, client, b"h") == errno.EEXIST
        tree.release(make(client, b"f")[1])
    elif how == "sync":
        tree.fsync(handle, False)
    else:
        tree.statfs()
    assert (public / "f").exists() or how == "rename"


def test_a_directory_that_was_made_here_is_exclusive_at_once(client: Client, public: Path) -> None:
    directory = client.tree.mkdir(client.public, b"d", 0o755, None).node
    with pytest.raises(NegativeEntry):
        client.tree.lookup(directory, b"f")
    make(client, b"f", directory)
    assert not list((public / "d").iterdir()) and "fs.create" not in client.tree.rpc.meter.kinds
    assert errno_of(client.tree.rmdir, client.public, b"d") == errno.ENOTEMPTY
    client.tree.unlink(directory, b"f")
    client.tree.rmdir(client.public, b"d")
    assert not (public / "d").exists()


def test_so_many_directories_are_held_at_once(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dir_delegations, "_MOST_HELD", 3)
    for number in range(9):
        directory = client.tree.mkdir(client.public, b"d%d" % number, 0o755, None).node
        errno_of(client.tree.lookup, directory, b"f")
        client.tree.release(make(client, b"f", directory)[1])
        client.tree.async_create.flush()
    assert len(client.tree.async_create.names.held) == 3
    client.tree.statfs()
    assert server.open_files == 3  # what was prepared for the others is given back


def test_what_is_there_is_not_made_again(client: Client, public: Path) -> None:
    (public / "old").touch()
    hold(client)
    client.tree.mkdir(client.public, b"d", 0o755, None)
    for name in (b"old", b"first", b"d"):
        assert errno_of(make, client, name) == errno.EEXIST
    client.tree.rmdir(client.public, b"d")
    client.tree.unlink(client.public, b"old")
    for name in (b"old", b"d"):
        make(client, name)
    assert errno_of(make, client, b"old") == errno.EEXIST


def test_it_is_told_before_long(server: Server, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dir_delegations, "_IDLE_SECONDS", 0.2)
    client = Client(server)
    hold(client)
    make(client, b"f")
    eventually((public / "f").exists, "the name is told")
    eventually(
        lambda: client.public not in client.tree.async_create.names.held, "an idle directory is given back"
    )  # nothing more comes
    eventually(lambda: server.open_files == 1, "only the made file is open")
    client.close()


def test_more_names_than_files_are_prepared_at_once(client: Client, public: Path) -> None:
    hold(client)
    for number in range(300):
        client.tree.release(make(client, b"%d" % number)[1])
    client.tree.async_create.flush()
    assert len(os.listdir(public)) == 302  # noqa: PTH208


def test_two_clients_see_each_others_names(client: Client, server: Server, device: Device) -> None:
    other = Client(server)
    directory = client.tree.mkdir(client.public, b"d", 0o755, None).node
    hold(client, directory)
    make(client, b"f", directory)
    there = other.tree.lookup(other.public, b"d").node
    assert other.names(there) == {"first", "second", "f"}
    make(client, b"g", directory)
    assert other.find(b"g", there)
    other.tree.unlink(there, b"g")
    assert errno_of(client.tree.lookup, directory, b"g") == errno.ENOENT
    make(client, b"g", directory)
    other.close()


def test_the_device_changes_what_a_client_has_exclusively(
    client: Client, device: Device, public: Path
) -> None:
    hold(client)
    make(client, b"f")
    device.put(b"g", b"data")
    assert (public / "f").exists() and client.names() == {"first", "second", "f", "g"}
    assert errno_of(make, client, b"g") == errno.EEXIST


def test_where_no_file_can_be_without_a_name_nothing_is_made_behind(
    client: Client, server: Server, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")

    monkeypatch.setattr(backing_fs, "open_unnamed", refused)
    for number in range(5):
        make(client, b"%d" % number)
        assert (public / f"{number}").exists()
    assert not client.tree.async_create.names.held and not server.sessions.delegations._table.exclusive_count


def test_a_directory_with_too_many_names_is_not_exclusive(
    client: Client, server: Server, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preallocation, "_MAX_NAMES", 3)
    for number in range(3):
        (public / f"old{number}").touch()
    for number in range(5):
        make(client, b"%d" % number)
        assert (public / f"{number}").exists()
    assert server.open_files == 5 and not server.sessions.delegations._table.exclusive_count


def test_who_lists_an_open_directory_sees_them_too(client: Client, device: Device) -> None:
    opened = device.tree.opendir(device.public)
    hold(client)
    make(client, b"f")
    listed = Doing(lambda: {entry.name for entry in device.tree.readdir(opened, 0)}).result()
    assert listed == {".", "..", "first", "second", "f"}
    device.tree.release(opened)


def stocked(client: Client, name: bytes) -> Node:
    """A directory that the client has exclusively, with as many files prepared as there ever are."""
    directory = client.tree.mkdir(client.public, name, 0o755, None).node
    hold(client, directory)
    held = client.tree.async_create.names.held[directory]
    while len(held.preallocated) < MAX_BATCH - 1:
        client.tree.release(make(client, b"s%d" % len(held.names), directory)[1])
    client.tree.async_create.flush()
    return directory


def test_a_write_to_a_file_whose_name_is_not_among_the_next_tells_all_first(
    client: Client, public: Path
) -> None:
    full, other = stocked(client, b"full"), stocked(client, b"other")
    for number in range(MAX_BATCH + 2):
        client.tree.release(make(client, b"%d" % number, full if number < MAX_BATCH - 1 else other)[1])
    node, handle = make(client, b"f", other)
    assert client.gather(node, LARGE)
    Doing(client.tree.write_behind.close_descriptor, handle, may_wait=False).result()
    written = client.tree.getattr(node).attributes.mtime
    client.tree.release(handle)
    assert (public / "other/f").stat().st_mtime_ns == written
    client.tree.unlink(other, b"f")
    client.tree.forget(node, 1)
    client.tree.release(make(client, b"g", other)[1])
    client.tree.async_create.flush()
    assert (public / "other/g").read_bytes() == b"" and not (public / "other/f").exists()


def test_a_name_that_was_told_with_a_write_that_has_to_wait_is_not_taken_away_here(
    client: Client, server: Server, public: Path
) -> None:
    (public / "old").write_bytes(b"")
    directory = client.tree.mkdir(client.public, b"d", 0o755, None).node
    handle = client.tree.open(client.find(b"old"), os.O_RDWR)
    hold(client, directory)
    with contextlib.closing(Client(server)) as other:
        assert other.kept(other.find(b"old"))
        node, made = make(client, b"f", directory)
        client.tree.release(made)
        with pytest.raises(WouldBlock):
            Doing(client.tree.write, handle, b"x", 0, may_wait=False).result()
        client.tree.unlink(directory, b"f")
        client.tree.forget(node, 1)
        _, made = make(client, b"g", directory)
        client.tree.write(made, b"data", 0)
    assert not (public / "d/f").exists() and (public / "d/g").read_bytes() == b"data"


def test_a_name_that_is_made_while_the_listing_is_under_way_is_there(client: Client) -> None:
    directory = client.tree.mkdir(client.public, b"d", 0o755, None).node
    client.gate.shut("fs.prepared")
    looking = Doing(client.tree.lookup, directory, b"f", may_wait=False)
    client.gate.reached()
    made = client.tree.mkdir(directory, b"sub", 0o755, None).node
    client.gate.open()
    assert errno_of(looking.result) == errno.ENOENT
    assert client.tree.lookup(directory, b"sub").node == made
    hold(client, directory)
    assert client.tree.lookup(directory, b"sub").node == made


def test_a_name_that_is_too_long_is_refused_at_once(client: Client) -> None:
    hold(client)
    assert errno_of(client.tree.lookup, client.public, b"f" * 256) == errno.ENAMETOOLONG
    assert errno_of(make, client, b"f" * 256) == errno.ENAMETOOLONG
    make(client, b"f" * 255)
    client.tree.async_create.flush()


def test_who_looks_at_a_directory_while_its_change_is_told_waits(
    client: Client, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(client)
    node, handle = make(client, b"f")
    client.tree.release(handle)
    client.tree.unlink(client.public, b"f")
    client.tree.forget(node, 1)
    held, tell = client.tree.async_create.names.held[client.public], PreallocatedFiles.flush
    begun, go_on = threading.Event(), threading.Event()

    def late(*arguments: Any) -> list[Node]:
        begun.set()
        assert go_on.wait(SOON)
        return tell(*arguments)

    monkeypatch.setattr(PreallocatedFiles, "flush", late)
    held.estimated = 0.0  # as after a while
    client.tree.rpc.inodes.file(client.public).attributes = None
    telling = Doing(client.tree.async_create.flush)
    assert begun.wait(SOON)
    looking = Doing(client.tree.getattr, client.public)
    time.sleep(0.2)
    assert not looking.done
    go_on.set()
    telling.result()
    assert looking.result().attributes.mtime == public.stat().st_mtime_ns


def test_whether_names_can_be_made_is_asked_again_after_a_change_of_permissions(client: Client) -> None:
    hold(client)
    held = client.tree.async_create.names.held[client.public]
    client.tree.setattr(client.public, SetAttr(mode=0o700))
    assert not held.preallocated and client.public not in client.tree.async_create.names.held
    hold_again = make(client, b"f")
    client.tree.fsync(hold_again[1], False)


def test_who_has_waited_for_names_to_be_told_does_not_wait_for_more(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(client)
    held = client.tree.async_create.names.held[client.public]
    while held.preallocated:
        make(client, b"%d" % len(held.preallocated))

    def late(*_: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "it did not answer")

    asked = len(client.tree.rpc.meter.kinds)
    monkeypatch.setattr(client.tree.async_create.delegations, "_flush", late)
    monkeypatch.setattr(dir_delegations, "_MOST_PENDING", 0)
    assert errno_of(make, client, b"f") == errno.ETIMEDOUT
    assert len(client.tree.rpc.meter.kinds) == asked


def test_the_first_sync_of_a_file_is_of_its_name_too(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(client)
    _, handle = make(client, b"f")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append("all"))
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.append("data"))
    for _ in range(2):
        client.tree.fsync(handle, True)
    assert synced == ["all", "data"]

# SPDX-License-Identifier: Apache-2.0
"""Many files in a request: directories listed with attributes, small files read and stored whole."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ProtocolError
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto import file_ops as p
from millpond.fs.store.bulk_files import BackingBulk
from millpond.fs.vfs.bulk_api import MAX_STORED, SMALL_BYTES, BulkFs, SmallFile
from millpond.fs.vfs.inode_api import ROOT, InodeFs
from millpond.fs.vfs.path_api import MAX_TRANSFER

from .caching_client import Client, Device
from .recall_clients import client, device, lease, server
from .support import SOON, Flash, Server, Talk, errno_of

__all__ = ["client", "device", "lease", "server"]


def small(name: bytes, data: bytes = b"data", mode: int = 0o640) -> SmallFile:
    return SmallFile(name, data, mode, 1_000_000_007, 2_000_000_009)


class Bulk:
    """A tree, its bulk operations, and its public directory, where it lies and by node."""

    def __init__(self, tree: InodeFs, bulk: BulkFs, flash: Flash, top: Path) -> None:
        self.tree, self.bulk, self.flash, self.folder = tree, bulk, flash, top / "public"
        self.node = tree.walk(ROOT, [b"public"]).node


@pytest.fixture(params=["local", "remote"])
def bulk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bulk]:
    """Of a directory here, and of one behind a server."""
    (tmp_path / "public").mkdir()
    (tmp_path / "private").mkdir()
    if request.param == "local":
        root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
        tree = Flash(root)
        yield Bulk(tree, BackingBulk(tree), tree, tmp_path)
        assert not tree._open
        os.close(root)
        return
    server = Server(tmp_path, public=b"public")
    remote = RemoteFs(server.dial)
    yield Bulk(remote, remote.bulk, server.tree, tmp_path)
    assert not server.open_files
    remote.close()
    server.close()


def test_files_are_stored_whole_with_mode_and_times(bulk: Bulk) -> None:
    (bulk.folder / "b").write_text("it was there")
    (bulk.folder / "b").chmod(0o600)
    files = [small(b"a", b"one"), small(b"b", b"two" * 5000, 0o755), small(b"\xff", b"")]
    assert list(bulk.bulk.store(bulk.node, files)) == [0, 0, 0]
    assert sorted(os.listdir(os.fsencode(bulk.folder))) == [b"a", b"b", b"\xff"]  # noqa: PTH208
    for file in files:
        path = bulk.folder / os.fsdecode(file.name)
        found = path.stat()
        assert path.read_bytes() == file.data
        assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (file.mode, 1)
        assert (found.st_atime_ns, found.st_mtime_ns) == (1_000_000_007, 2_000_000_009)


def test_each_file_has_its_own_error(bulk: Bulk) -> None:
    (bulk.folder / "d").mkdir()
    files = [small(b"d"), small(b"ok"), small(b".."), small(b"n" * 256), small(b"a/b")]
    expected = [errno.EISDIR, 0, errno.EINVAL, errno.ENAMETOOLONG, errno.EINVAL]
    assert list(bulk.bulk.store(bulk.node, files)) == expected
    assert sorted(os.listdir(bulk.folder)) == ["d", "ok"]  # noqa: PTH208


def test_a_directory_is_listed_with_attributes(bulk: Bulk) -> None:
    (bulk.folder / "d" / "deep").mkdir(parents=True)
    (bulk.folder / "d" / "link").symlink_to("nowhere")
    for number in range(300):
        (bulk.folder / "d" / f"{number}").write_bytes(bytes(number))
    found = dict(bulk.bulk.list(ROOT, [b"public", b"d"]))
    assert len(found) == 302
    assert {found[b"%d" % number].size for number in range(300)} == set(range(300))
    assert stat.S_ISDIR(found[b"deep"].mode) and stat.S_ISLNK(found[b"link"].mode)
    assert found[b"7"].mtime == (bulk.folder / "d" / "7").stat().st_mtime_ns
    assert errno_of(lambda: list(bulk.bulk.list(ROOT, [b"public", b"none"]))) == errno.ENOENT
    assert errno_of(lambda: list(bulk.bulk.list(ROOT, [b"public", b"d", b"7"]))) == errno.ENOTDIR


def test_files_without_extended_attributes_are_found(bulk: Bulk) -> None:
    (bulk.folder / "d").mkdir()
    for number in range(600):
        (bulk.folder / "d" / f"{number}").touch()
    for name in ("3", "599"):
        os.setxattr(bulk.folder / "d" / name, "user.a", b"")
    listed = dict(bulk.bulk.list(ROOT, [b"public", b"d"]))
    assert {name for name, known in listed.items() if not known.bare} == {b"3", b"599"}


def test_small_files_are_read_and_others_left_out(bulk: Bulk) -> None:
    names = [b"%d" % number for number in range(200)]
    for name in names:
        (bulk.folder / name.decode()).write_bytes(name * 3000)
    (bulk.folder / "large").write_bytes(bytes(SMALL_BYTES + 1))
    (bulk.folder / "largest").write_bytes(bytes(SMALL_BYTES))
    (bulk.folder / "empty").touch()
    os.mkfifo(bulk.folder / "fifo")
    asked = [*names, b"large", b"largest", b"empty", b"fifo", b"none"]
    found = {file.name: file for file in bulk.bulk.read(bulk.node, asked)}
    assert found.keys() == {*names, b"largest", b"empty"}
    assert all(found[name].data == name * 3000 for name in names)
    assert found[b"7"].attributes.mtime == (bulk.folder / "7").stat().st_mtime_ns


@pytest.mark.parametrize(
    ("operation", "code", "told"),
    [("create_unnamed", errno.EOPNOTSUPP, errno.EOPNOTSUPP), ("fsync", errno.EIO, errno.EIO)],
    ids=["an old kernel", "a bad flash"],
)
def test_what_is_not_on_the_flash_gets_no_name(bulk: Bulk, operation: str, code: int, told: int) -> None:
    with bulk.flash.refusing(code, operation):
        assert list(bulk.bulk.store(bulk.node, [small(b"a")])) == [told]
    assert not list(bulk.folder.iterdir())


def test_pages_go_on_behind_their_cookie(tmp_path: Path) -> None:
    for number in range(500):
        (tmp_path / f"{number:03}").touch()
    server = Server(tmp_path)
    with server.talk() as talk:
        names, cookie, pages, end = list[bytes](), 0, 0, False
        while not end:
            end, entries = page(talk, c.ReadDirectoryPlus(ROOT, cookie=cookie, size=4096))
            names += [entry.name for entry in entries]
            cookie, pages = entries[-1].cookie if entries else cookie, pages + 1
        assert len(names) == len(set(names)) == 500 and pages > 5
        _, one = page(talk, c.ReadDirectoryPlus(ROOT, size=0))
        assert len(one) == 1  # or the listing would never end
        _, found = page(talk, c.ReadDirectoryPlus(ROOT, size=4096, delegated=True))
        nodes = {entry.name: entry.node for entry in found}
        assert not any(nodes.values())  # a million files take no descriptors
        (tmp_path / "d").mkdir()
        _, found = page(talk, c.ReadDirectoryPlus(ROOT, delegated=True))
        (node,) = (entry.node for entry in found if entry.name == b"d")
        assert node == talk.find(b"d") and sum(entry.node > 0 for entry in found) == 1
    server.close()


def page(talk: Talk, request: c.ReadDirectoryPlus) -> tuple[bool, list[c.EntryPlus]]:
    talk.channel.send(request, Deadline.after(SOON))
    reply = talk.channel.receive(Deadline.after(SOON)).message
    data = talk.channel.receive_payload(MAX_TRANSFER, Deadline.after(SOON))
    assert isinstance(reply, c.EntriesPlus), reply
    assert len(data) <= max(request.size, 400)
    return reply.end, list(c.unpack_page(data))


def test_nothing_beside_the_public_part_is_read_or_stored(tmp_path: Path) -> None:
    for part in ("public", "private"):
        (tmp_path / part).mkdir()
    (tmp_path / "secret").write_text("secret")
    server = Server(tmp_path, public=b"public")
    with server.talk() as talk:
        for delegated in (False, True):
            request = f.FetchMany(ROOT, (b"secret", b"private"), 100, delegated=delegated)
            talk.channel.send(request, Deadline.after(SOON))
            assert talk.channel.receive(Deadline.after(SOON)).message == f.Fetched(2)
            assert not talk.channel.receive_payload(MAX_TRANSFER, Deadline.after(SOON))
        files = c.pack_files([small(b"new")])
        assert talk.ask(c.StoreFiles(ROOT), files) == p.Error(errno.EROFS)
    server.close()


@pytest.mark.parametrize("cut", [1, 20, -1, -5])
def test_malformed_files_end_the_connection(tmp_path: Path, cut: int) -> None:
    server = Server(tmp_path)
    with pytest.raises(ProtocolError):
        c.unpack_files(c.pack_files([small(b"a")])[:cut])
    with pytest.raises(ProtocolError):
        c.unpack_files(c.pack_files([small(b"a", b"")] * (MAX_STORED + 1)))
    with server.talk() as talk:
        answer = talk.ask(c.StoreFiles(ROOT), c.pack_files([small(b"a")])[:cut])
        assert answer.NAME == "failure"
    assert not list(tmp_path.iterdir())
    server.close()


def test_a_host_learns_of_files_that_others_store(client: Client, device: Device, top: Path) -> None:
    """The device's own mount stands for another client, whose cache a store must not leave stale."""
    found = client.find(b"f")
    assert client.read(found) == b"one" and client.kept(found)
    other = RemoteFs(client.server.dial)
    folder = other.walk(ROOT, [b"public"]).node
    assert list(other.bulk.store(folder, [small(b"f", b"stored"), small(b"more", b"x")])) == [0, 0]
    assert client.read(client.find(b"f")) == b"stored"
    assert client.read(client.find(b"more")) == b"x"
    other.close()

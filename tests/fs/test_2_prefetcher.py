# SPDX-License-Identifier: Apache-2.0
"""Small files that are fetched before they are read: a bulk lookup counts like a single one."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from millpond.base.errors import ProtocolError
from millpond.fs.client import prefetcher
from millpond.fs.client.cache.small_files import MOST
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import ROOT, Node, SetAttr
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes

from .caching_client import Client, Device, restart
from .recall_clients import client, device, lease, server
from .support import SOON, Doing, Server, errno_of

__all__ = ["client", "device", "lease", "server"]


def ask(client: Client, names: Sequence[bytes], directory: Node | None = None) -> None:
    client.tree.prefetcher.ask(directory or client.public, names)


def fetch(client: Client, *names: bytes, directory: Node | None = None) -> None:
    """Return once they have come."""
    ask(client, names, directory)
    assert client.tree.prefetcher.wait(4 * SOON)


def asked(client: Client, *kinds: str) -> int:
    """How many requests of these kinds, or of all that a program's operation sends, the server has answered.
    What tells it of FORGETs is sent at any time.
    """
    found = client.tree.rpc.meter.kinds
    counted = kinds or found.keys() - {"fs.hello", "fs.statfs"}
    return sum(sum(found[kind]) for kind in counted if kind in found)


def has(client: Client, name: bytes, data: bytes) -> bool:
    """Whether these are the contents, and nobody was asked."""
    before = asked(client)
    return client.read(client.find(name)) == data and asked(client) == before


def test_what_was_fetched_is_read_without_asking(client: Client) -> None:
    before = asked(client, "fs.fetch")
    fetch(client, b"f", b"none", b"g")
    assert asked(client, "fs.fetch") == before + 1
    assert has(client, b"g", b"another") and has(client, b"f", b"one")
    assert client.kept(client.find(b"f"))
    assert errno_of(client.find, b"none") == errno.ENOENT


def read_some(client: Client, names: Sequence[bytes]) -> None:
    for name in names:
        assert client.read(client.find(name)) == name
    assert client.tree.prefetcher.wait(4 * SOON)


@pytest.fixture
def samples(server: Server, top: Path) -> list[bytes]:
    """Many files, each with its name in it."""
    names = [b"%04d" % number for number in range(600)]
    for name in names:
        (top / "public" / name.decode()).write_bytes(name)
    return names


def test_the_rest_of_a_directory_of_which_much_was_read(samples: list[bytes], client: Client) -> None:
    read_some(client, samples[:64])
    read_some(client, samples[64:127])
    assert asked(client, "fs.fetch") == 0
    read_some(client, samples[127:128])
    assert asked(client, "fs.fetch") == 5
    assert all(has(client, name, name) for name in samples[128:])


def test_the_rest_is_as_new_as_what_was_read(samples: list[bytes], client: Client, device: Device) -> None:
    read_some(client, samples[:128])
    device.put(b"0300", b"new")
    device.tree.unlink(device.public, b"0301")
    assert client.read(client.find(b"0300")) == b"new"
    assert errno_of(client.find, b"0301") == errno.ENOENT


def test_a_directory_that_is_too_long_to_be_listed(
    samples: list[bytes], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "_NAME", 1)
    read_some(client, samples[:128])
    assert asked(client, "fs.fetch", "fs.readdir") == 0


def test_the_same_file_has_the_same_number(client: Client) -> None:
    node = client.find(b"f")
    fetch(client, b"f")
    assert client.find(b"f") == node and has(client, b"f", b"one")


def test_what_is_here_or_was_read_is_not_fetched_again(client: Client) -> None:
    fetch(client, b"f", b"g")
    client.read(client.find(b"f"))
    before = asked(client)
    fetch(client, b"f", b"g")
    assert asked(client) == before


def test_names_that_no_file_has(client: Client) -> None:
    before = asked(client)
    fetch(client, b"", b".", b"..", b"f/g", b"../g")
    assert asked(client) == before
    fetch(client, b"x" * 5000, b"f")
    assert has(client, b"f", b"one")


def test_what_is_recalled_is_asked_anew(client: Client, device: Device) -> None:
    fetch(client, b"f", b"g")
    device.put(b"f", b"two")
    assert client.read(client.find(b"f")) == b"two" and has(client, b"g", b"another")
    fetch(client, b"g")
    device.tree.rename(device.public, b"f", device.public, b"g")
    assert client.read(client.find(b"g")) == b"two"
    assert errno_of(client.find, b"f") == errno.ENOENT


def test_what_the_client_itself_changes_is_not_read_from_before(client: Client) -> None:
    fetch(client, b"f", b"g")
    with client.opened(client.find(b"f"), os.O_WRONLY) as handle:
        client.tree.write(handle, b"ONE!", 0)
    assert client.read(client.find(b"f")) == b"ONE!"
    client.tree.unlink(client.public, b"g")
    assert errno_of(client.find, b"g") == errno.ENOENT


@pytest.mark.parametrize("by", ["the device", "the client"])
def test_what_was_under_way_while_it_was_changed_does_not_count(
    client: Client, device: Device, by: str
) -> None:
    client.gate.shut("fs.fetched")
    ask(client, [b"f", b"g"])
    client.gate.reached()
    if by == "the device":
        device.put(b"f", b"two")
    else:
        with client.opened(client.find(b"f"), os.O_WRONLY) as handle:
            client.tree.write(handle, b"two", 0)
    assert client.size(client.find(b"f")) == 3  # granted anew, in between
    client.gate.open()
    assert client.tree.prefetcher.wait(4 * SOON)
    assert client.read(client.find(b"f")) == b"two"


def test_writes_to_other_files_spoil_nothing(client: Client) -> None:
    """As of a program that appends to a log."""
    with client.opened(client.find(b"g"), os.O_WRONLY) as log:
        client.gate.shut("fs.fetched")
        ask(client, [b"f", b"g"])
        client.gate.reached()
        client.tree.write(log, b"written", 0)
        client.tree.setattr(client.find(b"g"), SetAttr(size=4))
        client.gate.open()
        assert client.tree.prefetcher.wait(4 * SOON)
    assert has(client, b"f", b"one") and client.kept(client.find(b"f"))
    assert client.read(client.find(b"g")) == b"writ"


def test_a_file_that_was_renamed_meanwhile_does_not_count(client: Client) -> None:
    node = client.find(b"f")
    client.gate.shut("fs.fetched")
    ask(client, [b"f", b"g"])
    client.gate.reached()
    client.tree.rename(client.public, b"f", client.public, b"h")
    client.gate.open()
    assert client.tree.prefetcher.wait(4 * SOON)
    assert client.find(b"h") == node and errno_of(client.find, b"f") == errno.ENOENT


def test_a_file_that_is_too_large_is_read_as_ever(client: Client, device: Device) -> None:
    device.put(b"large", b"l" * (MOST + 1))
    device.put(b"largest", b"m" * MOST)
    fetch(client, b"large", b"largest", b"f")
    assert has(client, b"largest", b"m" * MOST) and has(client, b"f", b"one")
    assert client.read(client.find(b"large")) == b"l" * (MOST + 1)
    before = asked(client)
    fetch(client, b"large")
    assert asked(client) == before


def test_more_than_goes_into_one_answer(client: Client, device: Device) -> None:
    count = 2 * MAX_TRANSFER // MOST
    for number in range(count):
        device.put(b"%d" % number, b"%d" % (number % 10) * MOST)
    before = asked(client, "fs.fetch")
    fetch(client, *(b"%d" % number for number in range(count)))
    assert asked(client, "fs.fetch") > before + 1
    assert all(has(client, b"%d" % number, b"%d" % (number % 10) * MOST) for number in range(count))


def test_hundreds_of_names_in_many_directories(client: Client, device: Device) -> None:
    public = Path(f"/proc/self/fd/{client.server.root}") / "public"
    for label in range(20):
        (public / str(label)).mkdir()
        for number in range(30):
            (public / str(label) / str(number)).write_text(f"{label} {number}")
    directories = [client.find(b"%d" % label) for label in range(20)]
    before = asked(client, "fs.fetch")
    for directory in directories:
        ask(client, [b"%d" % number for number in range(30)], directory)
    assert client.tree.prefetcher.wait(4 * SOON)
    assert asked(client, "fs.fetch") <= before + 10
    before = asked(client)
    for label, directory in enumerate(directories):
        for number in range(30):
            assert client.read(client.find(b"%d" % number, directory)) == b"%d %d" % (label, number)
    assert asked(client) == before


def test_a_directory_that_is_gone_is_in_nobodys_way(client: Client, device: Device) -> None:
    device.tree.mkdir(device.public, b"d", 0o755, None)
    gone = client.find(b"d")
    device.tree.rmdir(device.public, b"d")
    client.gate.shut("fs.fetched")
    ask(client, [b"none"])
    client.gate.reached()  # so that both are asked for at once
    ask(client, [b"x"], gone)
    ask(client, [b"f"])
    client.gate.open()
    assert client.tree.prefetcher.wait(4 * SOON)
    assert has(client, b"f", b"one")
    client.tree.forget(gone, 1)
    fetch(client, b"x", directory=gone)
    restart(client)  # its numbers mean nothing any more
    ask(client, [b"y"], gone)
    fetch(client, b"g")
    assert has(client, b"g", b"another")


def test_a_server_that_was_started_again_is_asked_by_name(client: Client) -> None:
    fetch(client, b"f")
    restart(client)
    fetch(client, b"f", b"g")
    assert has(client, b"f", b"one") and has(client, b"g", b"another")


def test_a_server_that_does_not_know_how_is_not_asked_each_time(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f.FetchMany, "NAME", "fs.unknown")
    fetch(client, b"f")
    dialled = len(server.channels)
    fetch(client, b"g")
    assert len(server.channels) == dialled
    assert client.read(client.find(b"f")) == b"one"


def test_nothing_is_fetched_that_could_not_be_kept(client: Client) -> None:
    client.recalls.stop()
    before = asked(client)
    fetch(client, b"f")
    assert asked(client) == before


def test_a_private_file_is_found_nowhere(server: Server, client: Client, top: Path) -> None:
    (top / "private").mkdir()
    (top / "private" / "secret").write_text("mine")
    with server.talk() as talk:
        public = talk.find(b"public")
        for directory, name in ((public, b"../private"), (public, b"..")):
            assert talk.call(f.FetchMany((directory,), ((name,),), MOST), f.Fetched) == f.Fetched(1)
        assert talk.call(f.FetchMany((ROOT,), ((b"private",),), MOST), f.Fetched) == f.Fetched(1)
        for unknown in (public + 1, (top / "private").stat().st_ino):
            assert talk.ask(f.FetchMany((unknown,), ((b"secret",),), MOST)) == p.Error(errno.ESTALE)


def test_a_reader_that_is_faster(client: Client) -> None:
    client.gate.shut("fs.fetched")
    ask(client, [b"f", b"g"])
    client.gate.reached()
    assert client.read(client.find(b"f")) == b"one"
    client.gate.open()
    assert client.tree.prefetcher.wait(4 * SOON)
    assert has(client, b"g", b"another")
    assert client.size(client.find(b"f")) == 3


def test_what_nobody_reads_is_forgotten_in_the_end(
    client: Client, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.fs.client.cache.inodes._MOST_IDLE", 100)
    public = Path(f"/proc/self/fd/{client.server.root}") / "public"
    for number in range(300):
        (public / str(number)).write_text(str(number))
    book = client.tree.rpc.inodes
    for begin in range(0, 300, 60):
        fetch(client, *(b"%d" % number for number in range(begin, begin + 60)))
        assert len(book._idle) <= 100
        assert has(client, b"%d" % begin, b"%d" % begin)  # the first of the last ones is still there
    client.tree.statfs()
    known = client.server.sessions.find(client.tree.rpc.client)
    assert known and len(known.handlers._nodes) < 250


def test_closing_while_it_is_fetched(server: Server, device: Device) -> None:
    device.put(b"f", b"one")
    client = Client(server)
    client.gate.shut("fs.fetched")
    ask(client, [b"f"])
    client.gate.reached()
    closing = Doing(client.close)
    client.gate.open()
    closing.result()
    ask(client, [b"f"])


class TestPacking:
    ATTRIBUTES = Attributes(1 << 60, 0o100644, 2, 1000, 1001, 3, 9, 4096, -1, 10**18, 5, 0x0801)

    def test_there_and_back(self) -> None:
        batch = f.Batch()
        found = [p.FoundIs(7, self.ATTRIBUTES, 3, 4, True), p.FoundIs(8, self.ATTRIBUTES)]
        batch.add(0, found[0], b"abc")
        batch.add(5, found[1], b"")
        packed = memoryview(batch.packed())
        assert [(n, what, bytes(data)) for n, what, data in f.unpack_found(packed)] == [
            (0, found[0], b"abc"),
            (5, found[1], b""),
        ]
        for cut in set(range(1, len(packed))) - {(len(packed) - 3) // 2 + 3}:
            with pytest.raises(ProtocolError):
                list(f.unpack_found(packed[:cut]))

    def test_room(self) -> None:
        batch, count = f.Batch(), 0
        while batch.has_room(MOST):
            batch.add(count, p.FoundIs(7, self.ATTRIBUTES), bytes(MOST))
            count += 1
        assert count == 15 and len(batch.packed()) <= MAX_TRANSFER


def test_a_directory_that_is_gone_when_its_files_come(client: Client, device: Device) -> None:
    """Nothing of it stays, and nobody stumbles over it."""
    d = client.tree.mkdir(client.public, b"d", 0o755, None).node
    with client.opened(client.find(b"f")):
        found, handle = client.tree.create(d, b"f0", os.O_WRONLY, 0o644, None)
        client.tree.write(handle, b"zero", 0)
        client.tree.release(handle)
    client.tree.forget(found.node, 9)
    book = client.tree.rpc.inodes
    with client.tree.rpc.lock:
        book.forget_idle()
    client.gate.shut("fs.fetched")
    ask(client, [b"f0"], d)
    client.gate.reached()
    device.tree.unlink(device.find(b"d"), b"f0")
    device.tree.rmdir(device.public, b"d")
    client.tree.forget(d, 9)
    with client.tree.rpc.lock:
        book.forget_idle()
    client.gate.open()
    assert client.tree.prefetcher.wait(4 * SOON)
    with client.tree.rpc.lock:
        book.forget_idle()
    assert client.read(client.find(b"f")) == b"one"
    restart(client)
    assert client.names() == {"f", "g"}


def test_a_file_that_is_renamed_while_it_comes(client: Client) -> None:
    handle = client.tree.open(client.find(b"f"), os.O_RDWR)
    client.gate.shut("fs.fetched")
    ask(client, [b"f", b"g"])
    client.gate.reached()
    client.tree.rename(client.public, b"f", client.public, b"new")
    client.gate.open()
    assert client.tree.prefetcher.wait(4 * SOON)
    restart(client)
    assert client.tree.write(handle, b"ONE", 0) == 3  # it is found where it is
    assert client.read(client.find(b"new")) == b"ONE"

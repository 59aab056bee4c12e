# SPDX-License-Identifier: Apache-2.0
"""The rest of a directory, fetched before it is read: a bulk lookup counts like a single one."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.blocks import MOST
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import SetAttr
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes

from ..waiting import eventually
from .caching_client import Client, Device, restart
from .recall_clients import client, device, lease, server
from .support import Doing, Server, errno_of

__all__ = ["client", "device", "lease", "server"]
FIRST = 128
"""After so many reads of small files the rest is fetched."""


def read_some(client: Client, names: Sequence[bytes]) -> None:
    for name in names:
        assert client.read(client.find(name)) == name


def fetched(client: Client, times: int) -> None:
    """Return once the server has answered so many requests, and the last one's files are cached."""
    eventually(lambda: client.asked("fs.fetch") >= times, "files are fetched")


@pytest.fixture
def samples(server: Server, top: Path) -> list[bytes]:
    """Many files, each with its name in it."""
    names = [b"%04d" % number for number in range(600)]
    for name in names:
        (top / "public" / name.decode()).write_bytes(name)
    return names


@pytest.fixture
def fetching(samples: list[bytes], client: Client) -> list[bytes]:
    """The same while the first answer is held back by the client's gate."""
    read_some(client, samples[: FIRST - 1])
    client.gate.shut("fs.fetched")
    read_some(client, samples[FIRST - 1 : FIRST])
    client.gate.reached()
    return samples


def test_the_rest_of_a_directory_of_which_much_was_read(samples: list[bytes], client: Client) -> None:
    read_some(client, samples[: FIRST - 1])
    assert client.asked("fs.fetch") == 0
    read_some(client, samples[FIRST - 1 : FIRST])
    fetched(client, 5)
    before = client.asked()
    read_some(client, samples[FIRST:])
    assert client.asked() - before < 50  # the last ones may still have been on their way


def test_the_rest_is_as_new_as_what_was_read(samples: list[bytes], client: Client, device: Device) -> None:
    read_some(client, samples[:FIRST])
    fetched(client, 5)
    device.put(b"0300", b"new")
    device.tree.unlink(device.public, b"0301")
    device.tree.rename(device.public, b"0302", device.public, b"0303")
    assert client.read(client.find(b"0300")) == b"new"
    assert errno_of(client.find, b"0301") == errno.ENOENT
    assert errno_of(client.find, b"0302") == errno.ENOENT
    assert client.read(client.find(b"0303")) == b"0302"


def test_a_directory_that_is_too_long_to_be_listed(client: Client, top: Path) -> None:
    """Listing it would take long, and most of it nobody has read."""
    for number in range(FIRST):
        (top / "public" / f"{number:04}").write_text(f"{number:04}")
    for number in range(1100):
        (top / "public" / f"{number:0200}").touch()
    read_some(client, [b"%04d" % number for number in range(FIRST)])
    client.tree.statfs()
    assert client.asked("fs.fetch") == 0


@pytest.mark.parametrize("by", ["the device", "the client"])
def test_what_was_under_way_while_it_was_changed_does_not_count(
    fetching: list[bytes], client: Client, device: Device, by: str
) -> None:
    changed = fetching[FIRST:]
    for name in changed[:20]:
        if by == "the device":
            device.put(name, b"two")
        else:
            with client.opened(client.find(name), os.O_WRONLY) as handle:
                client.tree.write(handle, b"two+", 0)
        assert client.size(client.find(name)) == (3 if by == "the device" else 4)  # granted anew, in between
    client.gate.open()
    fetched(client, 5)
    for name in changed[:20]:
        assert client.read(client.find(name)) == (b"two" if by == "the device" else b"two+")
    assert all(client.read(client.find(name)) == name for name in changed[20:])


def test_writes_to_other_files_spoil_nothing(fetching: list[bytes], client: Client) -> None:
    """As of a program that appends to a log."""
    with client.opened(client.find(b"g"), os.O_WRONLY) as log:
        client.tree.write(log, b"written", 0)
        client.tree.setattr(client.find(b"g"), SetAttr(size=4))
        client.gate.open()
        fetched(client, 5)
    before = client.asked()
    read_some(client, fetching[FIRST:])
    assert client.asked() - before < 50
    assert client.read(client.find(b"g")) == b"writ"


def test_a_file_that_was_renamed_meanwhile_does_not_count(fetching: list[bytes], client: Client) -> None:
    files = {name: client.find(name) for name in fetching[FIRST:]}
    handle = client.tree.open(files[b"0300"], os.O_RDWR)
    for name in fetching[FIRST:]:
        client.tree.rename(client.public, name, client.public, b"new-" + name)
    client.gate.open()
    fetched(client, 5)
    for name, node in files.items():
        assert client.find(b"new-" + name) == node and errno_of(client.find, name) == errno.ENOENT
    restart(client)
    assert client.tree.write(handle, b"ONE!", 0) == 4  # it is found where it is
    assert client.read(client.find(b"new-0300")) == b"ONE!"


def test_a_directory_that_is_gone_when_its_files_come(client: Client, top: Path, device: Device) -> None:
    """Nothing of it stays, and nobody stumbles over it."""
    (top / "public" / "d").mkdir()
    names = [b"%04d" % number for number in range(200)]
    for name in names:
        (top / "public" / "d" / os.fsdecode(name)).write_bytes(name)
    d = client.find(b"d")
    for name in names[:63]:
        client.read(client.find(name, d))
    client.gate.shut("fs.fetched")
    client.read(client.find(names[63], d))
    client.gate.reached()
    gone = device.find(b"d")
    for name in names:
        device.tree.unlink(gone, name)
    device.tree.rmdir(device.public, b"d")
    client.tree.forget(d, 9)
    client.gate.open()
    fetched(client, 1)
    assert client.read(client.find(b"f")) == b"one"
    assert errno_of(client.find, names[0], d) in (errno.ENOENT, errno.ESTALE)
    restart(client)
    assert client.names() == {"f", "g"}


def test_files_that_fill_more_than_one_answer(client: Client, device: Device, top: Path) -> None:
    """A file that is too large for it is read as ever."""
    read = [b"%04d" % number for number in range(FIRST)]
    for name in read:
        (top / "public" / os.fsdecode(name)).write_bytes(name)
    count = 2 * MAX_TRANSFER // MOST
    for number in range(count):
        device.put(b"%d" % number, b"%d" % (number % 10) * MOST)
    device.put(b"large", b"l" * (MOST + 1))
    read_some(client, read)
    fetched(client, 3)
    for number in range(count):
        assert client.read(client.find(b"%d" % number)) == b"%d" % (number % 10) * MOST
    assert client.read(client.find(b"large")) == b"l" * (MOST + 1)


def test_closing_while_it_is_fetched(server: Server, samples: list[bytes]) -> None:
    client = Client(server)
    read_some(client, samples[: FIRST - 1])
    client.gate.shut("fs.fetched")
    read_some(client, samples[FIRST - 1 : FIRST])
    client.gate.reached()
    closing = Doing(client.close)
    client.gate.open()
    closing.result()


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

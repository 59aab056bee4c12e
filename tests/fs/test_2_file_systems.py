# SPDX-License-Identifier: Apache-2.0
"""A volume that holds several file systems, whose files have equal inode numbers."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from millpond.fs.coherence.lease_file import LEASE_SECONDS
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.store.layout import prepare
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.lock_types import Family, Lock, Mode
from millpond.linux import syscalls

from ..waiting import eventually
from .caching_client import Client, Device, shared
from .conftest import InNamespace

NAMES = (b"a", b"b")
InVolume = Callable[[Callable[["Volume"], None]], None]


def mount_two(public: Path) -> None:
    """Two file systems with a file each, which have one inode number."""
    for name in map(os.fsdecode, NAMES):
        (public / name).mkdir()
        syscalls.mount("tmpfs", public / name, "tmpfs", 0, "size=1m,mode=777")
        (public / name / "f").write_text(f"the text of {name}")
        (public / name / "f").chmod(0o666)
    one, other = ((public / os.fsdecode(name) / "f").stat() for name in NAMES)
    assert one.st_ino == other.st_ino and one.st_dev != other.st_dev


@dataclass
class Volume:
    """The device, a client that caches, and the file in each of the file systems as both know it."""

    device: Device
    client: Client
    manager: DelegationManager

    def found(self) -> list[Node]:
        return [self.client.find(b"f", self.client.find(name)) for name in NAMES]

    def on_device(self, name: bytes) -> Node:
        parent = self.device.tree.lookup(self.device.public, name).node
        return self.device.tree.lookup(parent, b"f").node


@pytest.fixture
def in_volume(top: Path, in_namespace: InNamespace) -> InVolume:
    def run(body: Callable[[Volume], None]) -> None:
        def inside() -> None:
            prepare(top)
            mount_two(top / "public")
            with shared(top, LEASE_SECONDS) as server, contextlib.closing(Client(server)) as client:
                body(Volume(Device(server), client, server.sessions.delegations))

        in_namespace(inside)

    return run


def test_each_file_is_read_and_written_by_itself(in_volume: InVolume) -> None:
    def body(volume: Volume) -> None:
        client, (a, b) = volume.client, volume.found()
        assert a != b and client.inode(a) != client.inode(b)
        assert client.read(a) == b"the text of a" and client.read(b) == b"the text of b"
        with client.opened(b, os.O_WRONLY) as handle:
            client.tree.write(handle, b"THE", 0)
        assert client.read(a) == b"the text of a" and client.read(b) == b"THE text of b"

    in_volume(body)


def test_a_change_of_one_recalls_nothing_of_the_other(in_volume: InVolume) -> None:
    def body(volume: Volume) -> None:
        client, (a, b) = volume.client, volume.found()
        assert client.read(a) and client.read(b)
        handle = volume.device.tree.open(volume.on_device(b"b"), os.O_WRONLY)
        volume.device.tree.write(handle, b"NEW", 0)
        assert [node for node, _ in client.kernel.dropped] == [b]
        assert client.kept(a) and client.read(b) == b"NEW text of b"
        volume.device.tree.release(handle)

    in_volume(body)


def test_a_lock_of_one_does_not_exclude_the_other(in_volume: InVolume) -> None:
    def body(volume: Volume) -> None:
        a, b = volume.found()
        for family in Family:
            for owner, node in enumerate((a, b)):
                lock = Lock(owner, Mode.WRITE)
                assert volume.client.tree.locks.lock(node, family, lock) == 0

    in_volume(body)


def test_the_map_of_one_ends_without_the_others(in_volume: InVolume) -> None:
    def body(volume: Volume) -> None:
        tree, maps = volume.device.tree, []
        for name in NAMES:
            handle = tree.open(volume.on_device(name), os.O_RDWR)
            maps.append(mmap.mmap(tree.descriptor(handle), 4))
            tree.release(handle)
        numbers = [volume.client.inode(node) for node in volume.found()]
        assert all(volume.manager.is_written(number) for number in numbers)
        maps[1].close()
        eventually(lambda: not volume.manager.is_written(numbers[1]), "the map has ended")
        assert volume.manager.is_written(numbers[0])

    in_volume(body)


def test_the_names_in_a_directory_have_their_files_numbers(in_volume: InVolume) -> None:
    def body(volume: Volume) -> None:
        client = volume.client
        for name, node in zip(NAMES, volume.found(), strict=True):
            handle = client.tree.opendir(client.find(name))
            entries = {entry.name: entry.inode for entry in client.tree.readdir(handle, 0)}
            assert entries["f"] == client.inode(node)
            assert entries["."] == client.inode(client.find(name))

    in_volume(body)

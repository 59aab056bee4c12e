# SPDX-License-Identifier: Apache-2.0
"""Listings with attributes over a connection: lookups counted, recalls meanwhile, what is kept, bad pages."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from millpond.fs.client.cache import inodes as inode_cache
from millpond.fs.client.listing import pages as dir_pages
from millpond.fs.store import directories
from millpond.fs.vfs.inode_api import InodeFs, Node
from millpond.fs.vfs.path_api import Handle, attributes

from .caching_client import Client, Device
from .support import errno_of
from .test_2_recalls import client, device, lease, server

__all__ = ["client", "device", "lease", "server"]

_MANY = 300


@dataclass
class Entry:
    """A name as the kernel gets it."""

    name: bytes
    offset: int
    node: Node
    fields: Sequence[int]
    seconds: float
    name_seconds: float


class Buffer:
    """A kernel's buffer for so many names."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.entries: list[Entry] = []
        self._room = room

    def add(self, *values: object) -> bool:
        if len(self.entries) == self._room:
            return False
        self.entries.append(Entry(*values))  # type: ignore[arg-type]
        return True


def listed(tree: InodeFs, node: Node, room: int = 1 << 30) -> list[Entry]:
    """All names of a directory, so many at a time."""
    handle = tree.opendir(node)
    found = rest_of(tree, handle, 0, room)
    tree.release(handle)
    return found


def rest_of(tree: InodeFs, handle: Handle, offset: int, room: int) -> list[Entry]:
    found = list[Entry]()
    while entries := part(tree, handle, offset, room):
        found += entries
        offset = entries[-1].offset
    return found


def part(tree: InodeFs, handle: Handle, offset: int, room: int = 1 << 30) -> list[Entry]:
    buffer = Buffer(room)
    tree.readdirplus(handle, offset, buffer.add)
    return buffer.entries


@pytest.fixture
def folder(client: Client, device: Device, top: Path) -> Path:
    there = top / "public" / "many"
    there.mkdir()
    for number in range(_MANY):
        (there / f"{number:03}").write_bytes(bytes(number))
    return there


def test_entries_are_lookups_and_the_next_stat_costs_no_request(client: Client, folder: Path) -> None:
    node = client.find(b"many")
    found = listed(client.tree, node, 50)
    assert len(found) == _MANY + 2 and [entry.node for entry in found[:2]] == [0, 0]
    before = client.asked("fs.walk", "fs.getattr")
    for entry in found[2:]:
        status = (folder / os.fsdecode(entry.name)).stat()
        assert tuple(entry.fields) == attributes(status).fields()
        assert entry.seconds > 0 and entry.name_seconds > 0
        assert client.tree.getattr(entry.node).attributes == attributes(status)
        assert client.find(entry.name, node) == entry.node
        client.tree.forget(entry.node, 1)
    assert client.asked("fs.walk", "fs.getattr") == before


def test_what_did_not_fit_is_not_looked_up(client: Client, folder: Path) -> None:
    inodes, node = client.tree.session.inodes, client.find(b"many")
    handle = client.tree.opendir(node)
    before = inodes.count
    entries = part(client.tree, handle, 0, 40)
    inodes.forget_idle()
    assert len(entries) == 40 and inodes.count == before + 38
    for entry in entries[2:]:
        client.tree.forget(entry.node, 1)
    inodes.forget_idle()
    assert inodes.count == before
    client.tree.release(handle)
    assert not inodes.pages_held


def test_each_time_a_name_is_listed_is_one_lookup(client: Client, folder: Path) -> None:
    inodes, node = client.tree.session.inodes, client.find(b"many")
    before = inodes.count
    first, again = listed(client.tree, node), listed(client.tree, node, 100)
    assert {entry.node for entry in first} == {entry.node for entry in again}
    for entry in first[2:]:
        client.tree.forget(entry.node, 1)
    assert inodes.count == before + _MANY
    for entry in first[2 : _MANY // 2]:
        assert client.tree.getattr(entry.node)  # those are no longer only listed
    for entry in first[2:]:
        client.tree.forget(entry.node, 1)
    inodes.forget_idle()
    assert inodes.count == before


def test_grants_of_forgotten_files_are_returned(client: Client, folder: Path) -> None:
    known = client.server.sessions.find(client.tree.session.client)
    assert known is not None
    held = client.server.sessions.delegations.lease_of(known.holder)[1]
    node = client.find(b"many")
    found = listed(client.tree, node)
    assert client.server.sessions.delegations.lease_of(known.holder)[1] >= held + _MANY
    for entry in found[2:]:
        client.tree.forget(entry.node, 1)
    client.tree.session.inodes.forget_idle()
    client.tree.statfs()
    assert client.server.sessions.delegations.lease_of(known.holder)[1] <= held + 2


def test_a_change_between_page_and_use_is_seen(client: Client, device: Device, folder: Path) -> None:
    """The page came before the change, and its entries are passed on after it."""
    node = client.find(b"many")
    handle = client.tree.opendir(node)
    first = part(client.tree, handle, 0, 10)
    there = device.tree.lookup(device.public, b"many").node
    later = set(os.listdir(os.fsencode(folder))) - {entry.name for entry in first}  # noqa: PTH208
    changed, removed = sorted(later)[:2]
    file = device.tree.lookup(there, changed).node
    writing = device.tree.open(file, os.O_WRONLY)
    device.tree.write(writing, b"x", 5000)
    device.tree.release(writing)
    device.tree.unlink(there, removed)
    rest = part(client.tree, handle, first[-1].offset)
    by_name = {entry.name: entry for entry in rest}
    entry = by_name[changed]
    assert not entry.node or entry.fields[5] == 5001
    assert client.tree.lookup(node, changed).attributes.size == 5001
    assert removed not in by_name or not by_name[removed].name_seconds
    assert errno_of(client.tree.lookup, node, removed) == errno.ENOENT
    client.tree.release(handle)


def test_a_restarted_server_goes_on_behind_a_cookie(client: Client, folder: Path) -> None:
    node = client.find(b"many")
    handle = client.tree.opendir(node)
    first = part(client.tree, handle, 0, 100)
    client.server.refusing = True  # or the client is back at once
    client.server.restart()
    client.server.refusing = False
    rest = rest_of(client.tree, handle, first[-1].offset, 90)
    names = [entry.name for entry in (*first, *rest)]
    assert len(names) == len(set(names)) == _MANY + 2
    client.tree.release(handle)


def test_a_program_that_lists_first_and_looks_then_costs_few_requests(client: Client, folder: Path) -> None:
    """The kernel asks for attributes in the first block alone (FUSE_READDIRPLUS_AUTO)."""
    node = client.find(b"many")
    handle = client.tree.opendir(node)
    first = part(client.tree, handle, 0, 50)
    rest = list(client.tree.readdir(handle, first[-1].offset))
    client.tree.release(handle)
    assert len(first) + len(rest) == _MANY + 2
    before = client.asked("fs.walk", "fs.getattr", "fs.readdirplus")
    for entry in rest:
        assert client.tree.lookup(node, os.fsencode(entry.name)).seconds > 0
    assert client.asked("fs.walk", "fs.getattr", "fs.readdirplus") == before


def test_files_that_nobody_looks_at_are_not_kept_for_ever(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inode_cache, "_MOST_IDLE", 20)
    inodes, node = client.tree.session.inodes, client.find(b"many")
    before = inodes.count
    for _ in range(3):
        handle = client.tree.opendir(node)
        first = part(client.tree, handle, 0, 3)
        assert len(list(client.tree.readdir(handle, first[-1].offset))) == _MANY - 1
        client.tree.release(handle)
        client.tree.forget(first[-1].node, 1)
    assert inodes.count <= before + 22


def test_a_huge_directory_is_held_by_neither_side(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dir_pages, "_FIRST_PAGE", 2000)
    monkeypatch.setattr(dir_pages, "MAX_TRANSFER", 4000)
    monkeypatch.setattr(directories, "_BLOCK", 512)
    node = client.find(b"many")
    handle, offset, names = client.tree.opendir(node), 0, list[bytes]()
    while entries := part(client.tree, handle, offset, 7):
        names += [entry.name for entry in entries]
        offset = entries[-1].offset
        for entry in entries:
            if entry.node:
                client.tree.forget(entry.node, 1)
        client.tree.session.inodes.forget_idle(20)
        assert client.tree.session.inodes.count < 90
        assert client.tree.session.inodes.pages_held <= 6
    client.tree.release(handle)
    assert len(names) == len(set(names)) == _MANY + 2
    assert client.asked("fs.readdirplus") > 5

# SPDX-License-Identifier: Apache-2.0
"""Listings with attributes over a connection: lookups counted, recalls meanwhile, what is kept, bad pages."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from millpond.fs.client.cache import listed as listed_module
from millpond.fs.client.listing import pages as dir_pages
from millpond.fs.proto import bulk_copy as c
from millpond.fs.store import directories
from millpond.fs.vfs.inode_api import InodeFs, Node
from millpond.fs.vfs.path_api import MAX_TRANSFER, Handle, attributes

from ..waiting import eventually
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
    handle, offset, found = tree.opendir(node), 0, list[Entry]()
    while entries := part(tree, handle, offset, room):
        found += entries
        offset = entries[-1].offset
    tree.release(handle)
    return found


def part(tree: InodeFs, handle: Handle, offset: int, room: int = 1 << 30) -> list[Entry]:
    buffer = Buffer(room)
    tree.readdirplus(handle, offset, buffer.add)
    return buffer.entries


def asked(client: Client, *kinds: str) -> int:
    """How many of these requests the server has answered."""
    known = client.tree.rpc.meter.kinds
    return sum(sum(known[kind]) for kind in kinds if kind in known)


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
    before = asked(client, "fs.walk", "fs.getattr")
    for entry in found[2:]:
        status = (folder / os.fsdecode(entry.name)).stat()
        assert tuple(entry.fields) == attributes(status).fields()
        assert entry.seconds > 0 and entry.name_seconds > 0
        assert client.tree.getattr(entry.node).attributes == attributes(status)
        assert client.find(entry.name, node) == entry.node
        client.tree.forget(entry.node, 1)
    assert asked(client, "fs.walk", "fs.getattr") == before


def test_what_did_not_fit_is_not_looked_up(client: Client, folder: Path) -> None:
    inodes, node = client.tree.rpc.inodes, client.find(b"many")
    handle = client.tree.opendir(node)
    before = inodes.count
    entries = part(client.tree, handle, 0, 40)
    assert len(entries) == 40 and inodes.count == before + 38
    for entry in entries[2:]:
        client.tree.forget(entry.node, 1)
    assert inodes.count == before and not len(inodes.listed)
    client.tree.release(handle)
    assert not inodes.pages_held


def test_each_time_a_name_is_listed_is_one_lookup(client: Client, folder: Path) -> None:
    inodes, node = client.tree.rpc.inodes, client.find(b"many")
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
    known = client.server.sessions.find(client.tree.rpc.client)
    assert known is not None
    held = client.server.sessions.delegations.lease_of(known.holder)[1]
    node = client.find(b"many")
    found = listed(client.tree, node)
    assert client.server.sessions.delegations.lease_of(known.holder)[1] >= held + _MANY
    for entry in found[2:]:
        client.tree.forget(entry.node, 1)
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


def test_a_listed_file_is_recalled(client: Client, device: Device, folder: Path) -> None:
    node = client.find(b"many")
    found = {entry.name: entry for entry in listed(client.tree, node)}
    there = device.tree.lookup(device.public, b"many").node
    file = device.tree.lookup(there, b"007").node
    writing = device.tree.open(file, os.O_WRONLY)
    device.tree.write(writing, b"x", 5000)
    device.tree.release(writing)
    assert (found[b"007"].node, False) in client.kernel.dropped
    assert client.size(found[b"007"].node) == 5001
    device.tree.unlink(there, b"008")
    assert node in client.kernel.awaited  # names that the kernel was about to take over are dropped, too
    assert errno_of(client.tree.lookup, node, b"008") == errno.ENOENT


def test_a_restarted_server_goes_on_behind_a_cookie(client: Client, folder: Path) -> None:
    node = client.find(b"many")
    handle = client.tree.opendir(node)
    first = part(client.tree, handle, 0, 100)
    client.server.refusing = True  # or the client is back at once
    client.server.restart()
    client.server.refusing = False
    rest = listed_from(client, handle, first[-1].offset)
    names = [entry.name for entry in (*first, *rest)]
    assert len(names) == len(set(names)) == _MANY + 2
    client.tree.release(handle)


def listed_from(client: Client, handle: Handle, offset: int) -> list[Entry]:
    found = list[Entry]()
    while entries := part(client.tree, handle, offset, 90):
        found += entries
        offset = entries[-1].offset
    return found


def test_a_listed_file_is_opened_read_and_renamed(client: Client, folder: Path) -> None:
    node = client.find(b"many")
    found = {entry.name: entry for entry in listed(client.tree, node)}
    assert client.read(found[b"042"].node) == bytes(42)
    client.tree.rename(node, b"043", node, b"other")
    assert client.read(found[b"043"].node) == bytes(43)
    client.tree.unlink(node, b"044")
    assert errno_of(client.tree.lookup, node, b"044") == errno.ENOENT
    assert {entry.name for entry in listed(client.tree, node)} == {
        *(name for name in found if name not in (b"043", b"044")),
        b"other",
    }


def test_too_many_known_files_are_forgotten_by_the_kernel(client: Client, folder: Path) -> None:
    node = client.find(b"many")
    found = {entry.name: entry for entry in listed(client.tree, node)}
    with client.opened(found[b"001"].node):
        client.recalls.memory.most = 100  # not before, or it might be chosen before it is open
        eventually(lambda: len(client.kernel.pruned) >= _MANY - 100, "the kernel is told to forget")
        forgotten = {file[0] for file in client.kernel.pruned}
        assert found[b"001"].node not in forgotten and node not in forgotten
        assert (found[b"002"].node, node, b"002") in client.kernel.pruned


def test_a_program_that_lists_first_and_looks_then_costs_few_requests(client: Client, folder: Path) -> None:
    """The kernel asks for attributes in the first block alone (FUSE_READDIRPLUS_AUTO)."""
    node = client.find(b"many")
    handle = client.tree.opendir(node)
    first = part(client.tree, handle, 0, 50)
    rest = list(client.tree.readdir(handle, first[-1].offset))
    client.tree.release(handle)
    assert len(first) + len(rest) == _MANY + 2
    before = asked(client, "fs.walk", "fs.getattr", "fs.readdir", "fs.readdirplus")
    for entry in rest:
        assert client.tree.lookup(node, os.fsencode(entry.name)).seconds > 0
    assert asked(client, "fs.walk", "fs.getattr", "fs.readdir", "fs.readdirplus") == before


def test_files_that_nobody_looks_at_are_not_kept_for_ever(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed_module, "_MOST_UNUSED", 20)
    inodes, node = client.tree.rpc.inodes, client.find(b"many")
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
        assert len(client.tree.rpc.inodes.listed) < 60
        assert client.tree.rpc.inodes.pages_held <= 6
    client.tree.release(handle)
    assert len(names) == len(set(names)) == _MANY + 2
    assert asked(client, "fs.readdirplus") > 5


@pytest.mark.parametrize(
    "name", [b"", b".", b"..", b"a/b", b"a\0b"], ids=["empty", "dot", "dots", "slash", "nul"]
)
def test_pages_with_names_that_no_file_has(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    bad = c.Page(1000)
    bad.add(b"good", 5, attributes(folder.stat()).fields())
    bad.add(name, 6, attributes(folder.stat()).fields())
    said = bad.packed()
    monkeypatch.setattr(c.Page, "packed", lambda _page: said)
    assert errno_of(listed, client.tree, client.find(b"many")) == errno.EIO


def test_pages_that_hold_what_cannot_be(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, node = attributes(folder.stat()), client.find(b"many")
    pages = []
    for wrong in (replace(good, mode=0o7), replace(good, size=1 << 63), replace(good, rdev=1 << 32)):
        page = c.Page(1000)
        page.add(b"name", 5, wrong.fields())
        pages.append(page.packed())
    page = c.Page(1000)
    page.add(b"name", 0, good.fields())
    for data in (*pages, page.packed(), pages[0][:-1], pages[0][:20], bytes(MAX_TRANSFER)):
        monkeypatch.setattr(c.Page, "packed", lambda _page, data=data: data)
        assert errno_of(listed, client.tree, node) == errno.EIO


def test_a_listing_that_does_not_advance_ends(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says for each page that there are more, and that they begin where this one began."""
    page = c.Page(1000)
    page.add(b"name", 77, replace(attributes(folder.stat()), mode=stat.S_IFREG).fields(), 0, 1)
    said = page.packed()
    monkeypatch.setattr(c.Page, "packed", lambda _page: said)
    monkeypatch.setattr(c.Page, "has_room", lambda *_: False)
    assert errno_of(listed, client.tree, client.find(b"many")) == errno.EIO


def test_names_that_come_twice_are_two_lookups(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inodes, node, fields = client.tree.rpc.inodes, client.find(b"many"), attributes(folder.stat()).fields()
    file = (fields[0] + (1 << 40), stat.S_IFREG, 1, *fields[3:])
    page = c.Page(1000)
    for number in range(3):
        page.add(b"name", 77 + number, file, 0, 1 << 40)
    said = page.packed()
    monkeypatch.setattr(c.Page, "packed", lambda _page: said)
    before = inodes.count
    found = listed(client.tree, node)
    assert len({entry.node for entry in found[2:]}) == 1 and inodes.count == before + 1
    client.tree.forget(found[2].node, 2)
    assert inodes.count == before + 1
    client.tree.forget(found[2].node, 1)
    assert inodes.count == before


def test_two_programs_that_use_a_listed_file_first_at_once(client: Client, folder: Path) -> None:
    """The file moved from the listed ones to the others without the lock: ESTALE, and state beyond recall."""
    for number in range(3000):
        (folder / f"f{number:04}").touch()
    nodes = [entry.node for entry in listed(client.tree, client.find(b"many")) if entry.node]
    begun, found = threading.Barrier(2), list[int | None]()

    def use() -> None:
        begun.wait()
        for node in nodes:
            found.append(errno_of(client.tree.getattr, node))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(nodes) == 3000 + _MANY and set(found) == {None}

# SPDX-License-Identifier: Apache-2.0
"""Names in exclusively delegated directories: which are flushed, in which order, and which never."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.pending_creates import (
    ExclusiveDirectory,
    PendingFile,
    PendingNames,
    PreallocatedFile,
)
from millpond.fs.proto.async_create import MAX_BATCH
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Attributes

PREPARED = Attributes(0, stat.S_IFREG | 0o600, 0, 7, 8, 0, 0, 4096, 1, 1, 1)


class Host:
    """One directory, and the kernel that knows files in it."""

    def __init__(self, names: set[bytes] | None = None) -> None:
        self.names = PendingNames()
        self.directory = CachedInode(Node(2), 20, None, b"d")
        self.held = ExclusiveDirectory(self.directory, 9, 3, 1, names or set(), PREPARED, 0, 0.0)
        self.names.held[self.directory.node] = self.held
        self.numbers = iter(range(100, 100_000))

    def make(self, name: bytes) -> PendingFile:
        if not self.held.preallocated:
            number = next(self.numbers)
            self.held.add_preallocated([PreallocatedFile(number, number, number, number)], PREPARED, 0)
        spare = self.held.preallocated.pop()
        return self.names.create(
            self.held, spare, CachedInode(Node(next(self.numbers)), spare.inode, None, name), name, 0o644, 5
        )

    def tell(self) -> list[bytes]:
        batch = self.names.begin_flush()
        self.names.end_flush(batch)
        return [made.name for made in batch]


@pytest.fixture
def host() -> Host:
    return Host()


def test_names_are_told_in_their_order(host: Host) -> None:
    made = [host.make(name) for name in (b"a", b"b", b"c")]
    assert [each.serial for each in made] == [1, 2, 3] and (host.names.first, host.names.last) == (1, 3)
    naming = made[0].name_update()
    assert (naming.serial, naming.directory, naming.granted, naming.name, naming.mode) == (
        1,
        9,
        3,
        b"a",
        0o644,
    )
    assert host.tell() == [b"a", b"b", b"c"] and host.tell() == []
    assert host.held.names == {b"a", b"b", b"c"} and not host.held.pending


def test_what_looks_like_a_file_is_one(host: Host) -> None:
    spare = PreallocatedFile(1, 2, 3, 4)
    attributes = host.held.attributes_of(spare, 0o640, 99)
    assert (attributes.inode, attributes.mode, attributes.links) == (3, stat.S_IFREG | 0o640, 1)
    assert (attributes.uid, attributes.gid, attributes.mtime, attributes.ctime) == (7, 8, 99, 99)


def test_what_is_taken_away_in_time_is_never_told(host: Host) -> None:
    made = host.make(b"a")
    host.make(b"b")
    assert host.names.cancel(host.directory, b"a") is None  # it is open
    assert host.names.close(made.file, made.spare.handle)
    made.file.local_opens = 1
    assert host.names.cancel(host.directory, b"a") is None  # by somebody else
    made.file.local_opens = 0
    assert host.names.cancel(host.directory, b"a") is made
    assert host.names.cancel(host.directory, b"a") is None
    assert host.held.names == {b"b"} and host.tell() == [b"b"]
    assert host.names.cancel(host.directory, b"b") is None  # it was told
    assert host.names.take_touched() == [host.held] and host.names.take_touched() == []


def test_what_is_being_told_cannot_be_taken_away_any_more(host: Host) -> None:
    host.make(b"a")
    batch = host.names.begin_flush()
    later = host.make(b"b")
    later.closed = True
    assert host.names.cancel(host.directory, b"a") is None
    assert host.names.cancel(host.directory, b"b") is later
    host.names.end_flush([])  # it may not be
    assert host.names.begin_flush() == batch


def test_another_file_is_made_of_it_once_nobody_knows_it(host: Host) -> None:
    made = host.make(b"a")
    assert host.names.close(made.file, made.spare.handle) and not host.names.close(made.file, 99)
    host.names.cancel(host.directory, b"a")
    assert host.names.reuse(made.file) is made and host.held.preallocated == [made.spare]
    assert host.names.reuse(made.file) is None


def test_not_of_one_that_was_changed_since(host: Host) -> None:
    made, other = host.make(b"a"), host.make(b"b")
    for each in (made, other):
        each.closed = True
        host.names.cancel(host.directory, each.name)
    assert host.names.forbid_reuse(made.file) is made and host.names.forbid_reuse(made.file) is None
    assert host.names.reuse(made.file) is None
    del host.names.held[host.directory.node]
    assert (
        host.names.reuse(other.file) is other and not host.held.preallocated
    )  # the directory is not held any more


def test_a_directory_that_was_recalled_counts_no_more(host: Host) -> None:
    host.make(b"a")
    assert host.names.of(host.directory) is host.held
    host.directory.drop()
    assert host.names.of(host.directory) is None and host.names.cancel(host.directory, b"a") is None
    assert host.tell() == [b"a"]  # which the recall waits for


def test_a_change_that_may_have_been_done_makes_all_names_unsure(host: Host) -> None:
    host.directory.name_doubts += 1
    assert host.names.of(host.directory) is None


def test_a_lost_name_is_no_name(host: Host) -> None:
    made = host.make(b"a")
    host.names.begin_flush()
    host.names.lose(made)
    assert host.held.names == set() and not host.names.pending and not host.names.files


def test_so_many_at_once(host: Host) -> None:
    for number in range(MAX_BATCH + 5):
        host.make(b"%d" % number)
    assert len(host.tell()) == MAX_BATCH and len(host.tell()) == 5
    for number in range(4):
        host.make(b"more%d" % number)
    assert [made.name for made in host.names.begin_flush(host.names.first + 1)] == [b"more0", b"more1"]
    assert [host.held.next_count() for _ in range(8)] == [4, 8, 16, 32, 64, 128, 128, 128]


@given(st.lists(st.tuples(st.sampled_from(["make", "take", "tell"]), st.sampled_from([b"a", b"b", b"c"]))))
def test_any_history_ends_the_same(history: list[tuple[str, bytes]]) -> None:
    """What is told, and what was taken away by the server, is what is there."""
    host, there, server = Host(), set[bytes](), set[bytes]()
    for what, name in history:
        if what == "make" and name not in there:
            host.make(name).closed = True
            there.add(name)
        elif what == "take" and name in there:
            if host.names.cancel(host.directory, name) is None:
                server |= set(host.tell())
                server.remove(name)
                host.held.names.discard(name)
            there.discard(name)
        elif what == "tell":
            told = host.tell()
            assert not server & set(told)
            server |= set(told)
        assert host.held.names == there == server | set(host.held.pending)

# SPDX-License-Identifier: Apache-2.0
"""The client's inode cache: the validity of its entries, and their lookup."""

from __future__ import annotations

import errno
import stat
from dataclasses import replace

import pytest

from millpond.fs.client.cache import inodes as book_module
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.inodes import InodeCache
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.path_api import Attributes

from .support import errno_of

NOW, END = 100.0, 110.0
PLAIN = Attributes(0, stat.S_IFREG | 0o644, 1, 0, 0, 5, 8, 4096, 1, 2, 3)


@pytest.fixture
def cache() -> InodeCache:
    made = InodeCache()
    made.invalidate_all(7)
    made.lease_end = END
    return made


def found(
    cache: InodeCache,
    name: bytes,
    inode: int,
    *,
    parent: CachedInode | None = None,
    granted: int = 0,
    named: int = 0,
    size: int = 5,
    since: int | None = None,
    used: int = 1,
) -> CachedInode:
    """A reply that has come: the server's node of a file is its inode and 1000."""
    reply = FoundIs(1000 + inode, replace(PLAIN, inode=inode, size=size), granted, named)
    file = cache.insert(
        reply,
        parent or cache.root,
        name,
        since=cache.changes if since is None else since,
        verifier=cache.verifier,
    )
    for _ in range(used):
        cache.use(file)
    return file


def known(cache: InodeCache, file: CachedInode, now: float = NOW) -> Attributes | None:
    return file.attributes if cache.ttl(file, now) else None


def test_a_recall_that_comes_late_leaves_what_was_granted_since(cache: InodeCache) -> None:
    file = found(cache, b"f", 10, granted=9)
    assert cache.recall([10], 8) == []
    assert known(cache, file) and file.drops == 0
    assert not cache.learn(file, replace(PLAIN, size=99), 8, since=cache.changes)
    assert file.attributes and file.attributes.size == 5


def test_a_change_of_a_files_data_leaves_replies_about_others(cache: InodeCache) -> None:
    written = found(cache, b"w", 9, granted=1)
    since = cache.changes
    cache.change(written)
    file = found(cache, b"f", 10, granted=2, named=3, since=since)
    assert known(cache, file) and cache.lookup(cache.root, b"f", NOW) is file
    again = found(cache, b"w", 9, granted=4, size=77, since=since)
    assert again is written and written.attributes and written.attributes.size != 77


def test_a_file_that_was_changed_and_forgotten_is_not_learnt_from_before(cache: InodeCache) -> None:
    written = found(cache, b"w", 9, granted=1)
    since = cache.changes
    cache.change(written)
    cache.forget(written.node, 1)
    cache.forget_idle()
    again = found(cache, b"w", 9, granted=2, since=since)
    assert again is not written and known(cache, again) is None


def test_grants_of_an_earlier_lease_do_not_count_when_they_arrive(cache: InodeCache) -> None:
    old = found(cache, b"old", 9, granted=2)
    cache.invalidate_all(7)
    assert cache.lease_end == 0 and known(cache, old) is None
    early = found(cache, b"early", 8, granted=3, named=4)  # it was under way when the lease ended
    cache.begin_lease(8)
    cache.lease_end = END
    assert known(cache, early) is None and cache.lookup(cache.root, b"early", NOW) is False
    assert known(cache, found(cache, b"f", 10, granted=8, named=8)) is None
    assert cache.lookup(cache.root, b"f", NOW) is False
    assert known(cache, found(cache, b"f", 10, granted=9, named=9))
    cache.begin_lease(3)  # never lower
    assert known(cache, found(cache, b"g", 11, granted=8)) is None


def test_a_server_that_has_forgotten_all_counts_anew(cache: InodeCache) -> None:
    file = found(cache, b"f", 10, granted=50, named=51)
    idle = found(cache, b"g", 11, used=0)
    cache.forget_idle()
    assert cache.to_forget == [1011] and errno_of(cache.file, idle.node) == errno.ESTALE
    cache.recall([10], 60)
    cache.begin_lease(60)
    assert set(map(id, cache.invalidate_all(8))) == {id(cache.root), id(file)}
    assert (cache.verifier, cache.to_forget, file.verifier) == (8, [], 7)
    cache.lease_end = END
    assert cache.learn(file, PLAIN, 1, since=cache.changes)  # the new server's first grant


def test_many_recalls_are_remembered_as_one(cache: InodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "_MOST_RECALLS", 10)
    kept = found(cache, b"f", 999, granted=40)
    cache.recall(range(20, 40), 30)
    assert len(cache._recalled) == 20
    cache.recall([50], 31)
    assert len(cache._recalled) == 1
    assert known(cache, kept)
    assert known(cache, found(cache, b"g", 25, granted=30)) is None
    assert known(cache, found(cache, b"h", 50, granted=31)) is None
    assert known(cache, found(cache, b"i", 25, granted=31))


def test_what_nobody_uses_is_kept_for_a_while(cache: InodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "_MOST_IDLE", 3)
    files = [found(cache, b"%d" % inode, inode, granted=inode, named=inode + 1) for inode in range(10, 20)]
    for file in files:
        file.seen = file.has_data = True
        cache.forget(file.node, 1)
        assert not file.seen and not file.has_data
    assert [errno_of(cache.file, file.node) for file in files] == [errno.ESTALE] * 7 + [None] * 3
    assert cache.to_forget == [1000 + inode for inode in range(10, 17)]
    assert cache.lookup(cache.root, b"10", NOW) is False and cache.lookup(cache.root, b"19", NOW) is files[-1]
    again = found(cache, b"10", 10)
    assert again.node not in [file.node for file in files]  # a number is never used twice
    assert cache.to_forget == [1000 + inode for inode in range(11, 17)]  # it is known again
    cache.forget_idle()
    assert errno_of(cache.file, files[-1].node) == errno.ESTALE and cache.file(again.node) is again


def test_what_is_found_while_the_server_is_told_to_forget_it_is_not_kept(cache: InodeCache) -> None:
    for inode in (10, 11):
        found(cache, b"%d" % inode, inode, used=0)
    since = cache.changes
    cache.forget_idle()
    assert cache.take_forgets() == (1010, 1011) and cache.to_forget == []
    file = found(cache, b"10", 10, granted=5, named=6)
    assert known(cache, file) is None and file.verifier == 0  # it is to be found again
    assert cache.lookup(cache.root, b"10", NOW) is file
    cache.forgets_done((1010, 1011), others_ask=True)
    late = found(cache, b"11", 11, granted=7, since=since)
    assert known(cache, late) is None
    assert known(cache, found(cache, b"10", 10, granted=8)) and file.verifier == 7


def test_a_directory_stays_while_files_in_it_are_used(cache: InodeCache) -> None:
    outer = found(cache, b"outer", 10)
    inner = found(cache, b"inner", 11, parent=outer)
    file = found(cache, b"f", 12, parent=inner)
    for directory in (outer, inner):
        cache.forget(directory.node, 1)
    cache.forget_idle()
    assert cache.path(file) == (b"outer", b"inner", b"f")
    cache.forget(file.node, 1)
    cache.forget_idle()
    assert set(cache._files) == {ROOT} and not (cache._by_location or cache._idle)
    assert not cache._by_inode
    assert sorted(cache.to_forget) == [1010, 1011, 1012]


def test_directories_that_are_in_each_other_have_no_path(cache: InodeCache) -> None:
    one = found(cache, b"one", 10)
    other = found(cache, b"other", 11, parent=one)
    found(cache, b"loop", 10, parent=other)  # only a server that lies says so
    assert errno_of(cache.path, one) == errno.ESTALE
    found(cache, b"itself", 12, parent=found(cache, b"x", 12))
    for file in list(cache._files.values()):
        cache.forget(file.node, 9)
    cache.forget_idle()


def test_a_late_reply_of_a_forgotten_file_is_no_matter_when_a_name_is_taken_away(cache: InodeCache) -> None:
    gone, kept = found(cache, b"gone", 10, granted=1, named=2), found(cache, b"kept", 11, granted=3, named=4)
    cache.forget(gone.node, 1)
    cache.forget_idle()
    for file in (gone, kept):
        cache.learn(file, replace(PLAIN, inode=file.inode, links=2), 5, since=cache.changes)
    cache.remove_name(cache.root, b"kept", kept)
    assert kept.attributes is None
    cache.learn(kept, replace(PLAIN, inode=11, links=2), 6, since=cache.changes)
    cache.remove_name(cache.root, b"never found", None)
    assert kept.attributes is None


def test_what_was_listed_becomes_an_object_only_when_it_is_looked_at(cache: InodeCache) -> None:
    fields = replace(PLAIN, inode=3).fields()
    file = cache.insert_listed(fields, cache.root, b"f", 5, bare=False, since=cache.changes)
    assert file.known is fields
    assert file.fields() is fields
    cache.idle_unless_used(file)
    assert cache.last_known(cache.root, b"f") is file
    assert known(cache, file) == replace(PLAIN, inode=3)
    assert file.fields() == fields
    assert cache.recall([3], 5) == [file]
    assert file.attributes is None
    assert file.fields() is None


def test_what_was_listed_anew_keeps_its_node_and_its_newest_grant(cache: InodeCache) -> None:
    first = found(cache, b"f", 3, granted=9)
    fields = replace(PLAIN, inode=3, size=6).fields()
    assert cache.insert_listed(fields, cache.root, b"f", 5, bare=True, since=cache.changes) is first
    assert first.granted == 9
    assert first.attributes
    assert first.attributes.bare

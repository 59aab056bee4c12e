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
from millpond.fs.vfs.path_api import Attributes, DirectoryEntry

from .support import errno_of

NOW, END = 100.0, 110.0
PLAIN = Attributes(0, stat.S_IFREG | 0o644, 1, 0, 0, 5, 8, 4096, 1, 2, 3)


@pytest.fixture
def book() -> InodeCache:
    made = InodeCache()
    made.invalidate_all(7)
    made.lease_end = END
    return made


def found(
    book: InodeCache,
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
    file = book.insert(
        reply,
        parent or book.root,
        name,
        since=book.changes if since is None else since,
        verifier=book.verifier,
    )
    for _ in range(used):
        book.use(file)
    return file


def known(book: InodeCache, file: CachedInode, now: float = NOW) -> Attributes | None:
    return file.attributes if book.ttl(file, now) else None


def test_nothing_counts_that_was_not_granted(book: InodeCache) -> None:
    file = found(book, b"f", 10)
    assert known(book, file) is None and book.lookup(book.root, b"f", NOW) is False
    assert (file.inode, file.remote, file.verifier) == (10, 1010, 7)
    assert book.file(file.node) is file
    assert not book.learn(file, PLAIN, 0, since=book.changes)


def test_what_was_granted_counts_as_long_as_the_lease(book: InodeCache) -> None:
    file = found(book, b"f", 10, granted=1, named=2)
    assert known(book, file) == file.attributes and book.ttl(file, NOW) == END - NOW
    assert book.lookup(book.root, b"f", NOW) is file
    book.lease_end = END + 5
    assert book.ttl(file, END) == 5
    for late in (END + 5, END + 6):
        assert book.ttl(file, late) == 0 and book.lookup(book.root, b"f", late) is False


def test_absence_is_known_as_well(book: InodeCache) -> None:
    directory = found(book, b"d", 10)
    book.learn_name(directory, b"none", None, 0, since=book.changes)
    assert book.lookup(directory, b"none", NOW) is False
    book.learn_name(directory, b"none", None, 1, since=book.changes)
    assert book.lookup(directory, b"none", NOW) is None
    assert book.lookup(directory, b"other", NOW) is False
    book.recall([10], 1)
    assert book.lookup(directory, b"none", NOW) is False


def test_a_grant_counts_no_more_after_its_recall(book: InodeCache) -> None:
    directory = found(book, b"d", 9, granted=1)
    directory.listing = (DirectoryEntry("f", 10, 0),)
    file = found(book, b"f", 10, parent=directory, granted=3, named=4)
    other = found(book, b"g", 11, parent=directory, granted=5, named=6)
    assert book.recall([10, 99], 6) == [file]
    assert (file.granted, known(book, file), file.drops) == (0, None, 1)
    assert known(book, other) and book.lookup(directory, b"g", NOW) is other
    assert book.lookup(directory, b"f", NOW) is file  # its name is its directory's affair
    assert book.recall([9], 6) == [directory]
    assert not (directory.names or directory.listing or directory.attributes)
    assert book.lookup(directory, b"f", NOW) is False


def test_a_reply_that_was_under_way_when_it_was_recalled_does_not_count(book: InodeCache) -> None:
    directory = found(book, b"d", 9, granted=1)
    file = found(book, b"f", 10, parent=directory, granted=3)
    book.recall([9, 10, 11], 5)
    for granted in (3, 4, 5):
        assert not book.learn(file, PLAIN, granted, since=book.changes)
        again = found(book, b"f", 10, parent=directory, granted=granted, named=granted)
        assert known(book, again) is None and book.lookup(directory, b"f", NOW) is False
        unknown = found(book, b"g", 11, granted=granted)  # of which nothing was known when it was recalled
        assert known(book, unknown) is None
    assert known(book, found(book, b"h", 12, granted=4))  # that one was not recalled
    assert known(book, found(book, b"f", 10, parent=directory, granted=6, named=7))
    assert book.lookup(directory, b"f", NOW) is file


def test_a_recall_that_comes_late_leaves_what_was_granted_since(book: InodeCache) -> None:
    file = found(book, b"f", 10, granted=9)
    assert book.recall([10], 8) == []
    assert known(book, file) and file.drops == 0
    assert not book.learn(file, replace(PLAIN, size=99), 8, since=book.changes)
    assert file.attributes and file.attributes.size == 5


def test_what_a_reply_tells_does_not_count_if_something_was_changed_here_meanwhile(book: InodeCache) -> None:
    since = book.changes
    book.change()
    file = found(book, b"f", 10, granted=1, named=2, since=since)
    assert known(book, file) is None and book.lookup(book.root, b"f", NOW) is False
    assert book.learn(file, PLAIN, 3, since=since)  # it is granted, and so will be recalled
    assert known(book, file) is None and book.ttl(file, NOW)
    assert book.learn(file, PLAIN, 4, since=book.changes)
    assert known(book, file) == PLAIN


def test_a_change_of_a_files_data_leaves_replies_about_others(book: InodeCache) -> None:
    written = found(book, b"w", 9, granted=1)
    since = book.changes
    book.change(written)
    file = found(book, b"f", 10, granted=2, named=3, since=since)
    assert known(book, file) and book.lookup(book.root, b"f", NOW) is file
    again = found(book, b"w", 9, granted=4, size=77, since=since)
    assert again is written and written.attributes and written.attributes.size != 77


def test_a_file_that_was_changed_and_forgotten_is_not_learnt_from_before(book: InodeCache) -> None:
    written = found(book, b"w", 9, granted=1)
    since = book.changes
    book.change(written)
    book.forget(written.node, 1)
    book.forget_idle()
    again = found(book, b"w", 9, granted=2, since=since)
    assert again is not written and known(book, again) is None


def test_grants_of_an_earlier_lease_do_not_count_when_they_arrive(book: InodeCache) -> None:
    old = found(book, b"old", 9, granted=2)
    book.invalidate_all(7)
    assert book.lease_end == 0 and known(book, old) is None
    early = found(book, b"early", 8, granted=3, named=4)  # it was under way when the lease ended
    book.begin_lease(8)
    book.lease_end = END
    assert known(book, early) is None and book.lookup(book.root, b"early", NOW) is False
    assert known(book, found(book, b"f", 10, granted=8, named=8)) is None
    assert book.lookup(book.root, b"f", NOW) is False
    assert known(book, found(book, b"f", 10, granted=9, named=9))
    book.begin_lease(3)  # never lower
    assert known(book, found(book, b"g", 11, granted=8)) is None


def test_a_server_that_has_forgotten_all_counts_anew(book: InodeCache) -> None:
    file = found(book, b"f", 10, granted=50, named=51)
    idle = found(book, b"g", 11, used=0)
    book.forget_idle()
    assert book.to_forget == [1011] and errno_of(book.file, idle.node) == errno.ESTALE
    book.recall([10], 60)
    book.begin_lease(60)
    assert set(map(id, book.invalidate_all(8))) == {id(book.root), id(file)}
    assert (book.verifier, book.to_forget, file.verifier) == (8, [], 7)
    book.lease_end = END
    assert book.learn(file, PLAIN, 1, since=book.changes)  # the new server's first grant


def test_many_recalls_are_remembered_as_one(book: InodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "_MOST_RECALLS", 10)
    kept = found(book, b"f", 999, granted=40)
    book.recall(range(20, 40), 30)
    assert len(book._recalled) == 20
    book.recall([50], 31)
    assert len(book._recalled) == 1
    assert known(book, kept)
    assert known(book, found(book, b"g", 25, granted=30)) is None
    assert known(book, found(book, b"h", 50, granted=31)) is None
    assert known(book, found(book, b"i", 25, granted=31))


def test_what_nobody_uses_is_kept_for_a_while(book: InodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "_MOST_IDLE", 3)
    files = [found(book, b"%d" % inode, inode, granted=inode, named=inode + 1) for inode in range(10, 20)]
    for file in files:
        file.seen = file.has_data = True
        book.forget(file.node, 1)
        assert not file.seen and not file.has_data
    assert [errno_of(book.file, file.node) for file in files] == [errno.ESTALE] * 7 + [None] * 3
    assert book.to_forget == [1000 + inode for inode in range(10, 17)]
    assert book.lookup(book.root, b"10", NOW) is False and book.lookup(book.root, b"19", NOW) is files[-1]
    again = found(book, b"10", 10)
    assert again.node not in [file.node for file in files]  # a number is never used twice
    assert book.to_forget == [1000 + inode for inode in range(11, 17)]  # it is known again
    book.forget_idle()
    assert errno_of(book.file, files[-1].node) == errno.ESTALE and book.file(again.node) is again


def test_what_is_found_while_the_server_is_told_to_forget_it_is_not_kept(book: InodeCache) -> None:
    for inode in (10, 11):
        found(book, b"%d" % inode, inode, used=0)
    since = book.changes
    book.forget_idle()
    assert book.take_forgets() == (1010, 1011) and book.to_forget == []
    file = found(book, b"10", 10, granted=5, named=6)
    assert known(book, file) is None and file.verifier == 0  # it is to be found again
    assert book.lookup(book.root, b"10", NOW) is file
    book.forgets_done((1010, 1011), others_ask=True)
    late = found(book, b"11", 11, granted=7, since=since)
    assert known(book, late) is None
    assert known(book, found(book, b"10", 10, granted=8)) and file.verifier == 7


def test_a_file_is_forgotten_as_often_as_it_was_found(book: InodeCache) -> None:
    file = found(book, b"f", 10, used=3)
    book.forget(file.node, 2)
    book.forget_idle()
    assert book.file(file.node) is file
    book.forget(file.node, 5)
    book.use(file)  # in time
    book.forget_idle()
    assert book.file(file.node) is file
    book.forget(ROOT, 99)
    book.forget(file.node, 1)
    book.forget(file.node, 1)  # nobody knows it
    book.forget_idle()
    assert errno_of(book.file, file.node) == errno.ESTALE and book.file(ROOT) is book.root
    book.forget(file.node, 1)


def test_a_directory_stays_while_files_in_it_are_used(book: InodeCache) -> None:
    outer = found(book, b"outer", 10)
    inner = found(book, b"inner", 11, parent=outer)
    file = found(book, b"f", 12, parent=inner)
    for directory in (outer, inner):
        book.forget(directory.node, 1)
    book.forget_idle()
    assert book.path(file) == (b"outer", b"inner", b"f")
    book.forget(file.node, 1)
    book.forget_idle()
    assert set(book._files) == {ROOT} and not (book._by_inode or book._by_location or book._idle)
    assert sorted(book.to_forget) == [1010, 1011, 1012]


def test_places(book: InodeCache) -> None:
    directory = found(book, b"d", 10, granted=1)
    file = found(book, b"f", 11)
    deep = found(book, b"x/y", 12, parent=directory)
    assert book.path(book.root) == ()
    assert (book.path(file), book.path(deep)) == ((b"f",), (b"d", b"x", b"y"))
    assert book.last_known(book.root, b"f") is file and book.last_known(book.root, b"none") is None
    book.set_location(file, directory, b"moved")
    assert book.path(file) == (b"d", b"moved")
    assert book.last_known(book.root, b"f") is None and book.last_known(directory, b"moved") is file
    book.set_location(directory, book.root, b"e")
    assert (book.path(file), book.path(deep)) == ((b"e", b"moved"), (b"e", b"x", b"y"))
    book.set_location(file, None, b"")
    assert errno_of(book.path, file) == errno.ESTALE
    again = found(book, b"h", 11)  # under another name
    assert again is file and book.path(file) == (b"h",)
    replaced = found(book, b"h", 13)
    assert book.last_known(book.root, b"h") is replaced
    book.set_location(file, None, b"")  # whose place another has taken
    assert book.last_known(book.root, b"h") is replaced


def test_directories_that_are_in_each_other_have_no_path(book: InodeCache) -> None:
    one = found(book, b"one", 10)
    other = found(book, b"other", 11, parent=one)
    found(book, b"loop", 10, parent=other)  # only a server that lies says so
    assert errno_of(book.path, one) == errno.ESTALE
    found(book, b"itself", 12, parent=found(book, b"x", 12))
    for file in list(book._files.values()):
        book.forget(file.node, 9)
    book.forget_idle()


def test_a_late_reply_of_a_forgotten_file_is_no_matter_when_a_name_is_taken_away(book: InodeCache) -> None:
    gone, kept = found(book, b"gone", 10, granted=1, named=2), found(book, b"kept", 11, granted=3, named=4)
    book.forget(gone.node, 1)
    book.forget_idle()
    for file in (gone, kept):
        book.learn(file, replace(PLAIN, inode=file.inode, links=2), 5, since=book.changes)
    book.remove_name(book.root, b"kept", kept)
    assert kept.attributes is None
    book.learn(kept, replace(PLAIN, inode=11, links=2), 6, since=book.changes)
    book.remove_name(book.root, b"never found", None)
    assert kept.attributes is None

# SPDX-License-Identifier: Apache-2.0
"""A removed file counts in the quota for as long as a client's reference keeps its inode on the flash."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import file_ops as p
from millpond.fs.server.handlers import RequestHandlers
from millpond.fs.server.sessions import SessionTable
from millpond.fs.server.shared_descriptors import SharedDescriptors
from millpond.fs.store.layout import PUBLIC, prepare
from millpond.fs.store.quota_fs import QuotaFs
from millpond.fs.store.usage import public_usage
from millpond.fs.vfs.inode_api import ROOT, FoundEntry, Node
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.wire.messages import Message

from .support import SOON, Server, errno_of

MIB = 1 << 20
LIMIT = 8 * MIB


class Limited(Server):
    """Whose public part has a quota; hosts can be spoken for without a connection."""

    def __init__(self, top: Path) -> None:
        super().__init__(top, public=PUBLIC.encode())
        self.top = top
        self.tree = self.bounded = QuotaFs(self.root, LIMIT, lambda: public_usage(top), public=b"public")
        self.sessions = SessionTable(self.tree)
        self.empty = self.counted

    @property
    def counted(self) -> tuple[int, int]:
        return self.bounded.quota.used, self.bounded.quota.files

    def host(self, name: bytes) -> Host:
        return Host(RequestHandlers(SharedDescriptors(self.tree), self.sessions.delegations, name * 16))


class Host:
    """Says what it wants."""

    def __init__(self, requests: RequestHandlers) -> None:
        self.requests = requests
        self.public = self.say(p.Walk(ROOT, (b"public",))).node

    def say(self, request: Message, payload: bytes = b"") -> Any:
        return self.requests.do(request, payload)[0]

    def made(self, name: bytes, size: int = MIB) -> p.Opened:
        opened: p.Opened = self.say(p.Create(self.public, name, os.O_RDWR, 0o644, None))
        self.fill(opened.handle, size)
        return opened

    def fill(self, handle: int, size: int) -> None:
        for offset in range(0, size, MIB):
            self.say(p.Write(handle, offset), bytes(MIB))

    def hoarded(self, name: bytes, size: int = MIB) -> int:
        """The number of a new file that is removed, closed and not forgotten."""
        opened = self.made(name, size)
        self.say(p.Unlink(self.public, name))
        self.say(p.Release(opened.handle))
        assert opened.found
        return opened.found.node


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Limited]:
    top = tmp_path / "flash"
    prepare(top)
    made = Limited(top)
    yield made
    made.drop()
    made.sessions.close()
    assert not (made.bounded._files_open or made.bounded._unnamed)
    assert made.counted == public_usage(top) and made.bounded.recount() == (0, 0)
    os.close(made.root)


def on_flash(limited: Limited) -> int:
    """What is there and has no name."""
    places = [os.fstat(place.descriptor) for place in limited.tree._refs.values()]
    return sum(status.st_blocks * 512 for status in places if not status.st_nlink)


def removed_first(host: Host, name: bytes) -> None:
    host.hoarded(name, 4 * MIB)


def closed_first(host: Host, name: bytes) -> None:
    host.say(p.Release(host.made(name, 4 * MIB).handle))
    host.say(p.Unlink(host.public, name))


def replaced(host: Host, name: bytes) -> None:
    host.say(p.Release(host.made(name, 4 * MIB).handle))
    host.say(p.Release(host.made(b"new", 0).handle))
    host.say(p.Rename(host.public, b"new", host.public, name))
    host.say(p.Unlink(host.public, name))


@pytest.mark.parametrize("removes", [removed_first, closed_first, replaced])
def test_nobody_hoards_more_than_the_quota(limited: Limited, removes: Callable[[Host, bytes], None]) -> None:
    host = limited.host(b"h")
    with pytest.raises(OSError, match="No space"):
        for _ in range(9):
            removes(host, b"f")
    assert on_flash(limited) <= limited.bounded.quota.used <= LIMIT
    assert limited.bounded.recount() == (0, 0)
    host.requests.close()


def test_directories_count_too(limited: Limited) -> None:
    host = limited.host(b"h")
    for _ in range(3):
        host.say(p.MakeDirectory(host.public, b"d", 0o755, None))
        host.say(p.RemoveDirectory(host.public, b"d"))
    assert limited.bounded.quota.files == limited.empty[1] + 3
    host.requests.close()
    assert limited.counted == limited.empty


def test_what_is_forgotten_counts_no_longer(limited: Limited) -> None:
    host = limited.host(b"h")
    for _ in range(9):
        host.say(p.Forget((host.hoarded(b"f", 4 * MIB),)))
        assert limited.counted == limited.empty
    host.requests.close()


def test_it_counts_until_the_last_who_knows_it_forgets_it(limited: Limited) -> None:
    one, other = limited.host(b"1"), limited.host(b"2")
    opened = one.made(b"f")
    node = other.say(p.Walk(other.public, (b"f",))).node
    one.say(p.MakeLink(node, one.public, b"g"))
    one.say(p.Unlink(one.public, b"f"))
    one.say(p.Release(opened.handle))
    one.say(p.Forget((node,)))
    assert limited.counted == public_usage(limited.top)
    other.say(p.Unlink(other.public, b"g"))
    assert limited.bounded.quota.used >= MIB
    again = other.say(p.Open(node, os.O_RDWR)).handle  # a removed file is there for who knows its number
    other.fill(again, 2 * MIB)
    assert limited.bounded.quota.used >= 2 * MIB and limited.bounded.recount() == (0, 0)
    other.say(p.Release(again))
    assert limited.bounded.quota.used >= 2 * MIB
    other.requests.close()
    assert limited.counted == limited.empty
    one.requests.close()


def test_what_the_device_removes_counts_too(limited: Limited) -> None:
    host = limited.host(b"h")
    opened = host.made(b"f")
    host.say(p.Release(opened.handle))
    (limited.top / "public/f").unlink()
    for _ in range(2):
        assert limited.bounded.recount() == (0, 0)
        assert limited.bounded.quota.used >= MIB and limited.bounded.quota.files == limited.empty[1] + 1
    host.requests.close()
    assert limited.counted == limited.empty


def test_a_file_that_is_removed_while_it_is_found_counts(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, found = limited.host(b"h"), QuotaFs._found
    opened = host.made(b"f")
    assert opened.found

    def late(self: QuotaFs, descriptor: int, public: bool) -> FoundEntry:
        monkeypatch.undo()
        host.say(p.Unlink(host.public, b"f"))
        host.say(p.Release(opened.handle))
        host.say(p.Forget((opened.found.node,)))  # type: ignore[union-attr]
        assert limited.counted == limited.empty
        return found(self, descriptor, public)

    monkeypatch.setattr(QuotaFs, "_found", late)
    node: Node = limited.tree.lookup(Node(host.public), b"f").node
    assert limited.bounded.quota.used >= MIB and limited.bounded.recount() == (0, 0)
    limited.tree.forget(node, 1)
    assert limited.counted == limited.empty
    host.requests.close()


def test_who_behaves_gets_the_room_of_what_he_removed(limited: Limited) -> None:
    """Also of what he does not use but has not told that he forgot, as of files that the device removed."""
    tree = RemoteFs(limited.dial, timeout=SOON)
    volume = PathAdapter(tree)
    for remove in (volume.unlink, lambda path: (limited.top / path).unlink()):
        for _ in range(3):
            handle = volume.open("public/f", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            for offset in range(0, 6 * MIB, MIB):
                assert volume.write(handle, bytes(MIB), offset) == MIB
            volume.release(handle)
            remove("public/f")
            assert limited.bounded.recount() is not None
    handle = volume.open("public/f", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    assert errno_of(tree.allocate, handle, 0, 0, 2 * LIMIT) == errno.ENOSPC  # it is said once all is told
    volume.release(handle)
    tree.close()
    limited.join()
    assert limited.counted == public_usage(limited.top)

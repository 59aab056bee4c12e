# SPDX-License-Identifier: Apache-2.0
"""A hostile device and the host's client: each reply is an error of one request, or legal for the kernel."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError, ProtocolError
from millpond.fs.client.callbacks import CallbackChannel
from millpond.fs.client.listing.pages import DOTS_END
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Code, Header
from millpond.fs.fuse.server import _HANDLERS, FuseServer
from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto import extended as x
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.validate import require_possible
from millpond.fs.vfs.inode_api import ROOT, Node
from millpond.fs.vfs.lock_types import Family, Lock, Mode
from millpond.fs.vfs.path_api import Attributes, Owner
from millpond.fs.vfs.xattr_names import MAX_VALUE
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

from ..waiting import eventually
from .caching_client import Kernel, brisk
from .hostile_messages import ATTRIBUTES, REPLIES, varied
from .support import SOON, Doing, errno_of

_DIRECTORY = replace(ATTRIBUTES, inode=78, mode=stat.S_IFDIR | 0o755)
_LINK = replace(ATTRIBUTES, inode=79, mode=stat.S_IFLNK | 0o777)
_GOOD = {type(reply): reply for reply in REPLIES}
_ANSWERED_BY: dict[type[Message], type[Message]] = {
    **dict.fromkeys([p.GetAttributes, p.SetAttributes, p.Allocate], p.AttributesAre),
    **dict.fromkeys([x.SetXattr, x.RemoveXattr], p.AttributesAre),
    x.GetXattr: x.XattrIs,
    x.ListXattrs: x.XattrsAre,
    **dict.fromkeys([p.Make, p.MakeLink], p.FoundIs),
    **dict.fromkeys([p.Remove, p.Rename], p.Changed),
    **dict.fromkeys([p.Create, p.Open], p.Opened),
    **dict.fromkeys([p.Read, p.ReadFile], p.Data),
    **dict.fromkeys([p.Sync, p.SyncDirectory, p.Goodbye], p.Done),
    r.SetLock: r.LockSet,
    p.SessionHello: p.SessionWelcome,
    c.ReadDirectoryPlus: c.EntriesPlus,
    p.ReadLink: p.Link,
    p.Write: p.Written,
    p.Seek: p.OffsetIs,
    p.GetStatistics: p.StatisticsAre,
    r.GetLock: r.LockIs,
    r.GetLockEpoch: r.LocksDropped,
}

pytestmark = pytest.mark.expected_log(  # the operation log has each of them, or how many
    "by process 0: E|more operations failed or took long"
)


class Device:
    """Answers as it should, but where it is told what else to say."""

    def __init__(self) -> None:
        self.says: dict[type[Message], tuple[Message, bytes]] = {}
        self.recalls: list[tuple[Message, bytes]] = []
        self.recalled = self.lied = 0
        self._threads: list[threading.Thread] = []
        self._inodes = itertools.count(1000)

    def dial(self, _deadline: Deadline) -> Channel:
        ours, theirs = socket.socketpair()
        self._threads.append(threading.Thread(target=self._serve, args=(Channel(theirs, "the host"),)))
        self._threads[-1].start()
        return Channel(ours, "csd0")

    def _serve(self, channel: Channel) -> None:
        with channel, contextlib.suppress(MillpondError):
            while True:
                head = channel.receive(Deadline.after(4 * SOON))
                channel.receive_payload(1 << 20, Deadline.after(SOON))
                if isinstance(head.message, p.Attend):
                    self._attended(channel)
                elif not isinstance(head.message, c.UNANSWERED):
                    answer, payload = self._answer(head.message)
                    channel.send(answer, Deadline.after(SOON), payload)

    def _attended(self, channel: Channel) -> None:
        for recall in (*self.recalls, (p.Recall((), 1), b"")):
            channel.send(recall[0], Deadline.after(SOON), recall[1])
            self.lied += 1
            channel.receive(Deadline.after(4 * SOON))
            self.recalled += 1

    def _answer(self, request: Message) -> tuple[Message, bytes]:
        if isinstance(request, p.Again):
            return p.Error(errno.EIO), b""
        kind = _ANSWERED_BY.get(type(request), p.FoundIs)
        if kind in self.says:
            self.lied += 1
            return self.says[kind]
        if kind is not p.FoundIs:
            return _GOOD[kind], b""
        name = request.names[-1] if isinstance(request, p.Walk) else b"new"
        known = {b"f": ATTRIBUTES, b"d": _DIRECTORY, b"l": _LINK}
        attributes = known.get(name) or replace(ATTRIBUTES, inode=next(self._inodes))
        return p.FoundIs(attributes.inode, attributes), b""

    def close(self) -> None:
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive()


class Told:
    """What a kernel is told, as far as it can be packed: the kernel's end of a mount."""

    caches_names, leaves_privileges, passthrough_refusal = True, True, "no passthrough"

    def __init__(self) -> None:
        self.error, self.parts = 0, b""

    def stop(self) -> None:
        pass

    def fail(self, header: Header, code: int) -> None:
        assert 0 < code < 512
        self.error, self.parts = code, abi.REPLY.pack(0, -code, header.unique)

    def reply(self, _header: Header, parts: Sequence[abi.Attributes | bytes]) -> None:
        self.error, self.parts = 0, b"".join(bytes(part) for part in parts)  # type: ignore[arg-type]


class Mounted:
    """The kernel's requests on a tree that lies on the device."""

    def __init__(self, device: Device) -> None:
        self.device, self.told = device, Told()
        self.tree = RemoteFs(device.dial, timeout=4 * SOON)
        self.binding = FuseServer(self.told, self.tree)  # type: ignore[arg-type]
        self.find()
        self.handle = self.tree.open(self.file, os.O_RDWR)

    def find(self) -> None:
        self.directory, self.file, self.link = (
            self.tree.lookup(ROOT, name).node for name in (b"d", b"f", b"l")
        )

    def close(self) -> None:
        self.device.says.clear()
        self.binding.close()
        self.tree.close()
        self.device.close()

    def ask(self, code: Code, body: bytes, node: Node | None = None) -> int:
        """The errno that the kernel is told, 0 for none."""
        header = Header(0, code, 7, node or self.directory, 0, 0)
        self.binding._answer(_HANDLERS[code], header, memoryview(body))
        return self.told.error

    def requests(self) -> dict[type[Message], list[tuple[Code, bytes, Node]]]:
        """What the kernel asks that each kind of reply answers."""
        d, f = self.directory, self.file
        self.tree._inodes.file(self.link).target = None  # it is asked for once
        self.tree.locks.release(self.file, Family.POSIX, 1)  # it may have been lost
        whole = abi.READ.pack(self.handle, 0, 100, 0, 0, 0, 0)
        lock = abi._LOCK.pack(self.handle, 1, 0, 9, fcntl.F_WRLCK, 1, 0)
        return {
            p.FoundIs: [
                (Code.LOOKUP, b"other\0", d),
                (Code.MKDIR, abi.MKDIR.pack(0o755, 0) + b"new\0", d),
                (Code.LINK, abi.LINK.pack(f) + b"new\0", d),
            ],
            p.AttributesAre: [
                (Code.GETATTR, b"", f),
                (Code.SETATTR, abi.SETATTR.pack(1, *[0] * 15), f),
                (Code.SETXATTR, abi.BATCH_FORGET.pack(1, 0) + b"user.a\x001", f),
                (Code.REMOVEXATTR, b"user.a\0", f),
                (Code.FALLOCATE, abi.FALLOCATE.pack(self.handle, 0, 1, 0, 0), f),
            ],
            x.XattrIs: [(Code.GETXATTR, abi.BATCH_FORGET.pack(100, 0) + b"user.a\0", f)],
            x.XattrsAre: [(Code.LISTXATTR, abi.BATCH_FORGET.pack(100, 0), f)],
            p.Changed: [
                (Code.UNLINK, b"x\0", d),
                (Code.RENAME2, abi.RENAME2.pack(d, 0, 0) + b"x\0y\0", d),
            ],
            p.Opened: [
                (Code.OPEN, abi.OPEN.pack(os.O_RDWR, 0), f),
                (Code.CREATE, abi.CREATE.pack(os.O_RDWR, 0o644, 0, 0) + b"new\0", d),
            ],
            p.Link: [(Code.READLINK, b"", self.link)],
            p.Written: [(Code.WRITE, abi.WRITE.pack(self.handle, 0, 5, 0, 0, 0, 0) + b"12345", f)],
            p.OffsetIs: [(Code.LSEEK, abi.LSEEK.pack(self.handle, 0, os.SEEK_DATA, 0), f)],
            p.StatisticsAre: [(Code.STATFS, b"", d)],
            p.Data: [(Code.READ, whole, f)],
            p.Done: [(Code.FSYNC, abi.FSYNC.pack(self.handle, 0, 0), f)],
            r.LockIs: [(Code.GETLK, lock, f)],
            r.LockSet: [(Code.SETLK, lock, f)],
            c.EntriesPlus: [(Code.READDIR, whole, d)],
        }


@pytest.fixture
def mounted() -> Iterator[Mounted]:
    made = Mounted(Device())
    yield made
    for kind, requests in made.requests().items():  # it still works
        if kind is not c.EntriesPlus:
            made.device.says.clear()
            assert made.ask(*requests[0]) == 0, kind
    made.close()


NOT_OF_THE_KERNEL = {p.SessionWelcome, r.LocksDropped, c.EntriesPlus}
KINDS = {p.FoundIs, *_ANSWERED_BY.values()} - NOT_OF_THE_KERNEL


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.NAME), ids=lambda kind: kind.NAME)
def test_what_cannot_be_so_is_an_error(mounted: Mounted, kind: type[Message]) -> None:
    for lie in (
        *varied(_GOOD[kind]),
        p.Error(0),
        p.Error(-5),
        p.Error(1 << 40),
        p.Done(),
        p.Recall((), 1),
    ):
        mounted.device.says[kind] = lie, b""
        for request in mounted.requests()[kind]:
            mounted.device.lied = 0
            error = mounted.ask(*request)
            assert mounted.device.lied
            if not _possible(lie) or type(lie) not in (kind, p.Done):
                assert error == errno.EIO, (request, lie)


def _possible(reply: Message) -> bool:
    try:
        require_possible(reply)
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize(
    "reply",
    [
        p.AttributesAre(replace(ATTRIBUTES, mode=0o644)),
        p.AttributesAre(replace(ATTRIBUTES, mode=stat.S_IFREG | 1 << 20)),
        p.AttributesAre(replace(ATTRIBUTES, size=-1)),
        p.AttributesAre(replace(ATTRIBUTES, size=1 << 63)),
        p.AttributesAre(replace(ATTRIBUTES, inode=-1)),
        p.FoundIs(1, replace(ATTRIBUTES, uid=1 << 32)),
        p.Opened(1, True, p.FoundIs(1, replace(ATTRIBUTES, blocks=-1))),
        p.Changed((p.AttributesAre(replace(ATTRIBUTES, links=-1)),)),
        p.Written(-1),
        p.Written(1, p.AttributesAre(replace(ATTRIBUTES, mode=0))),
        p.OffsetIs(-1),
        p.OffsetIs(1 << 63),
        p.Link(b""),
        p.Link(b"a\0"),
        p.Link(b"x" * 4096),
        p.SessionWelcome(1, 0, 1, float("inf")),
        p.SessionWelcome(1, 0, 1, float("nan")),
        p.SessionWelcome(1, 0, 1, -1.0),
        p.SessionWelcome(0, 0, 1, 1.0),
        p.SessionWelcome(1, 0, 1, 1.0, Owner(-1, 0)),
        p.SessionWelcome(1, 0, 1, 1.0, Owner(0, (1 << 32) - 1)),
        p.SessionWelcome(1, 0, 1, 1.0, root_inode=-1),
        r.LockIs(3),
        r.LockIs(0, 5, 4),
        r.LockSet(-1),
        r.LockSet(1 << 40),
    ],
)
def test_impossible_replies(reply: Message) -> None:
    with pytest.raises(ProtocolError):
        require_possible(reply)


def test_what_is_so_is_possible() -> None:
    for reply in REPLIES:
        require_possible(reply)
    require_possible(
        p.AttributesAre(replace(ATTRIBUTES, atime=-(1 << 63), uid=(1 << 32) - 1, inode=(1 << 64) - 1))
    )


@pytest.mark.parametrize("welcome", [*varied(_GOOD[p.SessionWelcome]), p.Done(), p.Error(5)], ids=str)
def test_a_strange_welcome(welcome: Message) -> None:
    device = Device()
    device.says[p.SessionWelcome] = welcome, b""
    tree = RemoteFs(device.dial, timeout=4 * SOON)
    possible = isinstance(welcome, p.SessionWelcome) and _possible(welcome)
    assert errno_of(tree.statfs) == (None if possible else errno.EIO)
    device.says.clear()
    assert errno_of(tree.statfs) is None
    tree.close()
    device.close()


@pytest.mark.parametrize(
    "names",
    [[b""], [b"."], [b"f", b".."], [b"a/b"], [b"a\0b"], [b"n" * 256], [b"n" * 60_000]],
    ids=lambda n: n[0][:9],
)
def test_listings_with_names_that_no_file_has(mounted: Mounted, names: list[bytes]) -> None:
    packed = b"".join(_entry(name, 9) for name in names)
    _list(mounted, packed, errno.EIO)


def test_listings_that_are_none(mounted: Mounted) -> None:
    entry = _entry(b"f", 9, (1 << 64) - 1)
    for cut in range(1, len(entry)):
        _list(mounted, entry[:cut], errno.EIO)
    _list(mounted, bytes((1 << 20) + 1), errno.EIO)
    _list(mounted, entry, 0)


def test_listings_that_never_end(mounted: Mounted) -> None:
    _list(mounted, b"", errno.EIO, end=False)
    for cookie in (0, 7):
        _list(mounted, _entry(b"f", cookie), errno.EIO, end=False)


def _entry(name: bytes, cookie: int, inode: int = 5) -> bytes:
    page = c.Page(1 << 20)
    page.add(name, cookie, (inode, stat.S_IFREG, 1, *(0,) * 9))
    return page.packed()


def _list(mounted: Mounted, packed: bytes, error: int, *, end: bool = True, plus: bool = False) -> None:
    mounted.device.says[c.EntriesPlus] = c.EntriesPlus(end), packed
    handle = mounted.tree.opendir(mounted.directory)
    body = abi.READ.pack(handle, 0, 4096, 0, 0, 0, 0)
    assert mounted.ask(Code.READDIRPLUS if plus else Code.READDIR, body) == error
    mounted.tree.release(handle)


def _page(name: bytes = b"name", cookie: int = 5, attributes: Attributes = ATTRIBUTES) -> bytes:
    page = c.Page(1000)
    page.add(b"good", 4, ATTRIBUTES.fields())
    page.add(name, cookie, attributes.fields())
    return page.packed()


def test_pages_with_attributes_that_cannot_be(mounted: Mounted) -> None:
    bad = [_page(name) for name in (b"", b".", b"..", b"a/b", b"a\0b")]
    for wrong in ({"mode": 0o7}, {"size": 1 << 63}, {"rdev": 1 << 32}):
        bad.append(_page(attributes=replace(ATTRIBUTES, **wrong)))
    for page in (*bad, _page(cookie=0), _page()[:-1], _page()[:20], bytes(1 << 20)):
        _list(mounted, page, errno.EIO, plus=True)
    _list(mounted, b"", errno.EIO, plus=True, end=False)
    assert errno_of(lambda: list(mounted.tree.bulk.list(mounted.directory, []))) == errno.EIO
    mounted.device.says[c.EntriesPlus] = c.EntriesPlus(False), _page()  # it begins anew for ever
    handle = mounted.tree.opendir(mounted.directory)
    asked = [
        mounted.ask(Code.READDIRPLUS, abi.READ.pack(handle, at, 4096, 0, 0, 0, 0)) for at in (0, 5 + DOTS_END)
    ]
    assert asked[-1] == errno.EIO
    mounted.tree.release(handle)
    _list(mounted, _page(), 0, plus=True)


def test_more_than_was_asked_for(mounted: Mounted) -> None:
    for kind, requests in mounted.requests().items():
        size = {p.Data: 101, x.XattrIs: MAX_VALUE + 1}.get(kind, 5)
        if kind is not c.EntriesPlus:
            mounted.device.says[kind] = _GOOD[kind], bytes(size)
            assert mounted.ask(*requests[0]) == errno.EIO, kind


def test_more_written_than_there_was(mounted: Mounted) -> None:
    mounted.device.says[p.Written] = p.Written(6), b""
    assert mounted.ask(*mounted.requests()[p.Written][0]) == errno.EIO


def test_a_directory_in_itself_is_forgotten_like_others(mounted: Mounted) -> None:
    mounted.device.says[p.FoundIs] = p.FoundIs(78, _DIRECTORY), b""
    assert mounted.ask(Code.LOOKUP, b"x\0") == 0
    mounted.device.says.clear()
    for node, times in ((mounted.file, 9), (mounted.directory, 9), (mounted.link, 9), (mounted.directory, 1)):
        body = memoryview(abi.FORGET.pack(times))
        mounted.binding._forget(Header(0, Code.FORGET, 0, node, 0, 0), body)
    mounted.find()


def test_locks_that_are_none(mounted: Mounted) -> None:
    lock = Lock(1, Mode.WRITE)
    mounted.device.says[r.LockSet] = r.LockSet(None), b""  # again and again
    assert errno_of(mounted.tree.locks.lock, mounted.file, Family.POSIX, lock) == errno.EIO
    mounted.device.says[r.LockSet] = r.LocksDropped(5), b""
    assert errno_of(mounted.tree.locks.lock, mounted.file, Family.FLOCK, lock) == errno.EIO


def test_recalls_of_anything(mounted: Mounted) -> None:
    device = mounted.device
    device.recalls = [(recall, b"") for recall in varied(p.Recall((77,), 1))]
    recalls = CallbackChannel(mounted.tree, device.dial, Kernel(), SOON)
    recalls.start()
    eventually(lambda: device.recalled > len(device.recalls), "all recalls are answered")
    recalls.stop()


@pytest.mark.parametrize(
    "said", [(p.Recall((77,), 1), b"more"), (p.Done(), b""), (p.Error(-1), b"x")], ids=str
)
def test_whoever_keeps_up_the_lease_lives_on(mounted: Mounted, said: tuple[Message, bytes]) -> None:
    mounted.device.recalls = [said]
    with brisk():
        recalls = CallbackChannel(mounted.tree, mounted.device.dial, Kernel(), 0.1)
        starting = Doing(recalls.start)
        eventually(lambda: mounted.device.lied, "the device has lied")
        starting.result()
        mounted.device.recalls = []
        eventually(lambda: mounted.device.recalled > 0, "a recall is answered")
        recalls.stop()

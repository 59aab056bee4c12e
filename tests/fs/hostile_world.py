# SPDX-License-Identifier: Apache-2.0
"""A volume with both parts, an honest client, and a hostile one that sends the messages a test chooses."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.bulk_copy import UNANSWERED
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.path_api import MAX_TRANSFER
from millpond.wire.channel import Channel
from millpond.wire.framing import encode
from millpond.wire.messages import Failure, Message

from .hostile_messages import NUMBERS
from .support import NAME, SLOT, SOON, Server

SECRET = b"what never leaves the device"
HIDDEN = b"a-name-that-is-nobodys-business"
THROWN_OUT = Failure("thrown out", "")


class World:
    """A volume with both parts, a client that behaves and has files open, and one that does not."""

    def __init__(self, top: Path) -> None:
        self.top, self.public, self.private = top, top / "public", top / "private"
        self._fill()
        self._before = self._seen()
        self.server = Server(top, public=b"public", lease=0.4)
        self._open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        self._victim = Channel(self.server.raw(), "server")
        self._tell_victim(p.SessionHello(b"another client's", SLOT))
        public = self._tell_victim(p.Walk(ROOT, (b"public",))).node
        self.victims = self._tell_victim(p.Walk(public, (b"other",))).node
        self.victims_handle = self._tell_victim(p.Open(self.victims, os.O_RDWR)).handle
        self._fresh = itertools.count()
        self.heard = bytearray()
        self.channel: Channel | None = None
        self.begin()

    def _fill(self) -> None:
        for directory in (self.public / "d", self.private / "sub"):
            directory.mkdir(parents=True)
        for name in ("f", "other", "d/g"):
            (self.public / name).write_bytes(b"public")
        (self.public / "link").symlink_to("../private/secret")
        os.mkfifo(self.public / "fifo")
        for name in ("secret", "sub/" + HIDDEN.decode()):
            (self.private / name).write_bytes(SECRET)
            os.utime(self.private / name, (0, 1_000_000_000))

    def _seen(self) -> list[tuple[object, ...]]:
        """All that there is to see of the private part; when it was last read, too."""
        found: list[tuple[object, ...]] = []
        for path in (self.private, self.private / "secret", self.private / "sub" / HIDDEN.decode()):
            s = path.lstat()
            atime = s.st_atime_ns if path.is_file() else 0
            found.append(
                (s.st_ino, s.st_mode, s.st_nlink, s.st_uid, s.st_size, s.st_mtime_ns, s.st_ctime_ns, atime)
            )
        return [*found, (sorted(os.listdir(self.private)), sorted(os.listdir(self.private / "sub")))]  # noqa: PTH208

    @property
    def private_inodes(self) -> list[int]:
        return [path.lstat().st_ino for path in (self.private, *self.private.rglob("*"))]

    @property
    def guesses(self) -> list[int]:
        """Numbers that were never told to the hostile client, as nodes or handles."""
        guessed = [number for number in NUMBERS if number > 1 << 30 or number < 1 or number == 99_999]
        inodes = (self.top.stat().st_ino, *self.private_inodes)
        return [*guessed, *(inode for inode in inodes if inode > 10_000)]  # no node has such a number here

    def _tell_victim(self, request: Message) -> Any:
        return self._victim.call(request, Message, Deadline.after(SOON))

    def begin(self) -> None:
        """The hostile client knows a few public files, and has one open."""
        self.say(p.GetStatistics())
        self.node = self.found(p.Walk(ROOT, (b"public",)))
        self.file = self.found(p.Walk(self.node, (b"f",)))
        self.directory = self.found(p.Walk(self.node, (b"d",)))
        self.own, self.closed = self.open(), self.open()
        self.say(p.Release(self.closed))
        dropped = self.say(r.GetLockEpoch(0))
        assert isinstance(dropped, r.LocksDropped)
        self.epoch = dropped.epoch

    def found(self, request: Message) -> int:
        answer = self.say(request)
        assert isinstance(answer, p.FoundIs), answer
        return answer.node

    def open(self) -> int:
        answer = self.say(p.Open(self.file, os.O_RDWR))
        assert isinstance(answer, p.Opened), answer
        return answer.handle

    def fresh(self) -> bytes:
        return b"new%d" % next(self._fresh)

    def say(self, request: Message, payload: bytes = b"") -> Message:
        """The answer; who is thrown out comes back."""
        try:
            if self.channel is None:
                self.channel = Channel(self.server.raw(), "server")
                self._exchange(p.SessionHello(NAME, SLOT), b"")
            answer = self._exchange(request, payload)
            if isinstance(request, p.Goodbye):
                answer = self._exchange(p.GetStatistics(), b"")
        except ConnectionLost:
            answer = THROWN_OUT
        if isinstance(answer, Failure) and self.channel:
            self.channel.close()
            self.channel = None
        return answer

    def _exchange(self, request: Message, payload: bytes) -> Message:
        deadline = Deadline.after(4 * SOON)
        assert self.channel
        self.channel.send(request, deadline, payload)
        if isinstance(request, UNANSWERED) and not payload:
            self.channel.send(p.GetStatistics(), deadline)
        answer = self.channel.receive(deadline).message
        self.heard += encode(answer) + self.channel.receive_payload(MAX_TRANSFER, deadline)
        return answer

    def check(self) -> None:
        """Nothing private was touched or told, nobody died, and whoever behaves is served."""
        assert self._seen() == self._before
        for word in (SECRET, HIDDEN, b"secret"):
            assert word not in self.heard
        assert self._tell_victim(p.GetAttributes(self.victims)).attributes.size == 6
        assert (self.public / "other").read_bytes() == b"public"
        self.public.chmod(0o777)
        tree = RemoteFs(self.server.dial, timeout=4 * SOON)
        public = tree.lookup(ROOT, b"public").node
        _, handle = tree.create(public, b"well-behaved", os.O_RDWR, 0o644, None)
        assert tree.write(handle, b"served", 0) == 6
        assert bytes(tree.read(handle, 9, 0)) == b"served"
        tree.release(handle)
        tree.unlink(public, b"well-behaved")
        tree.close()

    def end(self) -> None:
        """All that they had is closed, and each connection has ended as it may."""
        for channel in (self._victim, self.channel):
            if channel:
                channel.close()
        connections = len(self.server.threads)
        self.server.drop()
        self.server.sessions.close()
        assert len(self.server.ends) == connections
        allowed = ProtocolError | ConnectionLost
        assert all(error is None or isinstance(error, allowed) for error in self.server.ends)
        assert self.server.open_files == 0 and len(self.server.tree._refs) == 1
        assert len(os.listdir("/proc/self/fd")) <= self._open_before  # noqa: PTH208
        os.close(self.server.root)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.check()
    made.end()

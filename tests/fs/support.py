# SPDX-License-Identifier: Apache-2.0
"""Support of the volume's tests: a server in this process, and a connection that a test can cut."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, RemoteError
from millpond.fs.coherence.lease_file import LEASE_SECONDS, SIZE, PersistentLeases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto import file_ops as p
from millpond.fs.server.connection import serve
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.path_api import MAX_TRANSFER, os_error
from millpond.linux.sockets import listen
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
SOON = 5.0
NAME = b"a client's name."
SLOT = b"the name of slot"


def errno_of(call: Callable[..., object], *arguments: object, **more: object) -> int | None:
    """The errno that a call fails with; None if it succeeds."""
    try:
        call(*arguments, **more)
    except OSError as error:
        return error.errno
    return None


def as_user(uid: int, gid: int, body: Callable[[], object]) -> None:
    """Have a user other than root do something, and succeed."""
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        os._exit(errno_of(body) or 0)
    assert os.waitpid(pid, 0)[1] == 0


def lasts(condition: Callable[[], object], seconds: float = 0.2) -> bool:
    """Whether it stays true for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not condition():
            return False
        time.sleep(0.005)
    return bool(condition())


class Doing:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[..., object], *arguments: object, **more: object) -> None:
        self._call = functools.partial(call, *arguments, **more)
        self._result: object = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._do, daemon=True)
        self._thread.start()

    def _do(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:  # noqa: BLE001 - whoever asks for the result has it
            self._failure = error

    @property
    def done(self) -> bool:
        """Whether it has returned or raised."""
        return not self._thread.is_alive()

    def result(self, seconds: float = 4 * SOON) -> Any:
        """What it returns. Raises what it raises."""
        self._thread.join(seconds)
        assert self.done, "it still waits"
        if self._failure:
            raise self._failure
        return self._result


def below(top: Path) -> list[Path]:
    """Return all that is below a directory, sorted by path. Each directory is listed once. Raises OSError."""
    found: list[Path] = []
    with os.scandir(top) as entries:
        for entry in entries:
            found.append(Path(entry.path))
            if entry.is_dir(follow_symlinks=False):
                found += below(found[-1])
    return sorted(found)


def listening(path: Path) -> socket.socket:
    """A Unix socket, also where an earlier one was."""
    path.unlink(missing_ok=True)
    return listen(path)


class Cutting(Channel):
    """A channel that cuts its connection before or after the request whose name it is told."""

    cut_before: str | None = None
    cut_after: str | None = None
    cut_after_that: str | None = None
    lose: str | None = None
    then: Callable[[], None] = staticmethod(lambda: None)

    def send(
        self,
        message: Message,
        deadline: Deadline,
        payload: Any = b"",
        *,
        before: Sequence[Message] = (),
    ) -> None:
        if self.cut_before == message.NAME:
            Cutting.cut_before = None  # this once
            self.sock.shutdown(socket.SHUT_RDWR)
            raise ConnectionLost("cut before it was sent")
        if self.lose == message.NAME:
            Cutting.lose = None
            self.sock.shutdown(socket.SHUT_RDWR)
            Cutting.then()
            return  # it seems to be out
        super().send(message, deadline, payload, before=before)
        if self.cut_after == message.NAME:
            Cutting.cut_after, Cutting.cut_after_that = Cutting.cut_after_that, None  # this once
            self.sock.recv(1 << 21)  # it is done, but nobody hears of it
            self.sock.shutdown(socket.SHUT_RDWR)
            Cutting.then()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection: unlike a Unix one, it takes data that nobody will ever read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class Flash(BackingFs):
    """A flash at which a test has something done ``before`` and ``after`` some operations, by their names."""

    def __init__(self, root: int, *, public: bytes | None = None, limit: int | None = None) -> None:
        super().__init__(root, public=public, limit=limit)
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}

    def once(self, name: str, does: Callable[[], object]) -> None:
        """Have this done before the operation is next performed."""

        def first() -> None:
            del self.before[name]
            does()

        self.before[name] = first

    @contextmanager
    def refusing(self, code: int, name: str = "write") -> Iterator[None]:
        """Fail this operation during the block."""

        def refuse() -> NoReturn:
            raise os_error(code)

        self.before[name] = refuse
        yield
        del self.before[name]


def _watched(name: str) -> Callable[..., Any]:
    def operation(flash: Flash, *arguments: Any, **more: Any) -> Any:
        flash.before.get(name, int)()
        found = getattr(BackingFs, name)(flash, *arguments, **more)
        flash.after.get(name, int)()
        return found

    return operation


for _name in ("create", "create_unnamed", "fsync", "getattr", "setattr", "statfs", "unlink", "write"):
    setattr(Flash, _name, _watched(_name))


class Held:
    """An operation of a flash that is held up, before or ``after`` it is performed, until ``go_on``."""

    def __init__(self, flash: Flash, name: str, *, after: bool = False) -> None:
        self._begun, self.go_on = threading.Event(), threading.Event()
        (flash.after if after else flash.before)[name] = self._wait

    def _wait(self) -> None:
        self._begun.set()
        assert self.go_on.wait(8 * SOON)

    @property
    def has_begun(self) -> bool:
        """Whether somebody has been in the middle of it."""
        return self._begun.is_set()

    def begun(self) -> None:
        """Return once somebody is in the middle of it."""
        assert self._begun.wait(SOON)
        self._begun.clear()


class Server:
    """A server with a thread for each connection. ``leases`` is the file of leases, -1 for none; ``limit`` is
    the quota.
    """

    def __init__(
        self,
        top: Path,
        *,
        public: bytes | None = None,
        lease: float = LEASE_SECONDS,
        leases: int = -1,
        limit: int | None = None,
    ) -> None:
        self.root = os.open(top, os.O_PATH | os.O_DIRECTORY)
        self.tree = Flash(self.root, public=public, limit=limit)
        self._lease, self._leases = lease, leases
        self.storage = os.urandom(16)
        self.sessions = self._sessions()
        self.threads: list[threading.Thread] = []
        self.channels: list[Channel] = []
        self.ends: list[RemoteError | None] = []
        self.dialled = 0
        self.refusing = False

    def raw(self) -> socket.socket:
        """A connection, its client's end."""
        ours, theirs = _tcp_pair()
        channel = Channel(theirs, "a client")
        self.channels.append(channel)
        thread = threading.Thread(target=lambda: self.ends.append(serve(channel, self.sessions)), daemon=True)
        thread.start()
        self.threads.append(thread)
        return ours

    def dial(self, _deadline: Deadline) -> Channel:
        self.dialled += 1
        if self.refusing:
            self.refuse()
        return Cutting(self.raw(), "csd0")

    def refuse(self) -> NoReturn:
        """Let nobody in."""
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody there")

    def drop(self) -> None:
        """Cut all connections, and wait until the server has cleaned up."""
        self.cut()
        self.join()

    def close(self) -> None:
        """End it and all of its clients."""
        Cutting.cut_before = Cutting.cut_after = Cutting.cut_after_that = Cutting.lose = None
        Cutting.then = staticmethod(lambda: None)
        self.drop()
        self.sessions.close()
        os.close(self.root)

    def cut(self) -> None:
        """Cut all connections, from the server's side; last those by whose end a client notices it."""
        callbacks = [client.callback_channel for client in self.sessions.clients()]
        for channel in sorted(self.channels, key=lambda channel: channel in callbacks):
            with contextlib.suppress(OSError):  # it has ended already
                channel.sock.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """Cut all connections, and forget all clients."""
        self.drop()
        self.forget()

    def reboot(self) -> None:
        """Restart the server's machine, too: its page cache is gone."""
        self.storage = os.urandom(16)
        self.restart()

    def forget(self) -> None:
        """Remember no client."""
        self.sessions.close()
        self.sessions = self._sessions()

    def _sessions(self) -> SessionTable:
        leases = PersistentLeases(self._leases, self._lease) if self._leases >= 0 else None
        return SessionTable(self.tree, DelegationManager(self._lease, leases=leases), storage=self.storage)

    def crash(self) -> None:
        """Restart without an end: the leases of before are still in their file."""
        leases = os.pread(self._leases, SIZE, 0)
        self.drop()
        self.sessions.close()
        os.pwrite(self._leases, leases, 0)
        self.sessions = self._sessions()

    @property
    def open_files(self) -> int:
        """How many files and directories all clients have open."""
        return len(self.tree._open)

    @contextmanager
    def talk(self, client: bytes = NAME, slot: bytes = SLOT) -> Iterator[Talk]:
        """A conversation in a client's name."""
        with Channel(self.raw(), "server") as channel:
            yield Talk(channel, p.SessionHello(client, slot))

    def join(self) -> None:
        for thread in self.threads:
            thread.join(SOON)
            assert not thread.is_alive()
        self.threads.clear()
        self.channels.clear()


class Talk:
    """A client that says exactly what it is told to."""

    def __init__(self, channel: Channel, hello: p.SessionHello) -> None:
        self.channel = channel
        self.welcome = self.call(hello, p.SessionWelcome)

    def ask(self, request: Message, payload: bytes = b"") -> Message:
        """The answer, whatever it is; what lies behind it is dropped."""
        deadline = Deadline.after(SOON)
        self.channel.send(request, deadline, payload)
        answer = self.channel.receive(deadline).message
        self.channel.receive_payload(MAX_TRANSFER, deadline)
        return answer

    def post(self, request: Message) -> None:
        """What is not answered."""
        self.channel.send(request, Deadline.after(SOON))

    def call(self, request: Message, reply: type[R], payload: bytes = b"") -> R:
        """The answer, which must be a ``reply``."""
        answer = self.ask(request, payload)
        assert isinstance(answer, reply), answer
        return answer

    def find(self, *names: bytes) -> int:
        """The node that these names lead to from the root."""
        return self.call(p.Walk(ROOT, names), p.FoundIs).node

    def open(self, name: bytes, flags: int = os.O_RDWR) -> int:
        """The handle of a file in the root."""
        return self.call(p.Open(self.find(name), flags), p.Opened).handle

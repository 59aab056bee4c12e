# SPDX-License-Identifier: Apache-2.0
"""A caching client without a kernel, the device's own mount, and a delegation manager for one test."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded
from millpond.fs.client import callbacks as recalling
from millpond.fs.client.callbacks import CallbackChannel
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.coherence.delegation_table import DEVICE, Holder
from millpond.fs.coherence.device_fs import DeviceFs
from millpond.fs.coherence.device_server import serve
from millpond.fs.coherence.lease_file import LEASE_SECONDS, PersistentLeases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.server import connection as serving
from millpond.fs.vfs.inode_api import ROOT, CacheMode, KnownFile, Node
from millpond.fs.vfs.kernel_memory import KernelMemory
from millpond.fs.vfs.path_api import Handle
from millpond.wire.channel import Channel
from millpond.wire.framing import Head

from ..waiting import eventually
from .support import SOON, Cutting, Doing, Server, listening

WHOLE = 1 << 20
AT_ANY_TIME = {"fs.hello", "fs.statfs", "fs.file-lock.epoch"}
"""Requests of new connections, of what is told without another request, and of a new lease."""
LONG_LEASE = 30.0  # so long that nothing that is tested ends by it


@contextlib.contextmanager
def brisk(lease: float = LEASE_SECONDS) -> Iterator[None]:
    """Shorten pauses of client and server to a tenth of a second: between recalls, by the next of which the
    server sees that a connection has gone; before the client attends again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "_CALLS_PER_LEASE", max(serving._CALLS_PER_LEASE, 10 * lease))
        patch.setattr(recalling, "_AGAIN_SECONDS", 0.05)
        yield


@contextlib.contextmanager
def shared(top: Path, lease: float, leases: int = -1) -> Iterator[Server]:
    """The server of a volume with a public part, while it lives."""
    (top / "public").mkdir(exist_ok=True)
    with brisk(lease):
        made = Server(top, public=b"public", lease=lease, leases=leases)
        yield made
        made.close()


class Kernel:
    """Knows every node, and writes down what it is told to drop, after it has called ``before`` with it."""

    def __init__(self) -> None:
        self.names_dropped, self.prunes = 0, True
        self.dropped: list[tuple[int, bool]] = []
        self.awaited: list[int] = []
        self.pruned: list[KnownFile] = []
        self.before: Callable[[int], None] = lambda _node: None

    def drop_names(self) -> None:
        self.names_dropped += 1

    def await_listings(self, directory: int) -> None:
        self.awaited.append(directory)

    def prune(self, files: Sequence[KnownFile]) -> None:
        self.pruned += files

    def drop(self, node: int, *, data: bool) -> bool:
        self.before(node)
        self.dropped.append((node, data))
        return True


class Gate:
    """Holds back one reply on its way to the client: of what it is called, from when it is shut. One that is
    ``lost`` does not come before its deadline.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._lost = False
        self._reached, self._open = threading.Event(), threading.Event()

    def shut(self, name: str, *, lost: bool = False) -> None:
        self._reached.clear()
        self._open.clear()
        self._name, self._lost = name, lost

    def reached(self) -> None:
        """Return once the reply has come there."""
        assert self._reached.wait(SOON)

    def open(self) -> None:
        self._open.set()

    def pass_through(self, name: str, deadline: Deadline) -> None:
        if self._name == name:
            self._name = None  # this one alone
            self._reached.set()
            if not self._open.wait(deadline.remaining() if self._lost else 4 * SOON):
                raise DeadlineExceeded("it never came")


class _Gated(Cutting):
    gate: Gate

    def receive(self, deadline: Deadline) -> Head:
        head = super().receive(deadline)
        self.gate.pass_through(head.message.NAME, deadline)
        return head


class Client:
    """A RemoteTree that keeps what it is granted, ``public`` its directory."""

    def __init__(self, server: Server, timeout: float = SOON) -> None:
        self.server, self.kernel, self.gate, self.away = server, Kernel(), Gate(), False
        self.tree = RemoteFs(self.dial, timeout=timeout)
        self.recalls = CallbackChannel(self.tree, self.dial, self.kernel, timeout)
        self.recalls.start()
        self.public = self.tree.lookup(ROOT, b"public").node
        assert self.kept(self.public)
        self.kernel.dropped.clear()  # what was found before there was a lease

    def dial(self, deadline: Deadline) -> Channel:
        if self.server.refusing or self.away:
            return self.server.refuse()
        made = _Gated(self.server.raw(), "csd0")
        made.gate = self.gate
        return made

    def close(self) -> None:
        self.recalls.stop()
        self.tree.close()

    def find(self, name: bytes, parent: Node | None = None) -> Node:
        return self.tree.lookup(parent or self.public, name).node

    def kept(self, node: Node) -> bool:
        """Whether its attributes may be kept."""
        return self.tree.getattr(node).seconds > 0

    def inode(self, node: Node) -> int:
        return self.tree.getattr(node).attributes.inode

    def asked(self, *kinds: str) -> int:
        """How many requests of these kinds the server has answered; of all but those that come at any time,
        if none are named.
        """
        known = self.tree.session.meter.kinds
        return sum(sum(known.get(kind, ())) for kind in kinds or known.keys() - AT_ANY_TIME)

    def size(self, node: Node) -> int:
        return self.tree.getattr(node).attributes.size

    def read(self, node: Node) -> bytes:
        with self.opened(node) as handle:
            return bytes(self.tree.read(handle, WHOLE, 0))

    def gather(self, node: Node, data: bytes, offset: int = 0, flags: int = os.O_RDWR) -> bool:
        """Write as a program does through the kernel; False if it is not gathered."""
        return self.tree.write_behind.add(node, flags, data, offset)

    @contextlib.contextmanager
    def opened(self, node: Node, flags: int = os.O_RDONLY) -> Iterator[Handle]:
        handle = self.tree.open(node, flags)
        try:
            yield handle
        finally:
            self.tree.release(handle)

    def names(self, node: Node | None = None) -> set[str]:
        handle = self.tree.opendir(node or self.public)
        return {entry.name for entry in self.tree.readdir(handle, 0)} - {".", ".."}

    def hang_up(self) -> None:
        """Cut all connections but that over which the server recalls."""
        known = self.server.sessions.find(self.tree.session.client)
        for channel in self.server.channels:
            if known is None or channel is not known.callback_channel:
                channel.shut_down()

    def attended(self) -> bool:
        """Whether the server can recall something."""
        known = self.server.sessions.find(self.tree.session.client)
        return known is not None and self.server.sessions.delegations.has_lease(known.holder)

    def await_lease(self) -> None:
        eventually(lambda: self.attended() and self.kept(self.public), "the client has a lease")


def restart(client: Client) -> None:
    """The server forgets all; the client has a lease of it again."""
    client.server.refusing = True  # or the client is back at once
    client.server.restart()
    client.server.refusing = False
    client.await_lease()


class Device:
    """The device's own mount: each change is announced to the manager."""

    def __init__(self, server: Server) -> None:
        self._server = server
        memory = KernelMemory(sys.maxsize, lambda: 0, list)
        self.tree = DeviceFs(server.tree, self, memory)  # type: ignore[arg-type]
        self.public = self.tree.lookup(ROOT, b"public").node

    def write_intent(
        self, *directories: int, inodes: tuple[int, ...] = ()
    ) -> AbstractContextManager[Callable[..., None]]:
        return self._server.sessions.delegations.write_intent(DEVICE, *directories, inodes=inodes)

    def recall_writer(self, inode: int) -> bool:
        return self._server.sessions.delegations.recall_writer(DEVICE, inode)

    def begin_writing(self, inode: int, *, force: bool = False) -> bool:
        return self._server.sessions.delegations.begin_writing(inode, already=force)

    def end_writing(self, inode: int) -> None:
        self._server.sessions.delegations.end_writing(inode)

    def find(self, name: bytes) -> Node:
        return self.tree.lookup(self.public, name).node

    def put(self, name: bytes, data: bytes) -> None:
        """Make a file, or give it these contents, all at once; by the mount, not by the kernel."""
        if not (Path(f"/proc/self/fd/{self._server.root}/public") / os.fsdecode(name)).exists():
            _, handle = self.tree.create(self.public, name, os.O_WRONLY, 0o644, None)
        else:
            handle = self.tree.open(self.find(name), os.O_WRONLY | os.O_TRUNC)
        self.tree.write(handle, data, 0)
        self.tree.release(handle)

    def does(self, name: bytes, data: bytes) -> Doing:
        return Doing(self.put, name, data)

    def written_by_kernel(self, name: bytes) -> bool:
        """Whether the kernel may write the file itself."""
        handle = self.tree.open(self.find(name), os.O_WRONLY)
        access = self.tree.cache_mode(handle)
        self.tree.release(handle)
        return access is CacheMode.PASSTHROUGH


def make(client: Client, name: bytes, parent: Node | None = None, mode: int = 0o640) -> tuple[Node, Handle]:
    """A new file, open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    found, handle = client.tree.create(parent or client.public, name, flags, mode, None)
    return found.node, handle


class Listening:
    """A delegation manager at a socket, which can be killed."""

    def __init__(self, path: Path, *, device: bool = False, leases: PersistentLeases | None = None) -> None:
        self.manager = DelegationManager(LONG_LEASE, device=device, leases=leases)
        self._path, self._listener = path, listening(path)
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                channel = Channel(self._listener.accept()[0], "the mount")
                thread = threading.Thread(target=serve, args=(channel, self.manager), daemon=True)
                self._channels.append(channel)
                self._threads.append(thread)
                thread.start()

    @property
    def accepted(self) -> int:
        """How many connections."""
        return len(self._channels)

    def kill(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(SOON)
        for channel in self._channels:
            channel.shut_down()
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive()

    def client(self) -> Holder:
        holder = self.manager.join()
        self.manager.renew_lease(holder)
        return holder


@contextlib.contextmanager
def managed(path: Path) -> Iterator[Listening]:
    """A delegation manager at the socket ``path``, unless it is killed meanwhile."""
    made = Listening(path)
    yield made
    with contextlib.suppress(OSError):  # a test has killed it
        made.kill()

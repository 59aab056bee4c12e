"""The device's own mount and the lock master, over the socket between them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs import lock_client
from millpond.fs import lock_messages as m
from millpond.fs.guarded import Guarded
from millpond.fs.inodes import Inodes
from millpond.fs.lock_client import DeviceGuard
from millpond.fs.lock_server import serve
from millpond.fs.locks import Holder
from millpond.fs.mappings import is_written
from millpond.fs.marks import Marks, SeenMarks
from millpond.fs.master import Master
from millpond.fs.tree import ROOT, Access, Changes, Node, WouldWait
from millpond.fs.volume import Handle
from millpond.wire.channel import Channel
from millpond.wire.deadline import Deadline

from .support import SOON, Doing, errno_of, eventually, listening

D, F, G = 1, 10, 11
LEASE = 30.0  # so long that nothing that is tested ends by it


class Listening:
    """A lock master at a socket, which can be killed."""

    def __init__(self, path: Path, *, device: bool = False) -> None:
        self.master = Master(LEASE, device=device)
        self._path, self._listener = path, listening(path)
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                channel = Channel(self._listener.accept()[0], "the mount")
                thread = threading.Thread(target=serve, args=(channel, self.master), daemon=True)
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
        holder = self.master.join()
        self.master.heard(holder)
        return holder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def server(path: Path) -> Iterator[Listening]:
    made = Listening(path)
    yield made
    with contextlib.suppress(OSError):  # a test has killed it
        made.kill()


@pytest.fixture
def guard(server: Listening, path: Path) -> Iterator[DeviceGuard]:
    with DeviceGuard(path, lease=LEASE) as made:
        yield made


def changed(guard: DeviceGuard, *directories: int, inodes: tuple[int, ...] = ()) -> None:
    with guard.change(*directories, inodes=inodes):
        pass


def give_up(master: Master, holder: Holder, opened: tuple[int, ...] = ()) -> set[int]:
    inodes, upto = master.next_recall(holder, SOON)
    master.recalled(holder, inodes, upto, opened)
    return set(inodes)


def test_a_mount_that_has_arrived_stays(server: Listening, guard: DeviceGuard) -> None:
    """With that connection its file locks would end."""
    time.sleep(0.3)
    assert server.accepted == 1
    changed(guard, D)
    changed(guard, D)  # over the one that is nobody's now
    assert server.accepted == 2


def test_a_change_is_announced(server: Listening, guard: DeviceGuard) -> None:
    master, client = server.master, server.client()
    with guard.change(D, inodes=(F,)) as change:
        assert master.share(client, D) == master.share(client, F) == 0
        assert master.share(client, G) == 1
        doing = Doing(give_up, master, client)
        change.revoke(G)
        assert doing.result() == {G}
        assert master.share(client, G) == master.share(client, F) == 0
    assert eventually(lambda: master.share(client, D) and master.share(client, F) and master.share(client, G))


def test_a_change_waits_until_nobody_keeps_it(server: Listening, guard: DeviceGuard) -> None:
    master, client = server.master, server.client()
    master.share(client, F)
    doing = Doing(changed, guard, D, inodes=(F,))
    assert master.next_recall(client, SOON)[0] == {F}
    assert not doing.done
    other = Doing(changed, guard, D + 1, inodes=(G,))  # of other files, in another thread
    other.result()
    assert give_up(master, client) == {F}
    doing.result()


def test_who_cannot_wait_is_told_so(server: Listening, guard: DeviceGuard) -> None:
    master, client = server.master, server.client()
    master.share(client, F)
    with pytest.raises(WouldWait):
        Doing(changed, guard, D, inodes=(F,), may_wait=False).result()
    assert eventually(lambda: master.share(client, D))  # nothing has begun

    def revoke() -> None:
        with guard.change(D + 1) as change:
            change.revoke(F)

    with pytest.raises(WouldWait):
        Doing(revoke, may_wait=False).result()
    assert eventually(lambda: master.share(client, D + 1))
    doing = Doing(revoke)
    assert give_up(master, client) == {D + 1}
    assert give_up(master, client) == {F}
    doing.result()


def test_who_looks_asks_only_where_there_is_a_mark(server: Listening, guard: DeviceGuard) -> None:
    master, client = server.master, server.client()
    assert not guard.settle(D) and server.accepted == 1
    assert master.take(client, D)
    assert not guard.settle(F) and server.accepted == 1
    with pytest.raises(WouldWait):
        Doing(guard.settle, D, may_wait=False).result()
    looking = Doing(guard.settle, D)
    assert master.next_recall(client, SOON)[0] == {D} and not looking.done
    assert give_up(master, client) == {D}
    assert looking.result()
    assert not guard.settle(D)


def test_marks_are_those_of_the_master_that_is_there(server: Listening, path: Path) -> None:
    with DeviceGuard(path, lease=0.5) as guard:
        assert server.master.take(server.client(), D)
        server.kill()
        Doing(guard.settle, D).result()  # once its leases are over
        other = Listening(path, device=True)
        client = other.client()
        # once the mount has seen its marks
        assert eventually(lambda: other.master.heard(client) or other.master.take(client, F))
        looking = Doing(guard.settle, F)
        assert give_up(other.master, client) == {F}
        assert looking.result() and not guard.settle(D)
    other.kill()


def test_what_is_granted_before_the_marks_have_come_is_asked_for(
    server: Listening, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, come = lock_client._received_marks, threading.Event()

    def late(channel: Channel) -> SeenMarks:
        assert come.wait(SOON)
        return received(channel)

    monkeypatch.setattr(lock_client, "_received_marks", late)
    made = DeviceGuard(path, lease=0.5)
    before = Marks()
    made._marks, made._heard = SeenMarks(os.dup(before.shared())), -math.inf  # of a master that is gone
    arriving = Doing(made.__enter__)
    client = server.client()
    assert eventually(lambda: server.accepted and server.master.take(client, F))
    assert eventually(lambda: made._marks is None)
    looking = Doing(made.settle, F)
    assert give_up(server.master, client) == {F}
    assert looking.result()
    come.set()
    arriving.result()
    made.__exit__()


def test_a_refusal_says_why(server: Listening, guard: DeviceGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **_more: object) -> None:
        raise OSError(errno.ETIMEDOUT, "they never gave it up")

    monkeypatch.setattr(server.master, "add", late)
    assert errno_of(changed, guard, D) == errno.ETIMEDOUT


def test_what_the_kernel_writes_is_granted_to_nobody(server: Listening, guard: DeviceGuard) -> None:
    master, client = server.master, server.client()
    for inode in (F, F, G):
        with guard.change(inodes=(inode,)):
            assert guard.begin_writing(inode)
    assert eventually(lambda: master.share(client, D))
    assert master.share(client, F) == 0 and not master.opened(client, F)
    guard.end_writing(F)
    guard.end_writing(G)
    assert eventually(lambda: master.share(client, G))  # and so the master has heard of F as well
    assert master.share(client, F) == 0
    guard.end_writing(F)
    assert eventually(lambda: master.share(client, F))


def test_the_kernel_may_not_write_what_a_client_keeps_or_has_open(
    server: Listening, guard: DeviceGuard
) -> None:
    master, client = server.master, server.client()
    master.opened(client, F)
    with guard.change(inodes=(F,)):
        assert not guard.begin_writing(F)
    master.closed(client, F)
    master.share(client, G)
    doing = Doing(changed, guard, inodes=(G,))
    give_up(master, client, (G,))  # it was opened without a word
    doing.result()
    assert not guard.begin_writing(G)
    assert guard.begin_writing(F)
    assert eventually(lambda: master.share(client, G))


def test_a_mount_that_dies_leaves_nothing(server: Listening, path: Path) -> None:
    master, client = server.master, server.client()
    channel = Channel(socket.socket(socket.AF_UNIX), "the master")
    channel.sock.connect(str(path))
    with channel:
        channel.call(m.Begin((D,), (F,), True), m.Begun, Deadline.after(SOON))
        channel.call(m.BeginWriting(G), m.Writing, Deadline.after(SOON))
        channel.send(m.EndWriting(99), Deadline.after(SOON))  # of which it knows nothing
        assert channel.call(m.BeginWriting(G), m.Writing, Deadline.after(SOON)).by_kernel
        assert [master.share(client, inode) for inode in (D, F, G)] == [0, 0, 0]
    assert eventually(lambda: all(master.share(client, inode) for inode in (D, F, G)))


def test_a_master_that_was_started_again_is_told_what_is_written(
    server: Listening, guard: DeviceGuard, path: Path
) -> None:
    for inode in (F, G, G):
        assert guard.begin_writing(inode)
    server.kill()
    guard.end_writing(F)
    again = Listening(path, device=True)
    client = again.client()
    assert eventually(lambda: again.master.share(client, F))  # nothing before it knows what is written
    assert again.master.share(client, G) == 0 and not again.master.opened(client, G)
    guard.end_writing(G)
    assert again.master.share(client, G) == 0
    guard.end_writing(G)
    assert eventually(lambda: again.master.share(client, G))
    again.kill()


def test_a_master_that_never_heard_of_a_mount_grants_nothing(path: Path) -> None:
    server = Listening(path, device=True)
    client = server.client()
    assert server.master.share(client, F) == 0 == server.master.share_data(client, F)
    with DeviceGuard(path, lease=LEASE):
        assert server.master.share(client, F)
    server.kill()


def test_a_change_is_announced_to_a_master_that_was_started_again(
    server: Listening, guard: DeviceGuard, path: Path
) -> None:
    changed(guard, D)
    server.kill()
    again = Listening(path)
    client = again.client()
    with guard.change(D) as change:
        assert again.master.share(client, D) == 0
        change.revoke(F)
        assert again.master.share(client, F) == 0
    assert eventually(lambda: again.master.share(client, D))
    again.kill()


def test_a_change_in_the_middle_of_which_the_master_is_started_again(
    server: Listening, guard: DeviceGuard, path: Path
) -> None:
    """What is added to it is announced to another master, which must hear of the rest as well."""
    with guard.change(D, inodes=(G,)) as change:
        server.kill()
        again = Listening(path)
        client = again.client()
        change.revoke(F)
        assert [again.master.share(client, inode) for inode in (F, D, G)] == [0, 0, 0]
    assert eventually(lambda: again.master.share(client, F))
    again.kill()


def test_a_master_that_is_away_is_waited_for(server: Listening, guard: DeviceGuard, path: Path) -> None:
    changed(guard, D)
    server.kill()
    doing = Doing(changed, guard, D)
    with pytest.raises(WouldWait):
        Doing(changed, guard, D, may_wait=False).result()
    assert not doing.done
    again = Listening(path)
    doing.result()
    again.kill()


def test_a_master_that_does_not_come_back_is_waited_for_as_long_as_a_lease(
    server: Listening, path: Path
) -> None:
    lease = 1.0
    start = time.monotonic()
    with DeviceGuard(path, lease=lease) as guard:
        changed(guard, D)
        server.kill()
        changed(guard, D, inodes=(F,))
        assert time.monotonic() - start >= lease
        with guard.change(D) as change:
            change.revoke(F)
        assert guard.begin_writing(F)
        guard.end_writing(F)


def test_nobody_is_waited_for_where_there_never_was_a_master(path: Path) -> None:
    with DeviceGuard(path, lease=1000.0) as guard:
        changed(guard, D, inodes=(F,))
        assert guard.begin_writing(F)
        guard.end_writing(F)


class OnDevice:
    """The device's tree, guarded, and a client of the master that wants to keep all that there is."""

    def __init__(self, server: Listening, guard: DeviceGuard, top: Path) -> None:
        self.top, self.master, self.client = top, server.master, server.client()
        (top / "public").mkdir()
        (top / "private").mkdir()
        self.root = os.open(top, os.O_PATH | os.O_DIRECTORY)
        self.inodes = Inodes(self.root, public=b"public")
        self.tree = Guarded(self.inodes, guard, by_kernel=True)
        self.public = self.tree.lookup(ROOT, b"public").node
        self.private = self.tree.lookup(ROOT, b"private").node

    def made(self, name: bytes, parent: Node | None = None) -> Node:
        found, handle = self.tree.create(parent or self.public, name, os.O_RDWR, 0o644, None)
        self.tree.release(handle)
        return found.node

    def keep(self, *nodes: Node) -> None:
        inodes = [self.inodes.inode(node) for node in nodes]
        assert eventually(lambda: all(self.master.share(self.client, inode) for inode in inodes))

    def given_up(self, doing: Doing) -> set[int]:
        """All that was recalled until the operation was done."""
        found: set[int] = set()
        while not doing.done:
            inodes, upto = self.master.next_recall(self.client, 0.05)
            self.master.recalled(self.client, inodes, upto, ())
            found |= set(inodes)
        doing.result()
        return found

    def numbers(self, *nodes: Node) -> set[int]:
        return {self.inodes.inode(node) for node in nodes}


@pytest.fixture
def device(server: Listening, guard: DeviceGuard, top: Path) -> Iterator[OnDevice]:
    made = OnDevice(server, guard, top)
    yield made
    made.inodes.close()
    os.close(made.root)


def test_each_operation_recalls_what_it_changes(device: OnDevice) -> None:
    tree, public = device.tree, device.public
    f, g = device.made(b"f"), device.made(b"g")
    d = tree.mkdir(public, b"d", 0o755, None).node
    sub = tree.mkdir(d, b"sub", 0o755, None).node
    handle = tree.open(f, os.O_RDWR)
    tree.release(handle)
    everything = (public, d, sub, f, g)

    def does(call: object, *arguments: object) -> set[int]:
        device.keep(*everything)
        return device.given_up(Doing(call, *arguments))  # type: ignore[arg-type]

    assert does(tree.setattr, f, Changes(mode=0o600)) == device.numbers(f)
    assert does(tree.open, f, os.O_WRONLY) == device.numbers(f)
    tree.release(Handle(max(tree._open)))
    assert does(tree.open, f, os.O_RDONLY) == set()
    assert does(tree.open, f, os.O_RDONLY | os.O_TRUNC) == device.numbers(f)
    assert does(tree.link, f, d, b"l") == device.numbers(f, d)
    assert does(tree.unlink, d, b"l") == device.numbers(f, d)
    assert does(tree.symlink, public, b"s", b"f", None) == device.numbers(public)
    assert does(tree.mknod, public, b"n", 0o100644, 0, None) == device.numbers(public)
    assert does(tree.rename, public, b"f", d, b"f") == device.numbers(public, d, f)
    assert does(tree.rename, d, b"f", public, b"g") == device.numbers(public, d, f, g)
    assert does(tree.rename, public, b"g", d, b"sub", 2) == device.numbers(public, d, f, sub)
    assert does(tree.rmdir, public, b"g") == device.numbers(public, sub)
    assert does(device.made, b"new") == device.numbers(public)
    with pytest.raises(FileNotFoundError):
        does(tree.unlink, public, b"none")


def test_the_private_part_is_nobody_elses(device: OnDevice, server: Listening) -> None:
    tree = device.tree
    server.kill()  # and so it need not be asked
    secret = device.made(b"secret", device.private)
    sub = tree.mkdir(device.private, b"d", 0o755, None).node
    tree.setattr(secret, Changes(size=9))
    tree.link(secret, sub, b"l")
    tree.rename(sub, b"l", device.private, b"m")
    handle = tree.open(secret, os.O_RDWR)
    assert tree.write(handle, b"x", 0) == 1 and tree.access(handle) is Access.KERNEL
    tree.release(handle)
    tree.unlink(device.private, b"m")


def test_who_writes_a_file(device: OnDevice) -> None:
    tree, master = device.tree, device.master
    f = device.made(b"f")
    inode = device.inodes.inode(f)
    reading = tree.open(f, os.O_RDONLY)
    assert tree.access(reading) is Access.KERNEL
    device.keep(f)
    doing = Doing(tree.open, f, os.O_RDWR)
    device.given_up(doing)
    writing = doing.result()
    assert tree.access(writing) is Access.KERNEL
    assert master.share(device.client, inode) == 0 and not master.opened(device.client, inode)
    tree.release(writing)
    device.keep(f)
    assert master.opened(device.client, inode)
    tree.release(reading)
    doing = Doing(tree.open, f, os.O_WRONLY)
    assert device.given_up(doing) == {inode}
    assert tree.access(doing.result()) is Access.DIRECT
    device.keep(f)
    writing = Doing(tree.write, doing.result(), b"seen", 0)
    assert device.given_up(writing) == {inode}
    tree.release(doing.result())


def test_who_writes_a_file_that_the_kernel_reads(device: OnDevice) -> None:
    """It can open it in no other way then, whoever else has it open; and nobody is granted it."""
    tree, master = device.tree, device.master
    f = device.made(b"f")
    inode = device.inodes.inode(f)
    assert eventually(lambda: master.opened(device.client, inode))
    reading = tree.open(f, os.O_RDONLY)
    device.keep(f)
    doing = Doing(tree.open, f, os.O_WRONLY)
    assert device.given_up(doing) == {inode}
    assert tree.access(doing.result()) is Access.KERNEL
    assert master.share(device.client, inode) == 0
    tree.release(reading)
    tree.release(doing.result())
    device.keep(f)


def test_who_reads_a_file_that_the_daemon_writes(device: OnDevice) -> None:
    """All who have it open have it so in the same way."""
    tree, master = device.tree, device.master
    f = device.made(b"f")
    inode = device.inodes.inode(f)
    assert eventually(lambda: master.opened(device.client, inode))
    handles = [tree.open(f, flags) for flags in (os.O_WRONLY, os.O_RDONLY, os.O_RDWR)]
    assert [tree.access(handle) for handle in handles] == [Access.DIRECT] * 3
    master.closed(device.client, inode)
    handles.append(tree.open(f, os.O_RDWR))
    tree.release(handles.pop(0))
    assert [tree.access(handle) for handle in handles] == [Access.DIRECT] * 3
    for handle in handles:
        tree.release(handle)
    handle = tree.open(f, os.O_RDWR)
    assert tree.access(handle) is Access.KERNEL
    tree.release(handle)


def test_a_file_that_is_still_mapped_is_written(device: OnDevice) -> None:
    tree, master = device.tree, device.master
    f = device.made(b"f")
    inode = device.inodes.inode(f)
    tree.setattr(f, Changes(size=mmap.PAGESIZE))
    with (device.top / "public/f").open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    for _ in range(2):  # and whoever opens it meanwhile has not ended that
        tree.release(tree.open(f, os.O_RDWR))
        assert master.share(device.client, inode) == 0
    assert master.device[1] == 1
    mapping.close()
    device.keep(f)
    assert eventually(lambda: "mappings" not in [thread.name for thread in threading.enumerate()])


def test_who_opens_a_file_while_it_is_looked_at(device: OnDevice) -> None:
    """Nobody hears of the lease by which that is done, and nobody is killed by its signal."""
    f = device.made(b"f")
    with (device.top / "public/f").open("rb") as looked_at:
        fcntl.fcntl(looked_at, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(looked_at, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        doing = [Doing(device.tree.open, f, os.O_RDWR), Doing(device.tree.setattr, f, Changes(size=3))]
        time.sleep(0.05)
        assert not any(one.done for one in doing)
        fcntl.fcntl(looked_at, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        handle, known = [one.result() for one in doing]
        assert known.attributes.size == 3 and is_written(looked_at.fileno())
        device.tree.release(handle)
        assert eventually(lambda: not is_written(looked_at.fileno()))

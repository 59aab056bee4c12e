# SPDX-License-Identifier: Apache-2.0
"""A client gives up its cached state in time: recalls, connections and servers that end."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path

import pytest

from millpond.fs.client.session import now
from millpond.fs.coherence.delegation_table import DEVICE
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import ROOT, CacheMode, NegativeEntry, SetAttr
from millpond.fs.vfs.operation import Operation, current
from millpond.fs.vfs.path_api import Handle
from millpond.wire.channel import Channel

from ..waiting import eventually
from .caching_client import LONG_LEASE, WHOLE, Client, Device, brisk, make
from .recall_clients import LEASE, LONG, client, device, lease, other, server
from .support import SOON, Doing, Held, Server, errno_of, lasts

__all__ = ["client", "device", "lease", "other", "server"]


def test_what_is_granted_is_known_without_asking(client: Client, server: Server) -> None:
    tree, public = client.tree, client.public
    node = client.find(b"f")
    with pytest.raises(NegativeEntry):
        tree.lookup(public, b"none")
    server.refusing = True
    client.hang_up()
    found = tree.lookup(public, b"f")
    assert (found.node, found.attributes.size) == (node, 3)
    assert 0 < found.seconds <= LONG and 0 < found.name_seconds <= LONG
    assert client.size(node) == 3
    with pytest.raises(NegativeEntry) as caught:
        tree.lookup(public, b"none")
    assert caught.value.seconds > 0
    server.refusing = False


def test_nothing_is_kept_without_a_keeper(server: Server, device: Device) -> None:
    device.put(b"f", b"one")
    client = Client(server)
    client.recalls.stop()
    client.tree.backchannel = None
    assert not client.kept(client.find(b"f"))
    with client.opened(client.find(b"f")) as handle:
        assert client.tree.cache_mode(handle) is CacheMode.DIRECT
    client.tree.close()


def test_what_a_client_changes_itself_is_not_recalled(client: Client) -> None:
    node = client.find(b"f")
    before = len(client.kernel.dropped)
    with client.opened(node, os.O_RDWR) as handle:
        client.tree.read(handle, WHOLE, 0)
        client.tree.write(handle, b"TWO", 0)
        assert bytes(client.tree.read(handle, WHOLE, 0)) == b"TWO"
        client.tree.setattr(node, SetAttr(size=1), handle)
    assert client.size(node) == 1 and client.kept(node)
    client.tree.rename(client.public, b"f", client.public, b"h")
    assert client.find(b"h") == node and client.names() == {"g", "h"}
    with pytest.raises(NegativeEntry) as caught:
        client.tree.lookup(client.public, b"f")
    assert caught.value.seconds > 0
    assert len(client.kernel.dropped) == before


@pytest.mark.parametrize("what", ["fs.attributes", "fs.found", "fs.data"])
def test_a_reply_that_was_under_way_is_not_kept(client: Client, device: Device, what: str) -> None:
    node = client.find(b"f")
    device.put(b"f", b"two")
    calls = {
        "fs.attributes": lambda: client.size(node),
        "fs.found": lambda: client.tree.lookup(client.public, b"f"),
        "fs.data": lambda: client.read(node),
    }
    if what == "fs.found":
        device.put(b"h", b"")  # its name is not known any more
    client.gate.shut(what)
    doing = Doing(calls[what])
    client.gate.reached()
    device.put(b"f", b"longer")
    device.put(b"new", b"")
    client.gate.open()
    doing.result()  # what was true when it was asked
    assert client.size(node) == 6 and client.read(node) == b"longer"
    assert client.find(b"f") == node and "new" in client.names()


def eager(client: Client, device: Device) -> None:
    """From now on small files come with their names."""
    for name in (b"a", b"b", b"c"):
        device.put(name, name)
    for name in (b"a", b"b", b"c"):
        assert client.read(client.find(name)) == name


def test_contents_that_were_under_way_with_a_name_are_not_kept(client: Client, device: Device) -> None:
    """Not even if the file is granted anew, in between, to another thread."""
    eager(client, device)
    client.gate.shut("fs.found")
    doing = Doing(client.find, b"f")
    client.gate.reached()
    device.put(b"f", b"two")
    node = client.find(b"f")  # by another slot
    assert client.kept(node)
    client.gate.open()
    assert doing.result() == node
    assert client.read(node) == b"two"


def test_files_read_in_order_are_read_anew_after_a_change(client: Client, device: Device) -> None:
    def read(handle: Handle, at: int) -> bytes:
        return bytes(client.tree.read(handle, 128 << 10, at))

    def begin() -> bytes:
        with client.opened(node) as handle:
            first = [read(handle, at) for at in range(0, 1 << 20, 128 << 10)]  # and more is read ahead
            device.does(b"big", b"2" * (4 << 20)).result()
            return first[0][:1] + b"".join(read(handle, at)[:1] for at in range(1 << 20, 2 << 20, 128 << 10))

    device.put(b"big", b"1" * (4 << 20))
    node = client.find(b"big")
    assert client.size(node) == 4 << 20
    assert begin() == b"1" + b"2" * 8


def test_a_file_read_at_random_places_has_all_of_its_bytes(client: Client, device: Device) -> None:
    data = os.urandom(1 << 20)
    device.put(b"large", data)
    with client.opened(client.find(b"large")) as handle:
        for offset in (5, 300_000, 700_000, 0, 262_143, 9):
            assert bytes(client.tree.read(handle, 100, offset)) == data[offset : offset + 100]


def test_a_file_that_is_read_while_it_is_recalled_is_dropped_once_more(
    client: Client, device: Device
) -> None:
    """The read must not wait for the change: the kernel drops nothing before the read has ended."""
    node = client.find(b"f")
    client.read(node)
    dropping, go_on = threading.Event(), threading.Event()

    def before(dropped: int) -> None:
        if dropped == node and not dropping.is_set():
            dropping.set()
            assert go_on.wait(SOON)

    client.kernel.before = before
    doing = device.does(b"f", b"two")
    assert dropping.wait(SOON)
    assert client.read(node) in (b"one", b"")  # while the kernel waits for it
    count = client.kernel.dropped.count((node, True))
    go_on.set()
    doing.result()
    assert client.kernel.dropped.count((node, True)) >= count + 2
    assert client.read(node) == b"two"


def test_a_file_that_was_dropped_can_be_read_though_others_were_not(client: Client, device: Device) -> None:
    """The server waits for the answer to all of the recall; who reads one of them meanwhile must not fail."""
    node, g = client.find(b"f"), client.find(b"g")
    client.read(node)
    client.read(g)
    dropped, go_on = threading.Event(), threading.Event()

    def before(dropping: int) -> None:
        if dropping == g:
            dropped.set()
            assert go_on.wait(SOON)

    client.kernel.before = before
    manager = client.server.sessions.delegations
    inodes = {client.tree.getattr(each).attributes.inode for each in (node, g)}

    def change() -> None:
        with manager.write_intent(DEVICE, inodes=tuple(inodes)):
            pass

    doing = Doing(change)
    assert dropped.wait(SOON)
    reading = Doing(client.read, node)
    time.sleep(0.2)
    go_on.set()
    doing.result()
    assert reading.result() == b"one"


@pytest.mark.parametrize("how", ["its connection is lost", "the server forgets it"])
def test_everything_is_dropped_when_nothing_can_be_recalled(
    client: Client, device: Device, server: Server, how: str
) -> None:
    node, g = client.find(b"f"), client.find(b"g")
    client.read(node)
    known = server.sessions.find(client.tree.session.client)
    assert known and known.callback_channel
    names = client.kernel.names_dropped
    if how == "the server forgets it":
        server.forget()
    known.callback_channel.shut_down()
    eventually(lambda: {(node, True), (g, False)} <= set(client.kernel.dropped), "everything is dropped")
    assert client.kernel.names_dropped > names
    client.await_lease()
    device.put(b"f", b"longer")
    assert client.size(node) == 6 and client.read(node) == b"longer"


def test_a_server_that_forgot_a_client_is_asked_anew(client: Client, device: Device, server: Server) -> None:
    """Also before the connection ends over which it recalls: the first reply tells."""
    node = client.find(b"f")
    assert client.kept(node)
    server.refusing = True
    server.restart()
    server.refusing = False
    (Path(f"/proc/self/fd/{server.root}") / "public" / "f").write_text("longer")  # nobody is there to tell
    client.tree.statfs()
    assert client.size(node) == 6
    client.await_lease()
    device.put(b"f", b"again")
    assert client.size(node) == 5


@pytest.mark.parametrize("change", ["remove", "replace", "move"])
def test_a_name_that_is_taken_away_counts_though_the_file_was_found_by_another(
    client: Client, top: Path, change: str
) -> None:
    """Names are forgotten when a change of their directory fails; a kernel knows them still."""
    tree, public, node = client.tree, client.public, client.find(b"f")
    make(client, b"in it", tree.mkdir(public, b"d", 0o755, None).node)
    tree.link(node, public, b"h")
    assert errno_of(tree.rmdir, public, b"d") == errno.ENOTEMPTY
    assert client.find(b"h") == node and tree.getattr(node).attributes.links == 2
    if change == "remove":
        tree.unlink(public, b"f")
    else:
        tree.rename(
            public, b"g" if change == "replace" else b"f", public, b"f" if change == "replace" else b"new"
        )
    now, told = (top / "public" / "h").stat(), tree.getattr(node).attributes
    assert (told.links, told.ctime) == (now.st_nlink, now.st_ctime_ns)


def test_open_files_are_dropped_first(client: Client, server: Server) -> None:
    read, opened, known = client.find(b"f"), client.find(b"g"), client.public
    client.read(read)
    with client.opened(opened):
        callback = getattr(server.sessions.find(client.tree.session.client), "callback_channel", None)
        assert isinstance(callback, Channel)
        callback.shut_down()
        eventually(lambda: len(client.kernel.dropped) > 3, "everything is dropped")
    order = [node for node, _ in client.kernel.dropped]
    assert order[:2] == [opened, read] and known in order[2:]


@pytest.mark.parametrize("lease", [4.0])
def test_a_lease_is_kept_up_and_everything_is_dropped_before_it_ends(
    client: Client, device: Device, server: Server
) -> None:
    """What the kernel has mapped is read without asking, until it is dropped: in the lease's last quarter."""
    node, known = client.find(b"f"), server.sessions.find(client.tree.session.client)
    assert known
    client.read(node)
    assert lasts(lambda: client.kept(node) and not client.kernel.dropped, 5.0)
    left = list[bool]()
    client.kernel.before = lambda _node: left.append(server.sessions.delegations.has_lease(known.holder))
    client.gate.shut("fs.recall", lost=True)
    eventually(lambda: (node, True) in client.kernel.dropped, "the file is dropped")
    assert left[0]
    device.put(b"f", b"longer")
    client.await_lease()
    assert client.kept(node) and client.size(node) == 6


def test_a_program_that_waits_for_the_lease_can_be_interrupted(client: Client) -> None:
    file = client.tree.session.inodes.file(client.public)
    client.away = True
    client.server.cut()
    eventually(lambda: client.tree.session.inodes.lease_end < now(), "the lease is over")
    operation = Operation()

    def wait() -> int | None:
        current.set(operation)
        return errno_of(client.recalls.await_lease, file)

    client.recalls._timeout = LONG_LEASE
    waiting = Doing(wait)
    assert lasts(lambda: not waiting.done)
    operation.interrupt()
    assert waiting.result(SOON) == errno.EINTR


@pytest.mark.parametrize("lease", [LEASE])
def test_a_slow_flash_does_not_end_the_lease(client: Client, lease: float) -> None:
    """A release or a FORGET may take long there, and goes out with the answer to a recall."""
    slow, session = Held(client.server.tree, "statfs"), client.tree.session

    def is_held_up() -> bool:
        session.post(p.Forget(()), session.inodes.verifier)  # another request may have taken the last one
        return slow.has_begun

    eventually(is_held_up, "a FORGET goes out with a request that takes long", every=lease / 4)
    assert lasts(lambda: session.inodes.lease_end > now(), 1.5 * lease)
    slow.go_on.set()


def test_the_root_of_a_tree_that_is_public_as_a_whole_is_recalled(top: Path) -> None:
    (top / "public").mkdir()
    with brisk(LONG), contextlib.ExitStack() as ending:
        server = Server(top, lease=LONG)
        ending.callback(server.close)
        client, other = Client(server), Client(server)
        for each in (client, other):
            ending.callback(each.close)
        with pytest.raises(NegativeEntry) as caught:
            client.tree.lookup(ROOT, b"new")
        assert caught.value.seconds > 0
        _, handle = make(other, b"new", ROOT)
        assert client.tree.lookup(ROOT, b"new").node
        other.tree.release(handle)
        other.tree.unlink(ROOT, b"new")
        with pytest.raises(NegativeEntry):
            client.tree.lookup(ROOT, b"new")

# SPDX-License-Identifier: Apache-2.0
"""A hostile client and the server: none of its messages reaches private files, and the others are served."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import select
import stat
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, Refused
from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto import extended as x
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.bulk_read import FetchMany
from millpond.fs.proto.status import GetStatus, StatusIs
from millpond.fs.server.connection import PayloadBuffers
from millpond.fs.store import file_locks
from millpond.fs.vfs.inode_api import ROOT, SetAttr
from millpond.fs.vfs.path_api import MAX_TRANSFER, Owner
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message

from ..effort import scaled
from .hostile_messages import NUMBERS, REPLIES, any_of, kinds, others
from .hostile_world import HIDDEN, THROWN_OUT, World, world
from .support import NAME, SLOT, SOON, Doing

__all__ = ["world"]
FIRST = (p.SessionHello, p.Attend, GetStatus)


GOOD: dict[type[Message], Callable[[World], Message]] = {
    p.SessionHello: lambda _: p.SessionHello(NAME, SLOT),
    p.Attend: lambda _: p.Attend(NAME),
    p.Again: lambda _: p.Again(),
    p.Goodbye: lambda _: p.Goodbye(),
    p.Ping: lambda _: p.Ping(),
    p.Walk: lambda w: p.Walk(w.node, (b"f",), 100),
    p.Forget: lambda w: p.Forget((w.file,)),
    p.GetAttributes: lambda w: p.GetAttributes(w.file),
    p.SetAttributes: lambda w: p.SetAttributes(w.file, SetAttr(0o644, 0, 0, 6, "now", 5), w.own),
    p.ReadLink: lambda w: p.ReadLink(w.file),
    p.Make: lambda w: p.Make(w.node, w.fresh(), stat.S_IFREG | 0o644, Owner(0, 0), 0, b"../private/secret"),
    p.MakeLink: lambda w: p.MakeLink(w.file, w.node, w.fresh()),
    p.Remove: lambda w: p.Remove(w.directory, b"g"),
    p.Rename: lambda w: p.Rename(w.directory, b"g", w.directory, b"g"),
    p.Create: lambda w: p.Create(w.node, w.fresh(), os.O_RDWR, 0o644, Owner(0, 0), True, True),
    p.Open: lambda w: p.Open(w.file, os.O_RDWR, True),
    p.Read: lambda w: p.Read(w.own, 9, 0, True),
    p.ReadFile: lambda w: p.ReadFile(w.file, 9, 0),
    p.Write: lambda w: p.Write(w.own, 0, False, True, SetAttr(0o644, mtime=5), True),
    p.Sync: lambda w: p.Sync(w.own, True),
    p.SyncDirectory: lambda w: p.SyncDirectory(w.node),
    p.Allocate: lambda w: p.Allocate(w.own, 0, 0, 10),
    p.Seek: lambda w: p.Seek(w.own, 0, os.SEEK_DATA),
    p.Release: lambda w: p.Release(w.open()),
    p.Closed: lambda w: p.Closed(w.private_inodes[0]),
    p.GetStatistics: lambda _: p.GetStatistics(),
    FetchMany: lambda w: FetchMany(w.node, (b"f",), 100),
    c.ReadDirectoryPlus: lambda w: c.ReadDirectoryPlus(w.node, (b"d",), 0, 100, True),
    c.ReturnUnused: lambda _: c.ReturnUnused((5, 6), (1, 1)),
    c.StoreFiles: lambda w: c.StoreFiles(w.node),
    x.GetXattr: lambda w: x.GetXattr(w.file, b"user.a"),
    x.SetXattr: lambda w: x.SetXattr(w.file, b"user.a"),
    x.ListXattrs: lambda w: x.ListXattrs(w.file),
    x.RemoveXattr: lambda w: x.RemoveXattr(w.file, b"user.a"),
    r.GetLock: lambda w: r.GetLock(w.file, 1, fcntl.F_WRLCK, 0, 9),
    r.SetLock: lambda w: r.SetLock(w.file, w.epoch, 1, False, 1, fcntl.F_WRLCK, 0, 9),
    r.ReleaseLocks: lambda w: r.ReleaseLocks(77, 1, False, 1),
    r.GetLockEpoch: lambda w: r.GetLockEpoch(w.epoch),
    GetStatus: lambda _: GetStatus(True),
}
"""What would be right; each of its fields is made wrong in turn."""
NODES = ("node", "directory", "parent", "new_parent", "start", "file")
OF_FILES = [kind for kind in GOOD if {f.name for f in dataclasses.fields(kind)} & {*NODES, "handle"}]


def test_there_is_a_case_for_each_message() -> None:
    assert set(kinds()) == set(GOOD) | {type(reply) for reply in REPLIES}


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.NAME)
def test_whatever_it_says(world: World, kind: type[Message]) -> None:
    numbers = [
        *NUMBERS,
        *world.guesses,
        world.victims,
        world.victims_handle,
        world.closed,
        *world.private_inodes,
    ]
    for field in dataclasses.fields(kind):
        for value in others(field.name, getattr(GOOD[kind](world), field.name), numbers):
            answer = world.say(dataclasses.replace(GOOD[kind](world), **{field.name: value}))
            assert not isinstance(answer, p.Error) or p.known_errno(answer.errno) == answer.errno
            if isinstance(answer, p.FoundIs | p.AttributesAre):
                assert answer.attributes.inode not in world.private_inodes
            if isinstance(answer, Failure):
                assert kind in FIRST
        world.say(p.Goodbye())
        world.begin()
        for name in ("d", "d/g"):  # if it was removed
            with contextlib.suppress(FileExistsError):
                (world.public / name).mkdir() if name == "d" else (world.public / name).touch()
        world.directory = world.found(p.Walk(world.node, (b"d",)))


@pytest.mark.parametrize(
    "kind", [kind for kind in OF_FILES if kind not in c.UNANSWERED], ids=lambda k: k.NAME
)
def test_guessed_numbers(world: World, kind: type[Message]) -> None:
    for field in dataclasses.fields(kind):
        if field.name not in (*NODES, "handle") or (kind is r.GetLock and field.name == "start"):
            continue
        refused = errno.EBADF if field.name == "handle" else errno.ESTALE
        own = {world.node, world.file, world.directory, ROOT}
        guesses = [*world.guesses, *({world.victims} - own), world.closed, world.victims_handle]
        for number in guesses[: -2 if refused == errno.ESTALE else None]:
            if (kind, field.name) != (r.SetLock, "start"):
                request = dataclasses.replace(GOOD[kind](world), **{field.name: number})
                assert world.say(request) == p.Error(refused), request


def test_more_than_belongs_behind_a_message(world: World) -> None:
    for made in (*(good(world) for good in GOOD.values()), *REPLIES):
        if not isinstance(made, p.Write | x.SetXattr):
            assert isinstance(world.say(made, b"12345"), Failure) or isinstance(made, p.Goodbye)
        with Channel(world.server.raw(), "server") as channel, contextlib.suppress(ConnectionLost):
            channel.send(made, Deadline.after(SOON), b"12345")
            assert isinstance(channel.receive(Deadline.after(SOON)).message, Failure)
    world.begin()
    assert world.say(p.Write(world.own, 0), bytes(MAX_TRANSFER)) != THROWN_OUT
    assert isinstance(world.say(p.Write(world.own, 0), bytes(MAX_TRANSFER + 1)), Failure)


def test_nobody_is_served_who_has_not_said_who_he_is(world: World) -> None:
    for kind, good in GOOD.items():
        if kind not in FIRST:
            with Channel(world.server.raw(), "server") as channel:
                channel.send(good(world), Deadline.after(SOON))
                assert isinstance(channel.receive(Deadline.after(SOON)).message, Failure)


def _exactly(answer: Message) -> Message:
    return dataclasses.replace(answer, granted=0) if isinstance(answer, p.Error) else answer


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in GOOD
        if {field.name for field in dataclasses.fields(kind)} & {"name", "names"}
        and kind is not FetchMany  # this leaves out what it does not find
    ],
)
def test_a_private_name_is_like_one_that_does_not_exist(world: World, kind: type[Message]) -> None:
    def ask(name: bytes, **more: object) -> Message:
        fields = {f.name for f in dataclasses.fields(kind)}
        values = {"start": ROOT, "parent": ROOT, "name": name, "names": (name,), "mode": 0o755, **more}
        asked = {key: value for key, value in values.items() if key in fields}
        return _exactly(world.say(dataclasses.replace(GOOD[kind](world), **asked)))

    mores: list[dict[str, object]] = [{"flags": flags} for flags in (0, 1, 2, 4, os.O_EXCL)]
    mores += [{"new_parent": world.node}, {"new_parent": ROOT, "new_name": b"private"}]
    for more in mores:
        assert isinstance(ask(b"private", **more), p.Error)
        assert ask(b"private", **more) == ask(b"nothing", **more)
    for way in ((b"secret",), (b"secret", b"x"), (b"sub", HIDDEN), (b"nothing",), (b"..",), (b"",)):
        if kind is p.Walk:
            assert ask(b"", names=(b"private", *way)) == ask(b"", names=(b"nothing", *way))
    for name in (b"private", b"nothing"):  # over the border
        moved = p.Rename(world.node, b"f", ROOT, name), p.MakeLink(world.file, ROOT, name)
        assert {_exactly(world.say(each)) for each in moved} <= {p.Error(errno.EXDEV), p.Error(errno.EROFS)}


def test_what_holds_both_parts_shows_only_the_public_one(world: World) -> None:
    with world.server.talk(b"another client 2") as other:
        deadline = Deadline.after(SOON)
        other.channel.send(c.ReadDirectoryPlus(ROOT, names_only=True), deadline)
        assert isinstance(other.channel.receive(deadline).message, c.EntriesPlus)
        listing = c.unpack_page(other.channel.receive_payload(MAX_TRANSFER, deadline))
        assert [entry.name for entry in listing] == [b"public"]
        assert other.ask(p.SetAttributes(ROOT, SetAttr(mode=0o777))) == p.Error(errno.EROFS)
        assert other.ask(p.Remove(ROOT, b"public", True)) == p.Error(errno.EROFS)


def test_what_leads_out_of_the_public_part_leads_nowhere(world: World) -> None:
    link = world.found(p.Walk(world.node, (b"link",)))
    for changes in (
        p.SetAttributes(link, SetAttr(size=0)),
        p.SetAttributes(link, SetAttr(mode=0o777)),
        p.Open(link, os.O_RDWR),
    ):
        assert isinstance(world.say(changes), p.Error), changes
    world.say(p.SetAttributes(link, SetAttr(uid=os.geteuid(), atime=5, mtime=5)))
    world.say(p.MakeLink(link, world.node, b"another"))
    for names in ((b"link", b"x"), (b"link", b"..", b"private"), (b"..", b"private"), (b"d", b"..", b"..")):
        assert isinstance(world.say(p.Walk(world.node, names)), p.Error)


def test_a_fifo_is_not_opened_to_be_cut(world: World) -> None:
    fifo = world.found(p.Walk(world.node, (b"fifo",)))
    reader = os.open(world.public / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert world.say(p.SetAttributes(fifo, SetAttr(size=0))) == p.Error(errno.EINVAL)
    assert world.say(p.Open(fifo, os.O_WRONLY)) == p.Error(errno.EPERM)
    assert world.say(p.SetAttributes(world.node, SetAttr(size=0))) == p.Error(errno.EISDIR)
    state = select.poll()
    state.register(reader, select.POLLIN)
    assert not state.poll(0)  # nobody has written, and gone
    os.close(reader)


def test_a_file_is_not_cut_in_the_name_of_another(world: World) -> None:
    before = (world.public / "f").read_bytes()
    other = world.found(p.Walk(world.directory, (b"g",)))
    assert world.say(p.SetAttributes(other, SetAttr(size=0), world.own)) == p.Error(errno.EBADF)
    assert (world.public / "f").read_bytes() == before


def test_a_client_that_attends_in_a_wrong_name_or_answers_wrongly(world: World) -> None:
    for name in (b"", SLOT, os.urandom(16), NAME * 1000, NAME[:15]):
        with Channel(world.server.raw(), "server") as channel:
            assert channel.call(p.Attend(name), p.Error, Deadline.after(SOON)) == p.Error(errno.ESTALE)
    lies = tuple(range(100_000)), tuple(world.private_inodes), NUMBERS
    for last in (p.Done(), p.Recall((), 1), p.GetStatistics(), p.Attend(NAME)):
        with Channel(world.server.raw(), "server") as channel:
            channel.call(p.Attend(NAME), p.Recall, Deadline.after(SOON))
            for lie in lies:  # more often than it is asked
                channel.send(p.Recalled(lie), Deadline.after(SOON))
            channel.send(last, Deadline.after(SOON))
            with pytest.raises(ConnectionLost):
                while not isinstance(channel.receive(Deadline.after(4 * SOON)).message, Failure):
                    pass
                raise ConnectionLost


def test_the_wrong_order(world: World) -> None:
    assert isinstance(world.say(p.Again()), r.LocksDropped)
    world.say(c.ReadDirectoryPlus(world.node, names_only=True))
    assert world.say(p.Again()) == p.Error(errno.EIO)
    assert isinstance(world.say(p.SessionHello(NAME, SLOT)), Failure)
    with Channel(world.server.raw(), "server") as channel:  # Goodbye, and more at once
        channel.send(p.SessionHello(b"one more's name.", SLOT), Deadline.after(SOON))
        channel.send(p.Goodbye(), Deadline.after(SOON))
        with contextlib.suppress(ConnectionLost):  # the server may have hung up by then
            for request in (p.Remove(world.node, b"f"), p.Goodbye()):
                channel.send(request, Deadline.after(SOON))
        assert isinstance(channel.receive(Deadline.after(SOON)).message, p.SessionWelcome)
        assert isinstance(channel.receive(Deadline.after(SOON)).message, p.Done)
    assert (world.public / "f").exists()
    for name, slot in ((b"", SLOT), (NAME, b""), (NAME * 2, SLOT), (b"n" * 15, SLOT)):
        with Channel(world.server.raw(), "server") as channel, pytest.raises(Refused):
            channel.call(p.SessionHello(name, slot), Message, Deadline.after(SOON))
    with Channel(world.server.raw(), "server") as channel:
        assert isinstance(channel.call(GetStatus(True), Message, Deadline.after(SOON)), StatusIs)


def test_lists_of_a_hundred_thousand_nodes(world: World) -> None:
    nodes = tuple(range(-50_000, 50_000))
    world.say(p.Forget((*nodes, world.victims, ROOT)))
    assert isinstance(world.say(p.GetAttributes(ROOT)), p.AttributesAre)
    assert isinstance(world.say(p.GetAttributes(world.file)), p.AttributesAre)  # it is open
    assert world.say(p.GetAttributes(world.directory)) == p.Error(errno.ESTALE)


def test_locks_that_nobody_can_have(world: World) -> None:
    good = r.SetLock(world.file, world.epoch, 1, False, 1, fcntl.F_WRLCK)
    for fields in ({"mode": 3}, {"owner": -1}, {"start": 5, "end": 4}, {"end": 1 << 63}):
        assert world.say(dataclasses.replace(good, **fields)) == p.Error(errno.EINVAL)
    assert world.say(good) == r.LockSet(0)


def test_nobody_locks_so_much_that_others_have_no_descriptors(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(owner: int, start: int) -> Message:
        return world.say(r.SetLock(world.file, world.epoch, 1, False, owner, fcntl.F_RDLCK, start, start))

    world.server.tree.max_descriptors = 24
    assert [lock(owner, 0) for owner in range(4)] == [*[r.LockSet(0)] * 3, r.LockSet(errno.ENOLCK)]
    monkeypatch.setattr(file_locks, "_MAX_LOCKS", 5)
    assert [lock(1, start) for start in (2, 4, 6)] == [*[r.LockSet(0)] * 2, r.LockSet(errno.ENOLCK)]
    assert world.say(r.SetLock(world.file, world.epoch, 1, False, 1, fcntl.F_UNLCK)) == r.LockSet(0)
    assert lock(1, 0) == r.LockSet(0)


def test_slots_that_close_and_forget_under_each_other(world: World) -> None:
    """Whoever is late is told so."""
    handles: list[int] = []

    def disturb(slot: bytes) -> None:
        with world.server.talk(NAME, slot) as talk:
            for turn in range(100):
                for handle in handles[-3:]:
                    talk.post(p.Release(handle))
                    talk.ask(p.Read(handle, 1, 0, True))
                    talk.ask(p.Write(handle, 0))
                talk.post(p.Forget((world.directory, world.file)))
                talk.ask(p.Make(world.directory, b"m%d" % turn, 0o644))
                talk.ask(p.Walk(world.node, (b"d", b"g")))

    disturbing = [Doing(disturb, b"%016d" % number) for number in range(3)]
    for _ in range(200):
        answer = world.say(p.Create(world.node, world.fresh(), os.O_RDWR, 0o600))
        handles += [answer.handle] if isinstance(answer, p.Opened) else []
    for each in disturbing:
        each.result()


@settings(max_examples=scaled(quick=100, full=300), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    said=st.lists(st.one_of([any_of(kind) for kind in GOOD]), min_size=1, max_size=6),
    payload=st.binary(max_size=9),
)
def test_anything_at_all(world: World, said: list[Message], payload: bytes) -> None:
    for request in said:
        world.say(request, payload if isinstance(request, p.Write) else b"")


def test_payloads_of_all_connections_take_bounded_memory() -> None:
    """Each connection had a buffer of its own: 10 GiB, with all the slots that clients may have."""
    payloads, inside, go_on = PayloadBuffers(2), threading.Semaphore(0), threading.Event()

    def held(size: int) -> int:
        with payloads.buffer(size) as buffer:
            inside.release()
            assert go_on.wait(SOON)
            return len(buffer)

    with payloads.buffer(0) as nothing:
        assert not nothing
        waiting = [Doing(held, size) for size in (1, 2, MAX_TRANSFER)]
        assert inside.acquire(timeout=SOON) and inside.acquire(timeout=SOON)
        assert not inside.acquire(timeout=0.1)
        go_on.set()
        assert [one.result() for one in waiting] == [1, 2, MAX_TRANSFER]

# SPDX-License-Identifier: Apache-2.0
"""The quota of the public part, seen by the host over connections."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.store.layout import PUBLIC
from millpond.fs.store.usage import public_usage
from millpond.fs.vfs.bulk_api import SmallFile
from millpond.fs.vfs.inode_api import ROOT, SetAttr
from millpond.fs.vfs.lock_types import Mode
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.fs.vfs.path_api import os_error

from .support import Server, Talk, errno_of
from .test_1_quota import backing

__all__ = ["backing"]

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 2 * MIB
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


@pytest.fixture
def server(backing: Path) -> Iterator[Server]:
    made = Server(backing, public=PUBLIC.encode(), limit=LIMIT)
    yield made
    made.close()


def filled(volume: PathAdapter, path: str, size: int) -> int:
    """A new file with so many bytes; its handle."""
    handle = volume.open(path, NEW, 0o644)
    for offset in range(0, size, 64 * KIB):
        volume.write(handle, bytes(min(64 * KIB, size - offset)), offset)
    return handle


def used(server: Server) -> int:
    server.tree.quota.count()
    return server.tree.quota.used


def agrees(server: Server, backing: Path) -> bool:
    """Whether nothing is counted but what has a name."""
    return used(server) == public_usage(backing)[0]


def test_the_write_that_would_cross_the_quota_fails(
    server: Server, volume: PathAdapter, backing: Path
) -> None:
    handle = filled(volume, "public/f", MIB)
    other = volume.open("public/g", NEW, 0o644)
    assert errno_of(volume.write, other, bytes(MIB), 0) == errno.ENOSPC
    assert (backing / "public/g").stat().st_size == 0  # nothing of it
    assert volume.write(handle, b"over", 0) == 4  # what is there may be overwritten
    assert volume.write(other, bytes(512 * KIB), 0) == 512 * KIB
    assert errno_of(volume.open, "public/f2", NEW, 0o644) is None
    volume.release(handle)
    volume.release(other)
    assert agrees(server, backing)


def test_all_that_takes_space_is_refused_when_none_is_left(
    server: Server, volume: PathAdapter, backing: Path
) -> None:
    handle = volume.open("public/f", NEW, 0o644)
    at = 0
    while not errno_of(volume.write, handle, bytes(4 * KIB), at):
        at += 4 * KIB
    assert LIMIT - 4 * KIB < used(server) <= LIMIT
    assert errno_of(volume.open, "public/new", NEW, 0o644) == errno.ENOSPC
    assert errno_of(volume.mkdir, "public/d", 0o755) == errno.ENOSPC
    assert errno_of(volume.symlink, "to", "public/l") == errno.ENOSPC
    assert errno_of(volume.link, "public/f", "public/g") == errno.ENOSPC
    assert errno_of(volume.write, handle, bytes(4 * KIB), 1 << 40) == errno.ENOSPC
    volume.rename("public/f", "public/g")
    volume.ftruncate(handle, 1 << 40)  # a hole takes nothing, what is written into it does
    assert errno_of(volume.write, handle, b"x", 1 << 39) == errno.ENOSPC
    volume.ftruncate(handle, 0)
    volume.mkdir("public/d", 0o755)
    volume.symlink("to", "public/d/l")
    volume.link("public/g", "public/d/g")
    volume.release(handle)
    assert agrees(server, backing)


def test_space_is_allocated_within_the_quota(server: Server, tree: RemoteFs, backing: Path) -> None:
    public = tree.walk(1, [b"public"]).node  # type: ignore[arg-type]
    _, handle = tree.create(public, b"f", os.O_RDWR, 0o644, None)
    assert errno_of(tree.allocate, handle, 0, 0, 2 * LIMIT) == errno.ENOSPC
    tree.allocate(handle, 0, 0, MIB)
    assert errno_of(tree.allocate, handle, 1, MIB, MIB) == errno.ENOSPC
    assert tree.write(handle, bytes(MIB), 0) == MIB
    tree.allocate(handle, 3, 0, MIB)  # a hole again
    assert tree.write(handle, bytes(MIB), MIB) == MIB
    tree.setattr(public, SetAttr(mode=0o755))
    tree.release(handle)
    assert agrees(server, backing)


def test_a_removed_file_counts_until_it_is_closed(server: Server, volume: PathAdapter, backing: Path) -> None:
    handle = filled(volume, "public/f", MIB)
    volume.link("public/f", "public/g")
    volume.unlink("public/f")
    assert agrees(server, backing)
    volume.unlink("public/g")
    assert used(server) > MIB  # nobody finds it, but it is there
    volume.release(handle)
    volume.statfs()  # what was posted goes with it
    assert agrees(server, backing)


def test_what_the_device_writes_is_counted_now_and_then(
    server: Server, volume: PathAdapter, backing: Path
) -> None:
    (backing / "public/by-the-device").write_bytes(bytes(2 * LIMIT))
    handle = volume.open("public/f", NEW, 0o644)
    assert volume.write(handle, b"x", 0) == 1  # not yet seen
    assert used(server) > 2 * LIMIT
    assert errno_of(volume.write, handle, bytes(4 * KIB), 8 * KIB) == errno.ENOSPC
    volume.unlink("public/by-the-device")
    assert volume.write(handle, bytes(4 * KIB), 8 * KIB) == 4 * KIB
    volume.release(handle)
    assert agrees(server, backing)


def test_files_stored_together_stay_within_the_quota(server: Server, tree: RemoteFs, backing: Path) -> None:
    folder = tree.walk(ROOT, [PUBLIC.encode()]).node
    files = [SmallFile(b"%02d" % number, bytes(60 * KIB), 0o644, 0, 0) for number in range(8)]
    batches = [[replace(file, name=b"%d-%s" % (batch, file.name)) for file in files] for batch in range(6)]
    errors = [error for batch in batches for error in tree.bulk.store(folder, batch)]
    assert set(errors) == {0, errno.ENOSPC}
    names = list((backing / PUBLIC).iterdir())
    assert len(names) == errors.count(0) and {path.stat().st_size for path in names} == {60 * KIB}
    assert used(server) <= LIMIT


def hoarded(talk: Talk, name: bytes) -> int:
    """The number of a new file of 512 KiB that is removed, closed and not forgotten."""
    public = talk.find(PUBLIC.encode())
    opened = talk.ask(p.Create(public, name, os.O_RDWR, 0o644))
    if not isinstance(opened, p.Opened) or opened.found is None:
        raise os_error(errno.ENOSPC if opened == p.Error(errno.ENOSPC) else errno.EIO)
    written = talk.ask(p.Write(opened.handle, 0), bytes(512 * KIB))
    talk.call(p.Remove(public, name), p.Changed)
    talk.post(p.Release(opened.handle))
    if written == p.Error(errno.ENOSPC):
        raise os_error(errno.ENOSPC)
    return opened.found.node


def test_nobody_hoards_more_than_the_quota(server: Server, backing: Path) -> None:
    with server.talk() as talk:
        nodes = []
        with pytest.raises(OSError, match="No space"):
            for number in range(5):
                nodes.append(hoarded(talk, b"%d" % number))
        assert len(nodes) == 3 and used(server) > 3 * 512 * KIB
        talk.post(p.Forget((nodes.pop(),)))
        hoarded(talk, b"f")
        talk.call(p.Goodbye(), p.Done)
    assert agrees(server, backing)


def test_nobody_hoards_more_than_the_quota_by_locks(server: Server, backing: Path) -> None:
    """What was removed and forgotten is on the flash as long as it is locked."""
    with server.talk() as talk:
        epoch = talk.call(r.GetLockEpoch(0), r.LocksDropped).epoch
        with pytest.raises(OSError, match="No space"):
            for number in range(1, 6):
                node = hoarded(talk, b"%d" % number)
                talk.call(r.SetLock(node, epoch, number, True, number, Mode.WRITE), r.LockSet)
                talk.post(p.Forget((node,)))
        talk.call(p.Goodbye(), p.Done)
    assert agrees(server, backing)


def test_a_client_gets_the_room_of_the_files_it_removed(
    server: Server, tree: RemoteFs, volume: PathAdapter, backing: Path
) -> None:
    """Also of what he does not use but has not told that he forgot, as of files that the device removed."""
    for remove in (volume.unlink, lambda path: (backing / path).unlink()):
        for _ in range(5):
            volume.release(filled(volume, "public/f", MIB))
            remove("public/f")
    tree.close()
    server.join()
    assert agrees(server, backing)

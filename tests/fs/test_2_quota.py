# SPDX-License-Identifier: Apache-2.0
"""The quota of the public part, seen by the host: over connections, and through a real mount."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.server.connection import serve
from millpond.fs.server.handlers import RequestHandlers
from millpond.fs.server.sessions import SessionTable
from millpond.fs.server.shared_descriptors import SharedDescriptors
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import PUBLIC, prepare
from millpond.fs.store.usage import public_usage
from millpond.fs.vfs.bulk_api import SmallFile
from millpond.fs.vfs.inode_api import ROOT, SetAttr
from millpond.fs.vfs.lock_types import Mode
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.linux.confinement.sandbox import Bind, Sandbox, spawn
from millpond.wire.channel import Channel

from ..waiting import eventually
from .caching_client import Client
from .conftest import InNamespace, World
from .support import SOON, Server, errno_of, listening

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 2 * MIB
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


class Limited(Server):
    """Whose public part has a quota."""

    def __init__(self, backing: Path, limit: int = LIMIT) -> None:
        super().__init__(backing, public=PUBLIC.encode())
        self.tree = BackingFs(self.root, public=PUBLIC.encode(), limit=limit)
        self.sessions = SessionTable(self.tree)


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    directory = tmp_path / "flash"
    prepare(directory)
    return directory


@pytest.fixture
def limited(backing: Path) -> Iterator[Limited]:
    made = Limited(backing)
    yield made
    made.drop()
    made.sessions.close()
    os.close(made.root)


@pytest.fixture
def volume(limited: Limited) -> Iterator[PathAdapter]:
    tree = RemoteFs(limited.dial, timeout=SOON)
    yield PathAdapter(tree)
    tree.close()


def filled(volume: PathAdapter, path: str, size: int) -> int:
    """A new file with so many bytes; its handle."""
    handle = volume.open(path, NEW, 0o644)
    for offset in range(0, size, 64 * KIB):
        volume.write(handle, bytes(min(64 * KIB, size - offset)), offset)
    return handle


def used(limited: Limited) -> int:
    limited.tree.quota.count()
    return limited.tree.quota.used


def agrees(limited: Limited, backing: Path) -> bool:
    """Whether nothing is counted but what has a name."""
    return used(limited) == public_usage(backing)[0]


@pytest.mark.expected_log("are lost that did not reach")
def test_what_the_quota_has_no_room_for_is_told_at_the_close(backing: Path) -> None:
    limited = Limited(backing, 2 * MIB)
    client = Client(limited)
    found, handle = client.tree.create(client.public, b"f", NEW, 0o644, None)
    at = 0
    while at < 4 * MIB and client.gather(found.node, bytes(KIB * 64), at):
        at += KIB * 64
    assert errno_of(client.tree.write_behind.close_descriptor, handle) == errno.ENOSPC
    client.tree.release(handle)
    client.close()
    eventually(lambda: limited.open_files == 0, "the server has closed all files")
    assert agrees(limited, backing)
    limited.drop()
    os.close(limited.root)


def test_the_write_that_would_cross_the_quota_fails(
    limited: Limited, volume: PathAdapter, backing: Path
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
    assert agrees(limited, backing)


def test_all_that_takes_space_is_refused_when_none_is_left(
    limited: Limited, volume: PathAdapter, backing: Path
) -> None:
    handle = volume.open("public/f", NEW, 0o644)
    at = 0
    while not errno_of(volume.write, handle, bytes(4 * KIB), at):
        at += 4 * KIB
    assert LIMIT - 4 * KIB < used(limited) <= LIMIT
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
    assert agrees(limited, backing)


def test_space_is_allocated_within_the_quota(limited: Limited, backing: Path) -> None:
    tree = RemoteFs(limited.dial, timeout=SOON)
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
    assert agrees(limited, backing)
    tree.close()


def test_a_removed_file_counts_until_it_is_closed(
    limited: Limited, volume: PathAdapter, backing: Path
) -> None:
    handle = filled(volume, "public/f", MIB)
    volume.link("public/f", "public/g")
    volume.unlink("public/f")
    assert agrees(limited, backing)
    volume.unlink("public/g")
    assert used(limited) > MIB  # nobody finds it, but it is there
    volume.release(handle)
    volume.statfs()  # what was posted goes with it
    assert agrees(limited, backing)


def test_what_the_device_writes_is_counted_now_and_then(
    limited: Limited, volume: PathAdapter, backing: Path
) -> None:
    (backing / "public/by-the-device").write_bytes(bytes(2 * LIMIT))
    handle = volume.open("public/f", NEW, 0o644)
    assert volume.write(handle, b"x", 0) == 1  # not yet seen
    assert used(limited) > 2 * LIMIT
    assert errno_of(volume.write, handle, bytes(4 * KIB), 8 * KIB) == errno.ENOSPC
    volume.unlink("public/by-the-device")
    assert volume.write(handle, bytes(4 * KIB), 8 * KIB) == 4 * KIB
    volume.release(handle)
    assert agrees(limited, backing)


def test_a_client_that_goes_leaves_nothing_counted(limited: Limited, backing: Path) -> None:
    tree = RemoteFs(limited.dial, timeout=SOON)
    volume = PathAdapter(tree)
    filled(volume, "public/f", MIB)
    volume.unlink("public/f")
    tree.close()
    limited.join()
    assert agrees(limited, backing)


def test_the_statistics_are_of_the_quota(limited: Limited, volume: PathAdapter) -> None:
    volume.release(filled(volume, "public/f", MIB))
    found = volume.statfs()
    assert found.blocks * found.fragment_size == LIMIT
    assert found.available == (LIMIT - limited.tree.quota.used) // found.fragment_size


class LimitedWorld(World):
    """A host whose device has a quota, and no mount of its own."""

    def start_server(self) -> None:
        server = listening(self.listener)

        def body() -> int:
            root = os.open("/volume", os.O_PATH | os.O_DIRECTORY)
            bounded = BackingFs(root, public=PUBLIC.encode(), limit=LIMIT)
            bounded.quota.keep_counting()
            sessions = SessionTable(bounded, DelegationManager())
            while True:
                channel = Channel(server.accept()[0], "the host")
                threading.Thread(target=serve, args=(channel, sessions), daemon=True).start()

        public = Bind(self.backing / PUBLIC, Path("/volume", PUBLIC), read_only=False)
        self.server_pid = spawn(Sandbox(binds=(public,), own_network=True, uid=65534), body)
        server.close()


def test_through_a_mount_it_is_the_write_that_fails(world: World, in_namespace: InNamespace) -> None:
    limited = LimitedWorld(world.backing, world.device, world.host, world.listener, world.locks)

    def body() -> None:
        prepare(limited.backing)
        limited.start_server()
        limited.mount_host()
        public = limited.host / PUBLIC
        told = os.statvfs(public)
        assert told.f_blocks * told.f_frsize == LIMIT
        descriptor = os.open(public / "f", os.O_WRONLY | os.O_CREAT)
        written = 0
        os.close(descriptor)  # new: its writes are gathered, and what is lost is told later
        descriptor = os.open(public / "f", os.O_WRONLY)
        with pytest.raises(OSError) as caught:
            while written <= LIMIT:
                written += os.write(descriptor, bytes(100_000))
        assert caught.value.errno == errno.ENOSPC
        os.close(descriptor)  # which says nothing
        assert (limited.backing / PUBLIC / "f").stat().st_size == written > LIMIT - 2 * 100_000
        told = os.statvfs(public)
        assert told.f_bavail * told.f_frsize < 2 * 100_000

        def is_empty() -> bool:  # once the kernel has released and forgotten the removed file
            told = os.statvfs(public)
            return told.f_bavail * told.f_frsize > LIMIT - 100_000

        (public / "f").unlink()
        eventually(is_empty, "the space of a removed file is free")
        (public / "g").write_bytes(bytes(LIMIT // 2))
        (public / "g").unlink()
        eventually(is_empty, "the space of a removed file is free")

    in_namespace(body)


def test_files_stored_together_stay_within_the_quota(limited: Limited, backing: Path) -> None:
    tree = RemoteFs(limited.dial, timeout=SOON)
    folder = tree.walk(ROOT, [PUBLIC.encode()]).node
    files = [SmallFile(b"%02d" % number, bytes(60 * KIB), 0o644, 0, 0) for number in range(8)]
    batches = [[replace(file, name=b"%d-%s" % (batch, file.name)) for file in files] for batch in range(6)]
    errors = [error for batch in batches for error in tree.bulk.store(folder, batch)]
    assert set(errors) == {0, errno.ENOSPC}
    names = list((backing / PUBLIC).iterdir())
    assert len(names) == errors.count(0) and {path.stat().st_size for path in names} == {60 * KIB}
    assert used(limited) <= LIMIT
    tree.close()


def hoarded(limited: Limited, host: RequestHandlers, name: bytes) -> int:
    """The number of a new file of 512 KiB that is removed, closed and not forgotten."""
    public = host.do(p.Walk(ROOT, (b"public",)), b"")[0].node
    opened: Any = host.do(p.Create(public, name, os.O_RDWR, 0o644, None), b"")[0]
    try:
        host.do(p.Write(opened.handle, 0), bytes(512 * KIB))
    finally:
        host.do(p.Unlink(public, name), b"")
        host.do(p.Release(opened.handle), b"")
    return int(opened.found.node)


def test_nobody_hoards_more_than_the_quota(limited: Limited, backing: Path) -> None:
    host = RequestHandlers(SharedDescriptors(limited.tree), limited.sessions.delegations, b"h" * 16)
    nodes = []
    with pytest.raises(OSError, match="No space"):
        for number in range(5):
            nodes.append(hoarded(limited, host, b"%d" % number))
    assert len(nodes) == 3 and used(limited) > 3 * 512 * KIB
    host.do(p.Forget((nodes.pop(),)), b"")
    hoarded(limited, host, b"f")
    host.close()
    assert agrees(limited, backing)


def test_nobody_hoards_more_than_the_quota_by_locks(limited: Limited, backing: Path) -> None:
    """What was removed and forgotten is on the flash as long as it is locked."""
    host = RequestHandlers(SharedDescriptors(limited.tree), limited.sessions.delegations, b"h" * 16)
    epoch: Any = host.do(r.GetLockEpoch(0), b"")[0]
    with pytest.raises(OSError, match="No space"):
        for number in range(1, 6):
            node = hoarded(limited, host, b"%d" % number)
            host.do(r.SetLock(node, epoch.epoch, number, True, number, Mode.WRITE), b"")
            host.do(p.Forget((node,)), b"")
    host.close()
    assert agrees(limited, backing)


def test_who_behaves_gets_the_room_of_what_he_removed(limited: Limited, backing: Path) -> None:
    """Also of what he does not use but has not told that he forgot, as of files that the device removed."""
    tree = RemoteFs(limited.dial, timeout=SOON)
    volume = PathAdapter(tree)
    for remove in (volume.unlink, lambda path: (backing / path).unlink()):
        for _ in range(5):
            volume.release(filled(volume, "public/f", MIB))
            remove("public/f")
    tree.close()
    limited.join()
    assert agrees(limited, backing)

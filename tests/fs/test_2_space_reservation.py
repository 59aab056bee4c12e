# SPDX-License-Identifier: Apache-2.0
"""Other clients fill the flash, or the quota, during asynchronous creates: each is flushed, or refused."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.fs.client import async_create as edge
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto.async_create import MAX_BATCH
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store import space_reservation as room
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import prepare
from millpond.fs.store.quota_fs import QuotaFs
from millpond.fs.store.space_reservation import MAX_NAMES, SpaceReservation
from millpond.fs.store.usage import public_usage
from millpond.fs.vfs.inode_api import ROOT, Node
from millpond.fs.vfs.path_api import Handle
from millpond.linux import syscalls

from .caching_client import Client, shared
from .support import Server, errno_of

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 80 * MIB
FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL
PIECES = room._BLOCKS // room._PIECE


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told by the clock."""
    monkeypatch.setattr(edge, "_TICK_SECONDS", 1000.0)


class Flash:
    """Takes names as long as there is room for them, which ``rivals`` take first, a piece each."""

    def __init__(self, top: Path) -> None:
        self.directory = os.open(top, os.O_PATH | os.O_DIRECTORY)
        self.reserve, self.full, self.rivals, self.made = SpaceReservation(), False, 0, 0

    def name(self) -> None:
        if self.full:
            if self.reserve._left == self.seen or self.rivals:
                self.rivals -= self.reserve._left != self.seen
                self.seen = self.reserve._left
                raise OSError(errno.ENOSPC, "the flash is full")
            self.seen = self.reserve._left
        self.made += 1

    def fill(self) -> None:
        self.full, self.seen = True, self.reserve._left

    @property
    def put_by(self) -> int:
        """Bytes."""
        return os.fstat(self.reserve._file).st_blocks * 512 if self.reserve._file >= 0 else 0


@pytest.fixture
def flash(tmp_path: Path) -> Iterator[Flash]:
    made = Flash(tmp_path)
    yield made
    os.close(made.directory)


def test_room_is_put_by_as_long_as_names_may_be_made(flash: Flash) -> None:
    assert flash.put_by == 0
    assert flash.reserve.hold(flash.directory, 3) == 3
    whole = room._BLOCKS * os.fstatvfs(flash.directory).f_frsize
    assert whole <= flash.put_by <= whole + MIB
    flash.reserve.release(2)
    assert flash.put_by
    flash.reserve.release(1)
    assert flash.put_by == 0


def test_no_more_names_than_there_is_room_for(flash: Flash) -> None:
    assert flash.reserve.hold(flash.directory, MAX_NAMES - 1) == MAX_NAMES - 1
    assert [flash.reserve.hold(flash.directory, 9) for _ in range(2)] == [1, 0]
    flash.reserve.release(MAX_NAMES)


def test_a_name_takes_what_is_put_by_whoever_else_wants_it(flash: Flash) -> None:
    flash.reserve.hold(flash.directory, 2)
    before = flash.put_by
    flash.fill()
    flash.rivals = PIECES - 2
    flash.reserve.use(flash.name)
    assert flash.made == 1 and 0 < flash.put_by < before / 8
    flash.rivals = 1
    assert errno_of(flash.reserve.use, flash.name) == errno.ENOSPC  # now there is nothing left
    flash.reserve.release(2)


def test_what_was_taken_is_put_by_again_before_more_is_promised(
    flash: Flash, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash.reserve.hold(flash.directory, 1)
    whole = flash.put_by
    flash.fill()
    flash.reserve.use(flash.name)
    assert 0 < flash.put_by < whole

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the flash is full")

    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "allocate", full)
        before = flash.put_by
        assert errno_of(flash.reserve.hold, flash.directory, 1) == errno.ENOSPC
        assert flash.put_by == before  # which is for what was promised
    assert flash.reserve.hold(flash.directory, 1) == 1 and flash.put_by == whole
    flash.reserve.release(2)


def test_what_is_wrong_but_for_room_is_said(flash: Flash) -> None:
    def there() -> None:
        raise FileExistsError(errno.EEXIST, "there is one")

    flash.reserve.hold(flash.directory, 1)
    before = flash.put_by
    assert errno_of(flash.reserve.use, there) == errno.EEXIST and flash.put_by == before
    flash.reserve.release(1)
    other = os.open("/proc", os.O_PATH)
    assert errno_of(flash.reserve.hold, other, 1)
    flash.reserve.hold(flash.directory, 1)
    assert errno_of(flash.reserve.hold, other, 1) == errno.EXDEV
    os.close(other)
    flash.reserve.release(1)


def test_nothing_is_put_by_where_no_name_can_be_promised(
    flash: Flash, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on overlayfs, whose files may seem to lie elsewhere than their directories."""
    elsewhere = os.open("/dev/shm", os.O_PATH | os.O_DIRECTORY)
    if os.fstat(elsewhere).st_dev == os.fstat(flash.directory).st_dev:
        pytest.skip("there is one file system only")
    nameless = room.open_unnamed
    monkeypatch.setattr(room, "open_unnamed", lambda _directory: nameless(elsewhere))
    assert errno_of(flash.reserve.hold, flash.directory, 3) == errno.EXDEV
    assert flash.put_by == 0
    os.close(elsewhere)


def run(*argv: str | Path) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A small flash of its own, all of which anybody may take."""
    if os.geteuid() or not Path("/dev/loop-control").exists() or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root, loop devices and mkfs.ext4")
    image, at = tmp_path / "image", tmp_path / "flash"
    image.touch()
    os.truncate(image, 160 * MIB)
    at.mkdir()
    run("mkfs.ext4", "-q", "-m", "0", "-F", image)
    try:
        device = run("losetup", "--find", "--show", image)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device: {error.stderr.strip()}")
    try:
        run("mount", device, at)
        with contextlib.suppress(OSError):
            Path(f"/sys/fs/ext4/{Path(device).name}/reserved_clusters").write_text("0")
        yield at
    finally:
        subprocess.run(["umount", "--lazy", at], check=False)
        run("losetup", "--detach", device)


def fill(directory: Path) -> None:
    """To the last block."""
    os.sync()
    with (directory / "filler").open("wb") as file:
        at, size = 0, 64 * MIB
        while size >= KIB:
            if errno_of(syscalls.allocate, file.fileno(), 0, at, size):
                size //= 2
            else:
                at += size


def long_name(number: int) -> bytes:
    return b"%04d" % number + b"x" * 200


def test_held_names_fit_into_a_flash_that_is_full(ext4: Path) -> None:
    (ext4 / "d").mkdir()
    root = os.open(ext4, os.O_PATH | os.O_DIRECTORY)
    tree = BackingFs(root)
    directory = tree.lookup(ROOT, b"d").node
    assert tree.reserve_names(directory, MAX_NAMES) == MAX_NAMES
    files = [tree.create_unnamed(directory) for _ in range(MAX_NAMES)]
    fill(ext4)
    assert errno_of((ext4 / "new").mkdir) == errno.ENOSPC
    for number, (found, _) in enumerate(files):
        tree.link_unnamed(found.node, directory, long_name(number), 0o640, 5)
    assert room._BLOCKS / 4 < tree.reservation._left < room._BLOCKS
    for _, handle in files:
        tree.release(handle)
    tree.release_names(MAX_NAMES)
    assert len(os.listdir(ext4 / "d")) == MAX_NAMES  # noqa: PTH208
    tree.close()
    os.close(root)


def make(client: Client, name: bytes, parent: Node) -> Handle:
    return client.tree.create(parent, name, FLAGS, 0o640, None)[1]


def stocked(client: Client, name: bytes) -> Node:
    """A directory that the client has exclusively, with as many files prepared as there ever are."""
    directory = client.tree.mkdir(client.public, name, 0o755, None).node
    number = 0
    while (
        not (held := client.tree.async_create.names.held.get(directory))
        or len(held.preallocated) < MAX_BATCH - 1
    ):
        client.tree.release(make(client, b"s%d" % number, directory))
        number += 1
    client.tree.async_create.flush()
    return directory


def test_names_are_told_though_the_device_fills_its_flash_meanwhile(ext4: Path) -> None:
    with shared(ext4, 10.0) as server:
        client = Client(server)
        directories = [stocked(client, b"%d" % number) for number in range(3)]
        fill(ext4)
        for number in range(MAX_BATCH - 1):
            for directory in directories:
                client.tree.release(make(client, long_name(number), directory))
        synced = client.tree.opendir(directories[0])
        client.tree.fsync(synced, False)
        for number in range(3):
            assert len(os.listdir(ext4 / "public" / f"{number}")) > MAX_BATCH  # noqa: PTH208
        more = make(client, b"one more", directories[0])  # there is room for it beside the others
        assert (ext4 / "public/0/one more").exists() and directories[
            0
        ] not in client.tree.async_create.names.held
        client.tree.release(more)
        client.close()
        server.drop()
        (ext4 / "filler").unlink()


class Limited(Server):
    """Whose public part has a quota."""

    def __init__(self, backing: Path) -> None:
        prepare(backing)
        super().__init__(backing, public=b"public")
        self.bounded = QuotaFs(self.root, LIMIT, lambda: public_usage(backing), public=b"public")
        self.tree = self.bounded
        self.sessions = SessionTable(self.tree, DelegationManager())

    @property
    def quota_left(self) -> int:
        return self.bounded.quota.left


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Limited]:
    made = Limited(tmp_path / "flash")
    yield made
    made.drop()
    made.sessions.close()
    left = made.bounded.quota.limit - made.bounded.quota.used
    assert made.quota_left == max(0, left) and made.tree.reservation._file < 0  # nothing stays put by
    os.close(made.root)


def until_full(client: Client, name: bytes) -> None:
    """Take all that is left of the quota."""
    handle = make(client, name, client.public)
    at, size = 0, 16 * MIB
    while size >= 4 * KIB:
        if errno_of(client.tree.allocate, handle, 0, at, size):
            size //= 2
        else:
            at += size
    client.tree.release(handle)


def of_another_host(limited: Limited) -> None:
    client = Client(limited)
    until_full(client, b"filler")
    client.close()


def of_the_device(limited: Limited) -> None:
    """Seen when it is counted."""
    filler = Path(f"/proc/self/fd/{limited.root}/public/filler")
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * LIMIT)
    assert limited.bounded.recount()


@pytest.mark.parametrize("filled", [of_another_host, of_the_device])
def test_names_are_told_though_others_fill_the_quota_meanwhile(
    limited: Limited, filled: Callable[[Limited], None]
) -> None:
    client = Client(limited)
    directory = stocked(client, b"d")
    filled(limited)
    assert limited.quota_left < 4 * KIB
    for number in range(MAX_BATCH - 1):
        client.tree.release(make(client, long_name(number), directory))
    client.tree.fsync(client.tree.opendir(directory), False)
    assert errno_of(make, client, b"one more", directory) == errno.ENOSPC
    client.close()


def test_the_first_write_to_a_file_is_refused_itself(limited: Limited) -> None:
    client = Client(limited)
    directory = stocked(client, b"d")
    until_full(client, b"filler")
    handle = make(client, b"f", directory)
    assert errno_of(client.tree.write, handle, b"data", 0) == errno.ENOSPC
    client.tree.fsync(handle, False)
    client.tree.release(handle)
    assert Path(f"/proc/self/fd/{limited.root}/public/d/f").stat().st_size == 0
    client.close()


def test_others_see_the_room_without_what_is_put_by(limited: Limited) -> None:
    client = Client(limited)
    before = limited.quota_left
    directory = stocked(client, b"d")
    held = len(client.tree.async_create.names.held[directory].preallocated)
    taken = limited.bounded.quota.limit - limited.bounded.quota.used - limited.quota_left
    assert taken == held * (1 + room.CONTENT_BLOCKS) * limited.bounded.statfs().fragment_size
    client.tree.async_create.end_if_flushed(client.tree.rpc.inodes.file(directory))
    client.tree.statfs()
    assert before - limited.quota_left < MIB and limited.bounded.quota._held == 0
    client.close()

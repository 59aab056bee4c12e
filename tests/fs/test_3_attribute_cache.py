# SPDX-License-Identifier: Apache-2.0
"""Attributes of private files that the device's kernel caches are always those on the flash."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.server import mount_and_serve
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import prepare
from millpond.fs.vfs.inode_api import ROOT, SetAttr

from ..effort import scaled
from .conftest import InNamespace, World, served
from .support import below, errno_of

OnDevice = Callable[[Callable[[Path, Path], None]], None]
KEPT = 60.0  # so long that what is wrong stays so
TICK = 0.02  # longer than the steps in which a file system's clock goes


@pytest.fixture
def on_device(world: World, in_namespace: InNamespace) -> OnDevice:
    """Run a function on the private part of a device's mount that keeps for long, and on the same on the
    flash.
    """

    def run(body: Callable[[Path, Path], None]) -> None:
        def inside() -> None:
            prepare(world.backing)
            mount(world)
            body(world.device / "private", world.backing / "private")

        in_namespace(inside)

    return run


def mount(world: World, complaint: str = "") -> None:
    """By a process of its own: this one holds its interpreter's lock while it looks at a file."""

    def serve(ready: Callable[[], None]) -> None:
        def mounted(kernel: FuseDevice) -> None:
            kernel.passthrough_refusal = kernel.passthrough_refusal or complaint
            ready()

        root = os.open(world.backing, os.O_PATH)
        tree = BackingFs(root, public=b"public", cache_seconds=KEPT)
        tree.max_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        mount_and_serve(tree, world.device, name="csd0", backing=root, on_ready=mounted)

    world.device_pid = served(serve)


@pytest.fixture
def keeping(top: Path) -> Iterator[BackingFs]:
    (top / "public").mkdir()
    root = os.open(top, os.O_PATH | os.O_DIRECTORY)
    made = BackingFs(root, public=b"public", cache_seconds=KEPT)
    yield made
    made.close()
    os.close(root)


def test_what_is_private_may_be_kept(keeping: BackingFs) -> None:
    found, handle = keeping.create(ROOT, b"f", os.O_WRONLY, 0o644, None)
    assert (found.seconds, found.name_seconds) == (KEPT, KEPT)
    keeping.release(handle)
    assert keeping.getattr(ROOT).seconds == keeping.getattr(found.node).seconds == KEPT
    assert keeping.setattr(found.node, SetAttr(mode=0o600)).seconds == KEPT
    made = keeping.mkdir(ROOT, b"d", 0o755, None)
    assert (made.seconds, made.name_seconds) == (KEPT, KEPT)


def test_names_at_the_top_may_not_when_descriptors_run_short(keeping: BackingFs) -> None:
    keeping.mkdir(ROOT, b"private", 0o755, None)
    assert keeping.lookup(ROOT, b"private").name_seconds == KEPT
    keeping.max_descriptors = 10_000
    found = keeping.lookup(ROOT, b"private")
    assert (found.seconds, found.name_seconds) == (KEPT, 0)
    assert keeping.mkdir(found.node, b"d", 0o755, None).name_seconds == KEPT


def test_what_is_public_may_not(keeping: BackingFs) -> None:
    public = keeping.lookup(ROOT, b"public")
    made = keeping.mkdir(public.node, b"d", 0o755, None)
    file, handle = keeping.create(made.node, b"f", os.O_WRONLY, 0o644, None)
    keeping.release(handle)
    for found in (public, made, file, keeping.walk(ROOT, (b"public", b"d", b"f"))):
        assert (found.seconds, found.name_seconds) == (0, 0)
        assert keeping.getattr(found.node).seconds == 0


def test_of_what_may_be_mapped_only_the_name_may(keeping: BackingFs) -> None:
    found, handle = keeping.create(ROOT, b"made", os.O_RDWR, 0o644, None)
    assert (found.seconds, found.name_seconds) == (0, KEPT)
    keeping.release(handle)
    assert keeping.getattr(found.node).seconds == 0  # a map outlives what it was made of
    keeping.forget(found.node, 1)
    again = keeping.lookup(ROOT, b"made")
    assert again.seconds == KEPT  # who had mapped it is gone, or the kernel had not forgotten it
    keeping.release(keeping.open(again.node, os.O_RDONLY))
    assert keeping.getattr(again.node).seconds == KEPT
    keeping.release(keeping.open(again.node, os.O_RDWR))
    assert keeping.getattr(again.node).seconds == 0


def test_what_is_known_is_not_asked_again(world: World, on_device: OnDevice) -> None:
    def body(top: Path, _flash: Path) -> None:
        (top / "d").mkdir()
        (top / "d" / "f").write_bytes(b"12345")
        (top / "d" / "f").stat()
        here, sizes = os.open(top, os.O_PATH), list[int]()
        os.kill(world.device_pid, signal.SIGSTOP)
        try:
            asking = threading.Thread(target=lambda: sizes.append(os.stat("d/f", dir_fd=here).st_size))
            asking.start()
            asking.join(30)
            answered = not asking.is_alive()
        finally:
            os.kill(world.device_pid, signal.SIGCONT)
        asking.join()
        os.close(here)
        assert answered and sizes == [5]

    on_device(body)


def test_who_has_no_descriptors_left_recovers_at_once(world: World, in_namespace: InNamespace) -> None:
    def body() -> None:
        prepare(world.backing)
        top, flash = world.device / "private", world.backing / "private"
        (flash / "d").mkdir()
        few = max(map(int, os.listdir("/proc/self/fd"))) + 100  # noqa: PTH208
        for number in range(2 * few):
            (flash / "d" / str(number)).touch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
        mount(world)
        failed = sum(errno_of(os.stat, top / "d" / str(number)) is not None for number in range(2 * few))
        assert failed < few / 10
        assert errno_of(os.mkdir, top / "new") is None
        assert len(list((top / "d").iterdir())) == 2 * few

    in_namespace(body)


def described(file: Path) -> str:
    """Links and time of change; stat(1) asks the kernel for nothing else, of which it might know less."""
    return subprocess.check_output(["stat", "-c", "%h %.9Y", file], text=True)


def test_what_is_stored_to_a_map_changes_the_times(on_device: OnDevice) -> None:
    def body(top: Path, flash: Path) -> None:
        (top / "f").write_bytes(bytes(8192))
        before = described(top / "f")
        with (top / "f").open("r+b") as file:
            try:
                view = mmap.mmap(file.fileno(), 8192)
            except OSError:
                pytest.skip("without passthrough there are no shared maps")
        with view:
            assert described(top / "f") == before
            for number in range(3):
                time.sleep(TICK)
                view[0:4] = b"data"
                view.flush()
                assert described(top / "f") == described(flash / "f")
                assert number or described(top / "f") > before  # some file systems notice the first alone

    on_device(body)


def test_directories_have_the_links_and_times_of_the_flash(on_device: OnDevice) -> None:
    def body(top: Path, flash: Path) -> None:
        (top / "d").mkdir()
        for change in (
            lambda: (top / "d" / "e").mkdir(),
            lambda: (top / "d" / "f").touch(),
            lambda: (top / "d" / "f").rename(top / "d" / "g"),
            lambda: os.link(top / "d" / "g", top / "d" / "h"),
            lambda: (top / "d" / "g").unlink(),
            lambda: (top / "d" / "e").rename(top / "e"),
            lambda: (top / "e").rmdir(),
        ):
            assert described(top / "d") == described(flash / "d")
            time.sleep(TICK)
            change()
            for name in (".", "d"):  # looked at, not listed: to list it is to ask for all of it again
                assert described(top / name) == described(flash / name)

    on_device(body)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
@pytest.mark.parametrize("complaint", ["", "it shall not"])
def test_who_writes_to_a_program_takes_its_set_id_bits(
    world: World, in_namespace: InNamespace, complaint: str, flags: int
) -> None:
    def body() -> None:
        prepare(world.backing)
        mount(world, complaint)
        file = world.device / "private" / "f"
        file.touch()
        file.chmod(0o6777)
        written = os.open(file, flags)
        pid = os.fork()
        if pid == 0:
            os.setgid(2345)
            os.setuid(1234)
            os._exit(os.pwrite(written, b"x", 0))
        assert os.waitpid(pid, 0)[1] == 1 << 8
        assert subprocess.check_output(["stat", "-c", "%a", file], text=True) == "777\n"
        assert stat.S_IMODE(file.stat().st_mode) == 0o777

    in_namespace(body)


class Histories:
    """Random changes of a few files, some of them open, mapped, or under several names."""

    def __init__(self, top: Path, seed: int) -> None:
        self.top, self.random = top, random.Random(seed)
        self.files: list[int] = []
        self.maps: list[mmap.mmap] = []

    def name(self) -> Path:
        return self.top / self.random.choice(("a", "b", "c", "d/a", "d/b", "e/a"))

    def step(self) -> None:
        files = (self.open, self.open, self.write, self.write, self.read, self.map, self.store, self.close)
        names = (self.truncate, self.link, self.unlink, self.rename, self.chmod, self.times, self.directory)
        do = self.random.choice((*files, *names))
        with contextlib.suppress(OSError, ValueError):  # of what is not there, is there already, or too short
            do()

    def open(self) -> None:
        how = self.random.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_APPEND))
        also = self.random.choice((0, os.O_CREAT, os.O_CREAT, os.O_TRUNC, os.O_CREAT | os.O_EXCL))
        self.files.append(os.open(self.name(), how | also, 0o644))

    def file(self) -> int:
        return self.random.choice(self.files or [-1])

    def write(self) -> None:
        os.pwrite(self.file(), bytes(self.random.randrange(1, 9000)), self.random.randrange(20000))

    def read(self) -> None:
        self.name().read_bytes()

    def truncate(self) -> None:
        os.truncate(self.random.choice((self.file(), self.name())), self.random.randrange(20000))

    def link(self) -> None:
        os.link(self.name(), self.name())

    def unlink(self) -> None:
        self.name().unlink()

    def rename(self) -> None:
        self.name().rename(self.name())

    def chmod(self) -> None:
        self.name().chmod(self.random.choice((0o600, 0o644, 0o4755)))

    def times(self) -> None:
        os.utime(self.name(), ns=(self.random.randrange(10**18), self.random.randrange(10**18)))

    def map(self) -> None:
        self.maps.append(mmap.mmap(self.file(), 4096))

    def store(self) -> None:
        for view in self.maps[-1:]:
            if view.size():  # of the file, by now
                view[0:4] = b"data"
                view.flush()

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self.files.clear()
        if self.random.random() < 0.5:
            self.maps.clear()

    def directory(self) -> None:
        path = self.top / self.random.choice("de")
        path.mkdir() if self.random.random() < 0.8 else path.rmdir()


def seen(top: Path) -> dict[str, tuple[int, ...]]:
    """All but when it was last read, for to look for a name is to read a directory, and the space it takes,
    for which the flash has its own time.
    """
    found = {}
    for path in [top, *below(top)]:
        s = path.lstat()
        times = s.st_mtime_ns, s.st_ctime_ns
        found[str(path.relative_to(top))] = s.st_mode, s.st_nlink, s.st_size, *times
    return found


@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_the_flash_has(on_device: OnDevice, seed: int) -> None:
    def body(top: Path, flash: Path) -> None:
        histories = Histories(top, seed)
        for number in range(scaled(quick=200, full=400)):
            histories.step()
            assert seen(top) == seen(flash), number
        histories.close()

    on_device(body)

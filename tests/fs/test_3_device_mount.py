# SPDX-License-Identifier: Apache-2.0
"""The device's mount of the public part shows what is on the flash."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.server import mount_and_serve
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import prepare

from ..effort import scaled
from ..waiting import eventually
from .conftest import InNamespace, World, served
from .support import below, errno_of

OnDevice = Callable[[Callable[[Path, Path], None]], None]


@pytest.fixture
def on_device(world: World, in_namespace: InNamespace) -> OnDevice:
    """Run a function on the public part of a device's mount, and on the same on the flash."""

    def run(body: Callable[[Path, Path], None]) -> None:
        def inside() -> None:
            prepare(world.backing)
            mount(world)
            body(world.device, world.backing / "public")

        in_namespace(inside)

    return run


def mount(world: World, complaint: str = "") -> None:
    """By a process of its own: this one holds its interpreter's lock while it looks at a file."""

    def serve(ready: Callable[[], None]) -> None:
        def mounted(kernel: FuseDevice) -> None:
            kernel.passthrough_refusal = kernel.passthrough_refusal or complaint
            ready()

        root = os.open(world.backing / "public", os.O_PATH)
        tree = BackingFs(root)
        tree.last_descriptor = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 8
        mount_and_serve(tree, world.device, name="csd0", backing=root, on_ready=mounted)

    world.device_pid = served(serve)


def test_a_mount_without_descriptors_recovers(world: World, in_namespace: InNamespace) -> None:
    def body() -> None:
        prepare(world.backing)
        top, flash = world.device, world.backing / "public"
        (flash / "d").mkdir()
        few = max(map(int, os.listdir("/proc/self/fd"))) + 100  # noqa: PTH208
        for number in range(2 * few):
            (flash / "d" / str(number)).touch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
        mount(world)
        failed = sum(errno_of(os.stat, top / "d" / str(number)) is not None for number in range(2 * few))
        assert failed < few / 10
        assert errno_of(os.mkdir, top / "new") is None
        # The kernel forgets names when it gets to it: a moment later there are descriptors for all else, too.
        eventually(lambda: errno_of(os.listdir, top / "d") is None, "a descriptor for the directory")
        assert len(list((top / "d").iterdir())) == 2 * few
        # The last descriptor is enough to look a name up, but not to read a directory.
        for number in range(2 * few):
            errno_of(os.stat, top / "d" / str(number))
            if few - len(os.listdir(f"/proc/{world.device_pid}/fd")) == 1:  # noqa: PTH208
                break
        eventually(lambda: errno_of(os.listdir, top / "d") is None, "a descriptor for it")

    in_namespace(body)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
@pytest.mark.parametrize("complaint", ["", "it shall not"])
def test_who_writes_to_a_program_takes_its_set_id_bits(
    world: World, in_namespace: InNamespace, complaint: str, flags: int
) -> None:
    def body() -> None:
        prepare(world.backing)
        mount(world, complaint)
        file = world.device / "f"
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

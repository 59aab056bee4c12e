# SPDX-License-Identifier: Apache-2.0
"""The device's mount without libfuse: the features that fuse-python lacks."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.server import mount_and_serve, passthrough_refusal
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import prepare
from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import enter_user_namespace
from millpond.linux.syscalls import CLONE_NEWNS

from ..effort import scaled
from ..waiting import eventually
from .conftest import InNamespace, in_own_mounts, within
from .support import as_user, errno_of
from .test_3_mounts import is_mounted
from .world import World, served


@pytest.fixture
def only_device(world: World, in_namespace: InNamespace) -> InNamespace:
    """Run a function where the device's mount alone is."""

    def run(body: Callable[[], None]) -> None:
        def inside() -> None:
            prepare(world.backing)
            world.binding = "raw"
            world.mount_device()
            body()

        in_namespace(inside)

    return run


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    """Have a test run where the device's mount alone is."""
    return within("only_device", test)


@pytest.fixture
def passing_through(world: World, in_namespace: InNamespace, tmp_path: Path) -> None:
    """Only where the kernel reads and writes files itself."""
    found = tmp_path / "found"

    def ask() -> None:
        world.backing.mkdir()
        found.write_text(passthrough_refusal(world.device, os.open(world.backing, os.O_PATH)))

    in_namespace(ask)
    if complaint := found.read_text():
        pytest.skip(complaint)


@on_device
def test_data_does_not_pass_the_daemon(passing_through: None, world: World) -> None:
    top = world.device / "public"
    assert "by the kernel itself" in world.how
    with (top / "f").open("w+b", buffering=0) as file:
        file.write(bytes(100))
        os.kill(world.device_pid, signal.SIGSTOP)
        try:
            data = os.urandom(5_000_000)
            written = os.pwrite(file.fileno(), data, 0)
            found = os.pread(file.fileno(), len(data), 0)
        finally:
            os.kill(world.device_pid, signal.SIGCONT)
        assert written == len(data) and found == data
    assert (world.backing / "public" / "f").read_bytes() == data


@on_device
def test_a_device_in_the_volume_is_of_no_use(world: World) -> None:
    top = world.device / "public"
    os.mknod(top / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    assert (top / "null").stat().st_rdev == os.makedev(1, 3)
    assert errno_of(os.open, top / "null", os.O_RDONLY) == errno.EACCES


@on_device
def test_the_daemon_keeps_no_files_of_nobodys_interest(world: World) -> None:
    top = world.device / "public"

    def held() -> int:
        return len(os.listdir(f"/proc/{world.device_pid}/fd"))  # noqa: PTH208

    top.stat()
    before = held()
    for number in range(200):
        (top / str(number)).write_bytes(b"x")
    assert held() >= before + 200
    for number in range(200):
        (top / str(number)).unlink()
    eventually(lambda: held() <= before, "the daemon has closed the files")
    assert held() == before


@in_own_mounts
def test_without_passthrough_data_passes_the_daemon(world: World) -> None:
    """As root of a user namespace, who may mount, but not hand files to the kernel."""
    prepare(world.backing)
    enter_user_namespace(0, CLONE_NEWNS)
    complaint = passthrough_refusal(world.device, os.open(world.backing, os.O_PATH))
    assert "refuses" in complaint or "cannot" in complaint
    world.binding = "raw"
    world.mount_device()
    assert "by this process" in world.how
    data = os.urandom(3_000_001)
    (world.device / "public" / "f").write_bytes(data)
    assert (world.device / "public" / "f").read_bytes() == data
    with (
        (world.device / "public" / "f").open("ab", buffering=0) as here,
        (world.backing / "public" / "f").open("ab", buffering=0) as there,
    ):
        for number in range(3):
            here.write(b"h%d" % number)
            there.write(b"t%d" % number)
    assert (world.backing / "public" / "f").read_bytes() == data + b"h0t0h1t1h2t2"


@in_own_mounts
def test_a_flash_that_is_an_overlay(passing_through: None, world: World) -> None:
    parts = [world.backing.parent / name for name in ("lower", "upper", "work")]
    for path in (*parts, world.backing):
        path.mkdir(exist_ok=True)
    options = "lowerdir={},upperdir={},workdir={}".format(*parts)
    try:
        syscalls.mount("overlay", world.backing, "overlay", 0, options)
    except OSError:
        pytest.skip("below it lies a file system that can carry no overlay")
    prepare(world.backing)
    world.binding = "raw"
    world.mount_device()
    with (world.device / "public" / "f").open("w+b") as file:
        file.write(b"through")
        file.flush()
        if "by the kernel itself" in world.how:
            with mmap.mmap(file.fileno(), 0) as view:
                assert view[:7] == b"through"


@in_own_mounts
def test_a_write_to_a_program_through_the_daemon_clears_its_set_id_bits(world: World) -> None:
    def serve(ready: Callable[[], None]) -> None:
        def mounted(kernel: FuseDevice) -> None:
            kernel.passthrough_refusal = "it shall not"
            ready()

        root = os.open(world.backing / "public", os.O_PATH)
        mount_and_serve(BackingFs(root), world.device, name="csd0", backing=root, on_ready=mounted)

    prepare(world.backing)
    served(serve)
    file = world.device / "f"
    file.touch()
    file.chmod(0o6777)
    written = os.open(file, os.O_RDWR)
    as_user(1234, 2345, lambda: os.pwrite(written, b"x", 0))
    assert file.read_bytes() == b"x" and stat.S_IMODE(file.stat().st_mode) == 0o777


@in_own_mounts
def test_only_its_own_mount_is_taken_away(world: World) -> None:
    prepare(world.backing)
    syscalls.mount("tmpfs", world.device, "tmpfs", 0, "")
    world.binding = "raw"
    world.mount_device()
    syscalls.unmount(world.device)
    assert os.waitpid(world.device_pid, 0)[1] == 0
    assert is_mounted(world.device)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@in_own_mounts
def test_two_signals_at_once_end_it_clean(world: World, first: signal.Signals) -> None:
    prepare(world.backing)
    world.binding = "raw"
    for _ in range(scaled(quick=2, full=5)):
        world.mount_device(as_command=True)
        os.kill(world.device_pid, first)
        os.kill(world.device_pid, signal.SIGTERM)
        assert os.waitpid(world.device_pid, 0)[1] == 0
        assert list(world.device.iterdir()) == []


def test_what_cannot_be_mounted_says_why(fuse_usable: None, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot mount: No such file"):
        FuseDevice(tmp_path / "none", "csd0", -1)
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="empty directory"):
        passthrough_refusal(tmp_path, -1)


@in_own_mounts
def test_more_files_are_walked_over_than_there_are_descriptors(world: World) -> None:
    """Before: each time that the descriptors had run out, one look at a file failed with EMFILE."""
    prepare(world.backing)
    world.start_server()
    flash, few = world.backing / "public" / "d", max(map(int, os.listdir("/proc/self/fd"))) + 140  # noqa: PTH208
    flash.mkdir()
    for number in range(5 * few):
        (flash / str(number)).touch()
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
    world.mount_device()
    if "kernel itself" not in world.how:
        pytest.skip("a mount without passthrough holds no descriptors of files that are not open")
    top = world.device / "public" / "d"
    assert [errno_of(os.stat, top / str(number)) for number in range(5 * few)] == [None] * (5 * few)

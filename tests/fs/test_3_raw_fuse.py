# SPDX-License-Identifier: Apache-2.0
"""The device's mount without libfuse: the features that fuse-python lacks."""

from __future__ import annotations

import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.server import passthrough_refusal
from millpond.fs.store.layout import prepare
from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import enter_user_namespace
from millpond.linux.syscalls import CLONE_NEWNS

from ..effort import scaled
from ..waiting import eventually
from .conftest import InNamespace, World

OnDevice = Callable[[Callable[[Path], None]], None]


@pytest.fixture
def on_device(world: World, in_namespace: InNamespace) -> OnDevice:
    """Run a function on a directory of the device's mount."""

    def run(body: Callable[[Path], None]) -> None:
        def inside() -> None:
            prepare(world.backing)
            world.binding = "raw"
            world.mount_device()
            body(world.device / "public")

        in_namespace(inside)

    return run


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


def test_data_does_not_pass_the_daemon(passing_through: None, world: World, on_device: OnDevice) -> None:
    def body(top: Path) -> None:
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

    on_device(body)


def test_files_that_nobody_may_read(world: World, on_device: OnDevice) -> None:
    def body(top: Path) -> None:
        file = os.open(top / "f", os.O_RDWR | os.O_CREAT, 0)
        os.write(file, b"mine")
        assert os.pread(file, 4, 0) == b"mine"
        os.ftruncate(file, 2)
        assert os.fstat(file).st_size == 2 and stat.S_IMODE(os.fstat(file).st_mode) == 0
        os.close(file)

    on_device(body)


def test_all_types_of_files(world: World, on_device: OnDevice) -> None:
    def body(top: Path) -> None:
        os.mkfifo(top / "fifo", 0o640)
        os.mknod(top / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        assert (top / "null").stat().st_rdev == os.makedev(1, 3)
        assert stat.S_ISFIFO((top / "fifo").stat().st_mode)
        reader = os.open(top / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        with (top / "fifo").open("wb") as writer:
            writer.write(b"through")
        assert os.read(reader, 20) == b"through"
        os.close(reader)
        with pytest.raises(PermissionError):  # the mount knows no devices
            os.open(top / "null", os.O_RDONLY)
        names = {item.name: item.is_file() for item in os.scandir(top)}
        assert names == {"fifo": False, "null": False}

    on_device(body)


def test_the_daemon_keeps_no_files_of_nobodys_interest(world: World, on_device: OnDevice) -> None:
    def body(top: Path) -> None:
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

    on_device(body)


def test_without_passthrough_data_passes_the_daemon(world: World, in_namespace: InNamespace) -> None:
    """As root of a user namespace, who may mount, but not hand files to the kernel."""

    def body() -> None:
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

    in_namespace(body)


def test_a_flash_that_is_an_overlay(passing_through: None, world: World, in_namespace: InNamespace) -> None:
    def body() -> None:
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

    in_namespace(body)


def test_only_its_own_mount_is_taken_away(world: World, in_namespace: InNamespace) -> None:
    def body() -> None:
        prepare(world.backing)
        syscalls.mount("tmpfs", world.device, "tmpfs", 0, "")
        world.binding = "raw"
        world.mount_device()
        syscalls.unmount(world.device)
        assert os.waitpid(world.device_pid, 0)[1] == 0
        assert any(
            line.split()[4] == str(world.device)
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
        )

    in_namespace(body)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_at_once_end_it_clean(
    world: World, in_namespace: InNamespace, first: signal.Signals
) -> None:
    def body() -> None:
        prepare(world.backing)
        world.binding = "raw"
        for _ in range(scaled(quick=2, full=5)):
            world.mount_device(as_command=True)
            os.kill(world.device_pid, first)
            os.kill(world.device_pid, signal.SIGTERM)
            assert os.waitpid(world.device_pid, 0)[1] == 0
            assert list(world.device.iterdir()) == []

    in_namespace(body)


def test_a_mount_ends_when_somebody_unmounts_it(world: World, on_device: OnDevice) -> None:
    def body(top: Path) -> None:
        subprocess.run(["umount", top], check=True)
        assert os.waitpid(world.device_pid, 0)[1] == 0

    on_device(body)


def test_what_cannot_be_mounted_says_why(fuse_usable: None, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot mount: No such file"):
        FuseDevice(tmp_path / "none", "csd0", -1)
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="empty directory"):
        passthrough_refusal(tmp_path, -1)
    command = [sys.executable, "-m", "millpond.fs.mount.device", tmp_path, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)

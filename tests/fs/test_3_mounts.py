# SPDX-License-Identifier: Apache-2.0
"""Real mounts: the device's own, the host's over a connection, and the visibility of each other's changes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.fs.fuse import mounts
from millpond.fs.fuse.libfuse2 import mount_and_serve
from millpond.fs.fuse.mounts import read_ahead, unmount
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import prepare
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.linux import syscalls
from millpond.linux.confinement.userns import has_many_uids

from ..waiting import eventually
from .conftest import InNamespace, WithBoth, in_own_mounts, mounted, stats
from .support import as_user, errno_of
from .test_4_coherence import can_be_mapped
from .world import World


@pytest.fixture(params=["device", "device-fuse-python", "host"])
def kind(request: pytest.FixtureRequest, world: World) -> str:
    """Which mount is tested. The device's is the kernel's best unless a binding is named."""
    name, _, binding = str(request.param).partition("-")
    world.binding = binding or "auto"
    return name


def is_mounted(path: Path) -> bool:
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


@mounted()
def test_a_file_read_in_order_is_asked_for_in_large_parts(world: World) -> None:
    if not os.access("/sys/class/bdi", os.W_OK):
        pytest.skip("root of this namespace alone cannot say how much is read ahead")
    (world.device / "public" / "f").write_bytes(bytes(8 << 20))

    def requests() -> int:
        before = stats(world).asked.get("read", 0)
        with (world.host / "public" / "f").open("rb", buffering=1 << 16) as file:
            while file.read(1 << 16):
                pass
        return stats(world).asked["read"] - before

    # the device's kernel tells after close() that its writer is gone: until then nothing is read ahead
    eventually(lambda: 8 <= requests() <= 16, "a file that is read in large parts")


def test_read_ahead_can_be_set_of_what_is_mounted_alone(tmp_path: Path) -> None:
    assert not read_ahead(tmp_path / "none", 1 << 20)
    assert not read_ahead(Path("/proc"), 1 << 20)  # it has none


def test_errors_of_mounting(fuse_usable: None, tmp_path: Path) -> None:
    volume = PathAdapter(BackingFs(os.open("/", os.O_PATH)))

    def mount(at: Path, name: str = "csd0") -> None:
        mount_and_serve(volume, at, name=name, allow_other=True, on_ready=lambda: None)

    with pytest.raises(LocalError, match="cannot be a mount point: No such file"):
        mount(tmp_path / "missing")
    with pytest.raises(LocalError, match="cannot be the name"):
        mount(tmp_path, "a,suid")
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="empty directory"):
        mount(tmp_path)


@in_own_mounts
def test_the_device_alone(world: World) -> None:
    prepare(world.backing)
    world.mount_device(as_command=True)
    assert sorted(os.listdir(world.device)) == ["private", "public"]  # noqa: PTH208
    (world.device / "private" / "x").write_text("kept here")
    assert (world.backing / "private" / "x").read_text() == "kept here"
    os.kill(world.device_pid, signal.SIGTERM)
    assert os.waitpid(world.device_pid, 0)[1] == 0
    assert not is_mounted(world.device)


@in_own_mounts
def test_the_device_mount_ends_with_its_parent(world: World) -> None:
    prepare(world.backing)
    pid = os.fork()
    if pid == 0:
        world.mount_device(as_command=True)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    eventually(lambda: not is_mounted(world.device), "the mount is gone")


def test_a_command_says_what_is_wrong(fuse_usable: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millpond.fs.mount.device", tmp_path / "none", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "none: cannot be a volume" in done.stderr


@mounted()
def test_programs_and_private_maps_on_a_mount(world: World, kind: str) -> None:
    top = getattr(world, kind) / "public"
    (top / "true").write_bytes(Path("/bin/true").read_bytes())
    (top / "true").chmod(0o755)
    assert subprocess.run([top / "true"], check=False).returncode == 0
    with (top / "true").open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as view:
        assert view[:4] == b"\x7fELF"


@mounted()
def test_the_private_part_does_not_exist_on_the_host(world: World) -> None:
    (world.device / "private" / "secret").write_text("private")
    public = world.device / "public"
    (public / "l1").symlink_to("../private/secret")
    (public / "l2").symlink_to("../private")
    (public / "l3").symlink_to(f"{world.device.parent}/host/private/secret")
    assert os.listdir(world.host) == ["public"]  # noqa: PTH208
    for name in (
        "private",
        "private/secret",
        "public/../private",
        "public/../private/secret",
        "public/l1",
        "public/l2/secret",
        "public/l3",
        "PRIVATE",
        "./private/",
    ):
        path = f"{world.host}/{name}"
        found = {errno_of(call, path) for call in (os.stat, os.listdir, open)}
        assert found == {errno.ENOENT}, name
    assert errno_of(os.mkdir, world.host / "private") in (errno.EACCES, errno.EPERM, errno.EROFS)
    assert errno_of(os.rename, world.host / "public", world.host / "private") is not None
    assert errno_of(os.link, public / "l1", world.host / "private") == errno.EXDEV
    assert (public / "l1").read_text() == "private"


@mounted(size="4m")
def test_a_full_volume_tells_the_writer(world: World, kind: str) -> None:
    file = os.open(getattr(world, kind) / "public" / "big", os.O_WRONLY | os.O_CREAT)
    written = 0
    with pytest.raises(OSError, match="No space") as caught:
        while True:
            written += os.write(file, bytes(1 << 20))
    assert caught.value.errno == errno.ENOSPC
    assert 0 < written <= (4 << 20) + (5 << 20 if kind == "host" else 0)  # what the host gathers
    os.ftruncate(file, 0)
    assert os.write(file, bytes(4096)) == 4096


@pytest.mark.skipif(os.geteuid() != 0 or not has_many_uids(), reason="only real root gives files away")
@mounted()
def test_files_belong_to_who_made_them(world: World) -> None:
    def make() -> None:
        Path("public/mine").touch()
        assert errno_of(Path("private/x").touch) == errno.EACCES

    os.chdir(world.device)  # the way here is closed to others
    as_user(1234, 2345, make)
    found = (world.backing / "public" / "mine").stat()
    assert (found.st_uid, found.st_gid) == (1234, 2345)


@in_own_mounts
def test_a_read_only_mount(world: World) -> None:
    prepare(world.backing)
    world.start_server()
    world.mount_host(read_only=True)
    assert errno_of((world.host / "public" / "x").touch) == errno.EROFS
    os.kill(world.host_pid, signal.SIGTERM)
    assert os.waitpid(world.host_pid, 0)[1] == 0
    assert not is_mounted(world.host)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_mount_is_taken_away(
    world: World, with_both: WithBoth, kind: str, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "_HELPER_SECONDS", 90.0)

    def body() -> None:
        path, pid = getattr(world, kind), getattr(world, f"{kind}_pid")
        os.kill(pid, how)
        if how == signal.SIGKILL:
            os.waitpid(pid, 0)
            assert errno_of(os.stat, path / "public") == errno.ENOTCONN
        start = time.monotonic()
        unmount(path)
        unmount(path)  # nothing there any more
        assert time.monotonic() - start < 60  # it would wait longer for a helper
        assert not is_mounted(path)
        assert list(path.iterdir()) == []

    with_both(body)


def mount_two(public: Path) -> None:
    """Two file systems with a file each, which have one inode number."""
    for name in "ab":
        (public / name).mkdir()
        syscalls.mount("tmpfs", public / name, "tmpfs", 0, "size=1m,mode=777")
        (public / name / "f").write_text(f"the text of {name}")
        (public / name / "f").chmod(0o666)
    one, other = ((public / name / "f").stat() for name in "ab")
    assert one.st_ino == other.st_ino and one.st_dev != other.st_dev


def mapped(path: Path) -> mmap.mmap | None:
    """A mapping of the file on the device; None while a host has it open."""
    with path.open("r+b") as file, contextlib.suppress(OSError):
        return mmap.mmap(file.fileno(), 4)
    return None


@in_own_mounts
def test_two_file_systems_in_the_public_part(world: World) -> None:
    prepare(world.backing)
    mount_two(world.backing / "public")
    world.start_server()
    world.mount_device()
    world.mount_host()
    for here, there in ((world.host, world.device), (world.device, world.host)):
        files = [here / "public" / name / "f" for name in "ab"]
        for name, file in zip("ab", files, strict=True):
            assert file.read_text() == f"the text of {name}"
        assert len({file.stat().st_ino for file in files}) == 2  # as tar and rsync tell files apart
        (there / "public" / "a" / "f").write_text("new")
        assert [file.read_text() for file in files] == ["new", "the text of b"]
        (here / "public" / "a" / "f").write_text("the text of a")
    with contextlib.ExitStack() as stack:
        for number, top in enumerate((world.host, world.device)):
            file = stack.enter_context((top / "public" / "ab"[number] / "f").open("r+b"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    on_host = [world.host / "public" / name / "f" for name in "ab"]
    on_device = [world.device / "public" / name / "f" for name in "ab"]
    maps = [eventually(functools.partial(mapped, file), "no host has it open") for file in on_device]
    maps[1].close()
    eventually(lambda: can_be_mapped(on_host[1]), "the host can map the file that the device has not mapped")
    assert "kernel itself" not in world.how or not can_be_mapped(on_host[0])


def test_a_mount_that_is_gone_ends_once_it_is_not_used(
    tmp_path: Path, in_namespace: InNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other namespaces may have copies of it, from which its server never learns that."""
    monkeypatch.setattr(mounts, "_USED_MILLISECONDS", 10)
    place = tmp_path / "place"
    place.mkdir()

    def body() -> None:
        asked: list[bool] = []
        ended = threading.Event()

        def is_used() -> bool:
            asked.append(is_mounted(place))
            return len(asked) < 3

        syscalls.mount("tmpfs", place, "tmpfs")
        watch = mounts.MountWatch(place, is_used, ended.set)
        syscalls.mount("tmpfs", place, "tmpfs")  # what happens to other mounts is nothing to it
        unmount(place)
        assert not ended.is_set() and not asked
        unmount(place)
        assert ended.wait(10) and asked == [False] * 3
        watch.close()

    in_namespace(body)

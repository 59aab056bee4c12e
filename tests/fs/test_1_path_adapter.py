# SPDX-License-Identifier: Apache-2.0
"""Files by path: a tree through the path adapter, on a plain directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import PRIVATE, PUBLIC, prepare
from millpond.fs.store.usage import private_bytes
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.fs.vfs.path_api import Owner, components
from millpond.linux import syscalls
from millpond.linux.confinement.userns import has_many_uids

from .support import errno_of

BAD_PATHS = ("..", "../x", "a/../b", "a/..", "/", "/etc", "a//b", "a/", ".", "./a", "a/./b", "a\0b", "\0")


@pytest.fixture
def volume(top: Path) -> Iterator[PathAdapter]:
    root = os.open(top, os.O_PATH | os.O_DIRECTORY)
    yield PathAdapter(BackingFs(root, chown_new=os.geteuid() == 0))
    os.close(root)


def put(volume: PathAdapter, path: str, data: bytes = b"", mode: int = 0o644) -> None:
    handle = volume.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    assert volume.write(handle, data, 0) == len(data)
    volume.release(handle)


def get(volume: PathAdapter, path: str) -> bytes:
    handle = volume.open(path, os.O_RDONLY)
    try:
        return volume.read(handle, 1 << 20, 0)
    finally:
        volume.release(handle)


@given(st.text(alphabet="ab./\0"))
def test_components_are_plain_or_refused(path: str) -> None:
    try:
        names = components(path)
    except OSError as error:
        assert error.errno == errno.EINVAL
    else:
        assert "/".join(names) == path
        assert not {"", ".", ".."} & set(names)


def test_layout(tmp_path: Path) -> None:
    backing = tmp_path / "flash" / "backing"
    prepare(backing)
    assert stat.S_IMODE((backing / PUBLIC).stat().st_mode) == 0o777
    assert stat.S_IMODE((backing / PRIVATE).stat().st_mode) == 0o700
    (backing / PUBLIC).chmod(0o755)
    prepare(backing)
    assert stat.S_IMODE((backing / PUBLIC).stat().st_mode) == 0o755
    (backing / PUBLIC / "x").write_bytes(b"1234")
    (backing / PRIVATE / "deep").mkdir()
    (backing / PRIVATE / "deep" / "y").write_bytes(b"123")
    (backing / PRIVATE / "z").hardlink_to(backing / PRIVATE / "deep" / "y")
    (backing / PRIVATE / "link").symlink_to("z")
    assert private_bytes(backing) == 3


@pytest.mark.parametrize("path", BAD_PATHS)
def test_no_path_leads_outside(volume: PathAdapter, path: str) -> None:
    v, flags = volume, os.O_RDWR | os.O_CREAT
    put(v, "a_file")
    calls: tuple[tuple[Callable[..., object], tuple[object, ...]], ...] = (
        (v.getattr, ()),
        (v.readdir, ()),
        (v.readlink, ()),
        (v.mknod, (0o644,)),
        (v.mkdir, (0o755,)),
        (v.unlink, ()),
        (v.rmdir, ()),
        (v.chmod, (0o644,)),
        (v.chown, (0, 0)),
        (v.truncate, (0,)),
        (v.utimens, (0, 0)),
        (v.open, (flags, 0o644)),
        (v.rename, ("new",)),
        (v.link, ("new",)),
    )
    assert {call.__name__: errno_of(call, path, *rest) for call, rest in calls} == {
        call.__name__: errno.EINVAL for call, _ in calls
    }
    for call in (v.rename, v.link, v.symlink):
        assert errno_of(call, "a_file", path) == errno.EINVAL
    assert [entry.name for entry in v.readdir("")] == ["a_file"]


def test_no_symlink_is_followed(volume: PathAdapter, top: Path) -> None:
    volume.symlink("../secret", "out")
    volume.symlink("..", "up")
    volume.symlink("/proc/self/root", "magic")
    volume.mkdir("deep", 0o755)
    volume.symlink("../..", "deep/up")
    assert volume.readlink("out") == "../secret"
    assert errno_of(volume.open, "out", os.O_RDONLY) == errno.ELOOP
    assert errno_of(volume.open, "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) == errno.ELOOP
    assert errno_of(volume.truncate, "out", 0) == errno.ELOOP
    assert errno_of(volume.chmod, "out", 0o777) == errno.EOPNOTSUPP
    volume.utimens("out", 0, 0)
    for path in ("up/secret", "magic/etc/passwd", "deep/up/secret"):
        assert errno_of(volume.getattr, path) in (errno.ELOOP, errno.ENOTDIR)
        assert errno_of(volume.open, path, os.O_RDWR) in (errno.ELOOP, errno.ENOTDIR)
    assert errno_of(volume.unlink, "up/secret") in (errno.ELOOP, errno.ENOTDIR)
    assert (top.parent / "secret").read_text() == "outside"
    assert (top.parent / "secret").stat().st_mtime > 0


def test_only_regular_files_are_opened(volume: PathAdapter, top: Path) -> None:
    for name, kind in (("fifo", stat.S_IFIFO), ("socket", stat.S_IFSOCK)):
        volume.mknod(name, kind | 0o644)
        assert volume.getattr(name).mode == kind | 0o644
    assert errno_of(volume.mknod, "d", stat.S_IFDIR | 0o755) in (errno.EINVAL, errno.EPERM)
    assert errno_of(volume.open, "fifo", os.O_RDONLY) == errno.EPERM
    assert errno_of(volume.open, "fifo", os.O_WRONLY) == errno.EPERM
    volume.mkdir("d", 0o755)
    assert errno_of(volume.open, "d", os.O_RDONLY) == errno.EISDIR
    volume.mknod("x", stat.S_IFREG | 0o600)
    assert volume.getattr("x").mode == stat.S_IFREG | 0o600


@pytest.mark.skipif(os.geteuid() != 0 or not has_many_uids(), reason="only real root gives files away")
def test_owners(volume: PathAdapter) -> None:
    owner = Owner(1234, 2345)
    volume.release(volume.open("f", os.O_CREAT | os.O_WRONLY, 0o4755, owner))
    volume.mkdir("d", 0o2755, owner)
    volume.mkdir("d/e", 0o755, owner)
    volume.chmod("d", 0o2755)
    volume.chown("d", -1, 77)
    volume.mknod("d/n", 0o644, owner)
    volume.symlink("f", "l", owner)
    for name in ("f", "l"):
        assert (volume.getattr(name).uid, volume.getattr(name).gid) == (1234, 2345)
    assert volume.getattr("f").mode & 0o7777 == 0o4755
    assert (volume.getattr("d/n").uid, volume.getattr("d/n").gid) == (1234, 77)  # the directory's group


def test_paths_near_and_beyond_path_max(volume: PathAdapter) -> None:
    name = "n" * 255
    path = ""
    for _ in range(20):  # 5 KiB: longer than any one system call takes
        path = f"{path}/{name}".lstrip("/")
        volume.mkdir(path, 0o755)
    put(volume, path + "/file", b"deep")
    assert get(volume, path + "/file") == b"deep"
    volume.rename(path + "/file", "up")
    assert get(volume, "up") == b"deep"
    assert errno_of(volume.mkdir, "n" * 256, 0o755) == errno.ENAMETOOLONG
    while path:
        volume.rmdir(path)
        path = path.rpartition("/")[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_file_system_says_so(
    tmp_path: Path, in_namespace: Callable[[Callable[[], None]], None]
) -> None:
    def body() -> None:
        syscalls.mount("tmpfs", tmp_path, "tmpfs", 0, "size=256k")
        volume = PathAdapter(BackingFs(os.open(tmp_path, os.O_PATH)))
        assert volume.statfs().blocks * volume.statfs().fragment_size == 256 << 10
        handle = volume.open("big", os.O_CREAT | os.O_WRONLY, 0o644)
        assert volume.write(handle, bytes(1 << 20), 0) == 256 << 10
        assert errno_of(volume.write, handle, b"x" * 4096, 256 << 10) == errno.ENOSPC
        volume.release(handle)
        volume.unlink("big")
        assert volume.statfs().free == volume.statfs().blocks

    in_namespace(body)

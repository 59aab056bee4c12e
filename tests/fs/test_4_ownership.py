# SPDX-License-Identifier: Apache-2.0
"""Whose a host's files are, through the kernel: the user's that mounts, or one's that is named."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from .conftest import mounted
from .support import as_user, errno_of
from .world import World


def owner(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid


@mounted()
def test_the_servers_files_are_the_mounting_users(world: World) -> None:
    host, device = world.host / "public", world.device / "public"
    for make in (Path.touch, Path.mkdir, lambda path: path.symlink_to("f")):
        path = host / f"new{make}"[:8]
        make(path)
        assert owner(path) == (0, 0) and owner(device / path.name)[0] == world.server_uid
        path.unlink() if not path.is_dir() else path.rmdir()
    (host / "f").touch()
    os.chown(host / "f", 0, -1)
    assert errno_of(os.chown, host / "f", 1234, -1) == errno.EPERM
    assert owner(host / "f") == (0, 0) and owner(device / "f")[0] == world.server_uid
    (device / "other").touch()
    os.chown(device / "other", 77, 78)
    assert owner(host / "other") == (77, 78)


@mounted()
def test_listings_show_the_same_owners(world: World) -> None:
    """Also where a listing brings attributes that the kernel caches (READDIRPLUS)."""
    (world.host / "public" / "f").touch()
    (world.device / "public" / "g").touch()
    other = world.host.with_name("other")
    other.mkdir()
    pid = world.mount_host(at=other)
    assert sorted(os.listdir(other / "public")) == ["f", "g"]  # noqa: PTH208
    assert owner(other / "public" / "f") == owner(other / "public" / "g") == (0, 0)
    subprocess.run(["ls", "-lR", other], check=True, stdout=subprocess.DEVNULL)
    assert owner(other / "public" / "f") == (0, 0)
    world.kill(pid)


@pytest.mark.parametrize("binding", ["raw", "fuse-python"])
@mounted()
def test_all_files_are_a_named_users(world: World, binding: str) -> None:
    """The kernel checks permissions by the owner that is shown."""
    other = world.host.with_name("other")
    other.mkdir()
    world.host_binding = binding
    pid = world.mount_host(at=other, uid=1000, gid=1001)
    public = other / "public"
    os.chdir(public)

    def work() -> None:
        Path("mine").write_bytes(b"1")
        Path("mine").chmod(0o600)
        os.chown("mine", 1000, -1)
        assert errno_of(os.chown, "mine", 1234, -1) == errno.EPERM
        Path("mine").read_bytes()

    as_user(1000, 1000, work)
    (world.device / "public" / "devices").touch()
    assert owner(public / "mine") == owner(public / "devices") == (1000, 1001)
    os.chown(public / "mine", 1000, 1001)
    assert errno_of(os.chown, public / "mine", 0, 0) == errno.EPERM
    assert owner(world.device / "public" / "mine")[0] == world.server_uid
    os.chdir("/")
    world.kill(pid)

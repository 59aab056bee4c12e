# SPDX-License-Identifier: Apache-2.0
"""Extended attributes and set-id bits through the kernel, on the mounts of both sides."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

import pytest

from .conftest import mounted, stats
from .support import as_user, errno_of
from .world import World

_libc = ctypes.CDLL(None, use_errno=True)
CAPABILITY = struct.pack("<5I", 0x02000001, 1 << 21, 0, 0, 0)  # cap_sys_admin+ep
NOBODY = (1 << 32) - 1
OTHERS = {
    "security.capability": CAPABILITY,
    "security.selinux": b"x\0",
    "trusted.overlay.opaque": b"y",
    "system.posix_acl_access": struct.pack("<I" + 3 * "HHI", 2, 1, 6, NOBODY, 4, 4, NOBODY, 32, 4, NOBODY),
}


def value_sizes(path: Path, name: bytes, size: int) -> int | None:
    """What getxattr(2) says with a buffer of this size; None for an error, which is in the errno."""
    buffer = ctypes.create_string_buffer(max(size, 1))
    found = int(_libc.getxattr(os.fsencode(path), name, buffer, ctypes.c_size_t(size)))
    return None if found < 0 else found


@pytest.mark.parametrize("side", ["device", "host"])
@mounted()
def test_through_the_kernel(world: World, side: str) -> None:
    os.umask(0)
    here = (world.device if side == "device" else world.host) / "public"
    there = (world.host if side == "device" else world.device) / "public"
    (world.backing / "public").chmod(0o777)
    for path in (here / "f", here / "d"):
        path.touch() if path.name == "f" else path.mkdir()
        path.chmod(0o777)
        assert errno_of(os.getxattr, path, "user.a") == errno.ENODATA
        assert os.listxattr(path) == []
        assert os.listxattr(there / path.name) == []
        before = (there / path.name).stat().st_ctime_ns
        os.setxattr(path, "user.a", b"12345", os.XATTR_CREATE)
        assert (there / path.name).stat().st_ctime_ns > before
        assert path.stat().st_ctime_ns == (there / path.name).stat().st_ctime_ns
        assert errno_of(os.setxattr, path, "user.a", b"", os.XATTR_CREATE) == errno.EEXIST
        assert errno_of(os.setxattr, path, "user.b", b"", os.XATTR_REPLACE) == errno.ENODATA
        assert os.getxattr(there / path.name, "user.a") == b"12345"
        assert (value_sizes(path, b"user.a", 0), value_sizes(path, b"user.a", 5)) == (5, 5)
        assert value_sizes(path, b"user.a", 4) is None and ctypes.get_errno() == errno.ERANGE
        assert os.listxattr(path) == os.listxattr(there / path.name) == ["user.a"]
        os.removexattr(there / path.name, "user.a")
        assert errno_of(os.getxattr, path, "user.a") == errno.ENODATA
        assert errno_of(os.removexattr, path, "user.a") == errno.ENODATA
        for name, value in OTHERS.items():
            assert errno_of(os.setxattr, path, name, value) == errno.EOPNOTSUPP, name
            assert errno_of(os.getxattr, path, name) == errno.EOPNOTSUPP, name
        assert os.listxattr(world.backing / "public" / path.name) == []


@mounted()
def test_writes_ask_for_no_capability(world: World) -> None:
    """With FUSE_HANDLE_KILLPRIV_V2 the kernel asks once, not before each of 1,000 writes."""
    with (world.host / "public" / "f").open("w+b", buffering=0) as file:
        for _ in range(1000):
            file.write(b"12345678")
    assert stats(world).asked["getxattr"] <= 3
    assert not any("xattr" in kind for kind in stats(world).took)


def write_to_one_and_cut_another() -> None:
    with Path("written").open("r+b", buffering=0) as file:
        file.write(b"1")
    os.truncate("cut", 5)
    Path("read").read_bytes()


@pytest.mark.parametrize("side", ["device", "host"])
@mounted()
def test_set_id_bits_go_when_another_user_writes(world: World, side: str) -> None:
    os.umask(0)
    top = (world.device if side == "device" else world.host) / "public"
    (world.backing / "public").chmod(0o777)
    for name in ("written", "cut", "read"):
        (top / name).touch()
        (top / name).chmod(0o6777)
    os.chdir(top)  # the way here is closed to others
    as_user(1234, 1234, write_to_one_and_cut_another)
    modes = {name: oct((top / name).stat().st_mode & 0o7777) for name in ("written", "cut", "read")}
    assert modes == {"written": "0o777", "cut": "0o777", "read": "0o6777"}
    for name in modes:
        assert (world.backing / "public" / name).stat().st_mode == (top / name).stat().st_mode


@mounted(binding="fuse-python")
def test_fuse_python_has_none(world: World) -> None:
    """The kernel would ask it before each write."""
    (world.device / "public" / "f").touch()
    assert errno_of(os.setxattr, world.device / "public" / "f", "user.a", b"1") == errno.EOPNOTSUPP

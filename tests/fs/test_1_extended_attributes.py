# SPDX-License-Identifier: Apache-2.0
"""Extended attributes and birth times: names, the backing directory, the quota, messages of the kernel."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.errors import ProtocolError
from millpond.fs.fuse import abi
from millpond.fs.proto.extended import pack_names, unpack_names
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.usage import public_usage
from millpond.fs.vfs.inode_api import ROOT, Node
from millpond.fs.vfs.path_api import attributes
from millpond.fs.vfs.xattr_names import user_name

from .support import errno_of

OTHERS = (
    b"security.capability",
    b"security.selinux",
    b"trusted.overlay.opaque",
    b"system.posix_acl_access",
    b"system.posix_acl_default",
    b"user",
    b"",
)


@pytest.fixture
def backing(top: Path) -> Iterator[BackingFs]:
    root = os.open(top, os.O_PATH)
    made = BackingFs(root)
    yield made
    made.close()
    os.close(root)


def found(tree: BackingFs, name: bytes = b"f") -> Node:
    return tree.lookup(ROOT, name).node


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_other_namespaces_are_not_supported(name: bytes, backing: BackingFs, top: Path) -> None:
    (top / "f").touch()
    node, extended = found(backing), backing.extended
    assert errno_of(user_name, name) == errno.EOPNOTSUPP
    assert errno_of(extended.get, node, name) == errno.EOPNOTSUPP
    assert errno_of(extended.set, node, name, b"x", 0) == errno.EOPNOTSUPP
    assert errno_of(extended.remove, node, name) == errno.EOPNOTSUPP


@pytest.mark.parametrize("name", [b"user." + b"n" * 251, b"user.a\0b", b"user."])
def test_names_that_no_attribute_can_have(name: bytes) -> None:
    assert errno_of(user_name, name) in (errno.ERANGE, errno.EINVAL)


def test_what_others_set_is_not_shown(backing: BackingFs, top: Path) -> None:
    (top / "f").touch()
    os.setxattr(top / "f", "user.shown", b"1")
    try:
        os.setxattr(top / "f", "trusted.hidden", b"2")
    except OSError as error:
        pytest.skip(f"no trusted attributes here: {error}")
    assert backing.extended.names(found(backing)) == (b"user.shown",)


def test_a_root_that_holds_both_parts_has_none(top: Path) -> None:
    (top / "public").mkdir()
    os.setxattr(top, "user.private", b"1")
    root = os.open(top, os.O_PATH)
    tree = BackingFs(root, public=b"public")
    assert tree.extended.names(ROOT) == ()
    assert errno_of(tree.extended.get, ROOT, b"user.private") == errno.ENODATA
    assert errno_of(tree.extended.set, ROOT, b"user.private", b"2", 0) == errno.EROFS
    assert errno_of(tree.extended.remove, ROOT, b"user.private") == errno.EROFS
    assert tree.extended.birth_time(ROOT) is not None
    os.close(root)


def test_the_quota_counts_them(top: Path) -> None:
    (top / "public").mkdir()
    (top / "public" / "f").touch()
    root = os.open(top, os.O_PATH)
    tree = BackingFs(root, public=b"public", limit=public_usage(top)[0] + 8192)
    node = tree.walk(ROOT, [b"public", b"f"]).node
    tree.extended.set(node, b"user.a", bytes(2000), 0)
    tree.quota.count()
    assert tree.quota.used == public_usage(top)[0]
    assert errno_of(tree.extended.set, node, b"user.b", bytes(1000), 0) == errno.ENOSPC
    tree.extended.remove(node, b"user.a")  # a full quota does not hinder it
    assert tree.extended.names(node) == ()
    tree.close()
    os.close(root)


def test_the_birth_time_stays(backing: BackingFs, top: Path) -> None:
    (top / "f").touch()
    born = backing.extended.birth_time(found(backing))
    assert born is not None and abs(born - (top / "f").stat().st_ctime_ns) < 10**9
    os.utime(top / "f", ns=(1, 1))
    assert backing.extended.birth_time(found(backing)) == born


def test_requests_of_the_kernel() -> None:
    head = struct.pack("=II", 3, 1)
    assert abi.parse_getxattr(memoryview(head + b"user.a\0")) == (3, b"user.a")
    assert abi.parse_setxattr(memoryview(head + b"user.a\0x\0y")) == (b"user.a", b"x\0y", 1)
    assert errno_of(abi.parse_setxattr, memoryview(head + b"user.a\0xy")) == errno.EIO
    assert errno_of(abi.parse_setxattr, memoryview(head + b"user.a")) == errno.EIO


def test_statx_as_the_kernel_reads_it(top: Path) -> None:
    packed = abi.pack_statx(attributes(top.stat()), 5 * 10**9 + 7, 1.5)
    assert len(packed) == 32 + 256
    assert struct.unpack_from("=QI", packed) == (1, 500_000_000)
    assert struct.unpack_from("=I", packed, 32)[0] & 0x800
    assert struct.unpack_from("=qI", packed, 32 + 80) == (5, 7)
    assert not struct.unpack_from("=I", abi.pack_statx(attributes(top.stat()), None), 32)[0] & 0x800


def test_lists_of_a_hostile_device() -> None:
    assert unpack_names(pack_names([b"user.a", b"user.b"])) == (b"user.a", b"user.b")
    assert unpack_names(b"") == ()
    for bad in (
        b"user.a",
        b"user.a\0\0",
        b"security.capability\0",
        b"user.\0",
        bytes(9),
        b"user.x\0" * 10_000,
    ):
        with pytest.raises(ProtocolError):
            unpack_names(bad)

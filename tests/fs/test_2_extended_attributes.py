# SPDX-License-Identifier: Apache-2.0
"""Extended attributes over connections."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto import extended as x
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import ROOT, Node
from millpond.fs.vfs.xattr_names import MAX_VALUE

from .caching_client import Client, Device
from .recall_clients import client, device, lease, server
from .support import Cutting, Doing, Server, errno_of
from .test_2_listings import listed

__all__ = ["client", "device", "lease", "server"]
_MANY = 300
OTHERS = (b"security.capability", b"security.selinux", b"trusted.x", b"system.posix_acl_access")


@pytest.fixture
def node(tree: RemoteFs, top: Path) -> Node:
    (top / "public" / "f").touch()
    return tree.walk(ROOT, [b"public", b"f"]).node


def test_values_that_no_file_takes(tree: RemoteFs, node: Node) -> None:
    extended = tree.extended
    assert errno_of(extended.set, node, b"user.a", bytes(MAX_VALUE + 1), 0) == errno.E2BIG
    assert errno_of(extended.set, node, b"user.a", b"", 4) == errno.EINVAL
    extended.set(node, b"user.empty", b"", os.XATTR_CREATE)
    assert extended.get(node, b"user.empty") == b""


def test_other_namespaces_cost_no_message(tree: RemoteFs, node: Node) -> None:
    for name in OTHERS:
        assert errno_of(tree.extended.get, node, name) == errno.EOPNOTSUPP
        assert errno_of(tree.extended.set, node, name, b"1", 0) == errno.EOPNOTSUPP
        assert errno_of(tree.extended.remove, node, name) == errno.EOPNOTSUPP
    assert not any(tree.meter.kinds.get(kind.NAME) for kind in (x.GetXattr, x.SetXattr, x.RemoveXattr))


def test_a_hostile_host_sets_no_other_either(server: Server, top: Path) -> None:
    (top / "public" / "f").touch()
    with server.talk() as talk:
        file = talk.find(b"public", b"f")
        for name in (*OTHERS, b"user", b"", b"user.\0", b"user." + b"n" * 300):
            answer = talk.call(x.SetXattr(file, name), p.Error, b"\1\0\0\2" + bytes(16))
            assert answer.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ERANGE), name
        assert talk.call(x.SetXattr(file, b"user.a"), p.Error, bytes(MAX_VALUE + 1)).errno == errno.E2BIG
    assert os.listxattr(top / "public" / "f") == []


def test_a_repeated_request(tree: RemoteFs, node: Node, top: Path) -> None:
    Cutting.cut_after = x.SetXattr.NAME
    tree.extended.set(node, b"user.a", b"1", os.XATTR_CREATE)
    Cutting.cut_after = x.GetXattr.NAME
    assert tree.extended.get(node, b"user.a") == b"1"
    Cutting.cut_after = x.RemoveXattr.NAME
    tree.extended.remove(node, b"user.a")
    assert os.listxattr(top / "public" / "f") == []


def test_what_a_file_has_not_is_asked_for_once(client: Client) -> None:
    node, extended = client.find(b"f"), client.tree.extended
    for _ in range(5):
        assert extended.names(node) == ()
        assert errno_of(extended.get, node, b"user.a") == errno.ENODATA
    assert (client.asked(x.ListXattrs.NAME), client.asked(x.GetXattr.NAME)) == (1, 0)


@pytest.fixture
def files(client: Client, top: Path) -> dict[bytes, Node]:
    """As a listing has shown them; one of them has an attribute."""
    folder = top / "public" / "d"
    folder.mkdir()
    for number in range(_MANY):
        (folder / f"{number:03}").touch()
    os.setxattr(folder / "007", "user.a", b"1")
    return list_again(client)


def list_again(client: Client) -> dict[bytes, Node]:
    return {entry.name: entry.node for entry in listed(client.tree, client.find(b"d"))}


def test_a_listing_says_which_files_have_attributes(client: Client, files: dict[bytes, Node]) -> None:
    extended = client.tree.extended
    assert extended.names(files[b"007"]) == (b"user.a",)  # from now on
    files = list_again(client)
    names = {name: extended.names(files[name]) for name in sorted(files) if name.isdigit()}
    assert {name for name in names if names[name]} == {b"007"} and len(names) == _MANY
    assert errno_of(extended.get, files[b"006"], b"user.a") == errno.ENODATA
    assert extended.get(files[b"007"], b"user.a") == b"1"
    assert (client.asked(x.ListXattrs.NAME), client.asked(x.GetXattr.NAME)) == (2, 1)


def test_a_change_of_a_listed_file_is_seen(device: Device, client: Client, files: dict[bytes, Node]) -> None:
    extended = client.tree.extended
    assert not any(extended.names(files[name]) for name in (b"001", b"002", b"003"))
    theirs = device.tree.walk(device.public, (b"d", b"001")).node
    device.tree.extended.set(theirs, b"user.a", b"1", 0)
    extended.set(files[b"002"], b"user.b", b"2", 0)
    for node in (files, list_again(client)):
        assert extended.names(node[b"001"]) == (b"user.a",) and extended.names(node[b"002"]) == (b"user.b",)
        assert extended.names(node[b"003"]) == ()


@pytest.mark.parametrize("whose", ["device", "own"])
def test_a_late_page_does_not_count_for_a_file_that_has_changed(
    device: Device, client: Client, files: dict[bytes, Node], whose: str
) -> None:
    extended, two = client.tree.extended, files[b"002"]
    assert extended.names(two) == ()
    client.gate.shut(c.EntriesPlus.NAME)
    listing = Doing(list_again, client)
    client.gate.reached()
    if whose == "own":
        extended.set(two, b"user.a", b"1", 0)
    else:
        theirs = device.tree.walk(device.public, (b"d", b"002")).node
        device.tree.extended.set(theirs, b"user.a", b"1", 0)
    client.gate.open()
    assert extended.names(two) == extended.names(listing.result()[b"002"] or two) == (b"user.a",)

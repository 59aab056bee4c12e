# SPDX-License-Identifier: Apache-2.0
"""Copies between volumes: the result, the state after a failure, and the resumption by the next copy."""

from __future__ import annotations

import errno
import inspect
import itertools
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millpond.base.errors import LocalError, RemoteError
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.extended import BackingExtended
from millpond.fs.vfs.bulk_api import SmallFile
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_adapter import BulkPathAdapter
from millpond.fs.vfs.path_api import MAX_TRANSFER, Handle, os_error
from millpond.host.cli.volumes.copy import TargetCopy, _tell, _Transfer
from millpond.host.cli.volumes.copy_paths import CopyEndpoint, endpoint
from millpond.host.remote.copies import listings, unfinished
from millpond.host.remote.copies.small_copies import Copied, CopyFailed

from .copies import MIB, Sides, code, names


def test_a_file_arrives_with_its_mode_and_times(sides: Sides) -> None:
    data = os.urandom(3 * MIB + 17)
    (sides.here / "f").write_bytes(data)
    (sides.here / "f").chmod(0o640)
    os.utime(sides.here / "f", ns=(1_000_000_007, 2_000_000_009))
    assert sides.copy("f", "g") == Copied(1, len(data), 0)
    found = (sides.there / "g").stat()
    assert (sides.there / "g").read_bytes() == data
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o640, 2_000_000_009)
    assert sum(sides.told) == len(data)
    (sides.there / "d").mkdir()
    sides.copy("f", "d")
    assert (sides.there / "d" / "f").read_bytes() == data
    (sides.here / "empty").touch()
    assert sides.copy("empty", "") == Copied(1, 0, 0)
    assert sorted(os.listdir(sides.there)) == ["d", "empty", "g"]  # noqa: PTH208


def test_a_comparison_and_a_resumption_tell_how_far_they_are(sides: Sides) -> None:
    """Before: a huge file that was compared, or half there, said nothing until it was read whole."""
    data = os.urandom(3 * MIB + 17)
    (sides.here / "f").write_bytes(data)
    sides.copy("f", "f", checksum=True)
    sides.told.clear()
    sides.copy("f", "f", checksum=True)
    assert sum(sides.told) == len(data) and max(sides.told) <= MAX_TRANSFER
    (sides.there / "f").write_bytes(data[:-1] + b"x")
    sides.told.clear()
    sides.copy("f", "f", checksum=True)
    assert sum(sides.told) == len(data)


def test_a_listing_tells_how_many_files_it_has_found(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "_TOLD", 2)
    (sides.here / "d").mkdir()
    for number in range(4):
        (sides.here / "d" / str(number)).touch()
    found = list[int]()
    with sides.copier(found=found.append) as copier:
        copier.plan("d", "", recursive=True)
    assert found == [2, 4]


def test_a_directory_arrives_with_all_in_it(sides: Sides) -> None:
    (sides.here / "d" / "deep").mkdir(parents=True)
    (sides.here / "d" / "deep" / "\udcff").write_text("odd")
    (sides.here / "d" / "link").symlink_to("../../secret")
    (sides.here / "d").chmod(0o500)
    assert code(sides.copy, "d", "new") == errno.EISDIR
    assert sides.copy("d", "new", recursive=True).files == 1
    assert (sides.there / "new" / "deep" / "\udcff").read_text() == "odd"
    assert os.readlink(sides.there / "new" / "link") == "../../secret"  # noqa: PTH115
    assert sides.copy("d", "", recursive=True).files == 1
    assert sides.copy("d", "", recursive=True) == Copied(unchanged=1)
    assert sorted(os.listdir(sides.there)) == ["d", "new"]  # noqa: PTH208


def test_a_broken_copy_leaves_the_old_file_and_the_next_goes_on(sides: Sides) -> None:
    data = os.urandom(8 * MIB)
    (sides.here / "f").write_bytes(data)
    (sides.there / "f").write_text("old")
    sides.target.fail_after = 10
    assert code(sides.copy, "f", "f") == errno.EIO
    assert (sides.there / "f").read_text() == "old"
    written = next(path for path in sides.there.iterdir() if path.name.endswith(".part")).stat().st_size
    assert 4 * MIB < written < 6 * MIB
    sides.target.fail_after = 1 << 30
    assert sides.copy("f", "f") == Copied(1, len(data), written)
    assert (sides.there / "f").read_bytes() == data
    assert os.listdir(sides.there) == ["f"]  # noqa: PTH208


@pytest.mark.parametrize(
    ("how", "used"), [("a hole", 0), ("other bytes", MIB), ("too long", 4 * MIB), ("another version", 0)]
)
def test_what_is_not_of_the_source_is_not_used(sides: Sides, how: str, used: int) -> None:
    data = os.urandom(4 * MIB)
    (sides.here / "f").write_bytes(data)
    sides.target.fail_after = 3
    assert code(sides.copy, "f", "f") == errno.EIO
    part = next(path for path in sides.there.iterdir() if path.name.endswith(".part"))
    assert MIB < part.stat().st_size < 2 * MIB
    if how == "a hole":
        with part.open("r+b") as file:
            file.write(bytes(4096))
    elif how == "other bytes":
        with part.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(bytes([part.read_bytes()[-1] ^ 1]))
    elif how == "too long":
        part.write_bytes(data + b"x")
    else:
        data = data[::-1]
        (sides.here / "f").write_bytes(data)
        os.utime(sides.here / "f", (9, 9))
    sides.target.fail_after = 1 << 30
    assert sides.copy("f", "f") == Copied(1, len(data), used)
    assert (sides.there / "f").read_bytes() == data


@pytest.mark.parametrize("size", [3000, 2 * MIB])
def test_a_file_that_changes_while_it_is_copied_does_not_arrive(sides: Sides, size: int) -> None:
    (sides.here / "f").write_bytes(bytes(size))
    copier = sides.copier()
    items = copier.plan("f", "f", recursive=False)
    with (sides.here / "f").open("ab") as file:
        file.write(b"more")
    assert code(lambda: list(copier.copy(items, sides.told.append))) == errno.ESTALE
    assert not (sides.there / "f").exists()


def test_a_file_without_an_end_fills_no_disk(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: all that a device sent was written, and its size looked at afterwards."""
    (sides.here / "f").write_bytes(bytes(2 * MIB))
    ends = 32 * MIB

    def read(_handle: Handle, size: int, offset: int) -> bytes:
        return bytes(size) if offset < ends else b""

    monkeypatch.setattr(sides.source, "read", read)
    assert code(sides.copy, "f", "") == errno.ESTALE
    assert sum(sides.told) <= 2 * MIB and not list(sides.there.iterdir())


def test_a_listing_without_an_end_ends_the_copy(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: the host kept each name, until its memory was full."""
    monkeypatch.setattr(listings, "MOST_NAMES", 3)
    for number in range(3):
        sides.here.joinpath("few").mkdir(exist_ok=True)
        sides.here.joinpath("few", str(number)).touch()
    assert sides.copy("few", "", recursive=True).files == 3
    (sides.there / "few" / "of the target").touch()
    with pytest.raises(CopyFailed, match="more than 3 files in one directory"):
        sides.copy("few", "", recursive=True)
    (sides.here / "few" / "of the source").touch()
    with pytest.raises(CopyFailed, match="more than 3 files in one directory"):
        sides.copy("few", "other", recursive=True)


def test_a_tree_without_an_end_ends_the_copy(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "MOST_BYTES", 10_000)
    (sides.here / "top" / "a").mkdir(parents=True)
    assert sides.copy("top", "first", recursive=True).files == 0
    (sides.here / "top" / "/".join("a" * 50)).mkdir(parents=True)
    with pytest.raises(CopyFailed, match="too many files for one copy"):
        sides.copy("top", "second", recursive=True)
    assert not (sides.there / "second").exists()


def test_large_directories_are_listed_when_they_are_needed(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "_MOST_AHEAD", 1)
    for folder, name in itertools.product("abc", "xyz"):
        for side in (sides.here / "top", sides.there / "top"):
            (side / folder).mkdir(parents=True, exist_ok=True)
            (side / folder / name).write_text(name)
    (sides.here / "top" / "a" / "x").write_text("new")
    copied = sides.copy("top", "", recursive=True)
    assert copied.files + copied.unchanged == 9 and (sides.there / "top" / "a" / "x").read_text() == "new"


def test_permissions_are_no_wider_than_the_mask(sides: Sides) -> None:
    (sides.here / "d").mkdir()
    (sides.here / "d" / "f").touch()
    (sides.here / "d" / "f").chmod(0o6777)
    (sides.here / "d").chmod(0o3777)
    copier = sides.copier(mask=0o750)
    items = copier.plan("d", "", recursive=True, name="called")
    assert not list(copier.copy(items, sides.told.append))
    assert stat.S_IMODE((sides.there / "called").stat().st_mode) == 0o750
    assert stat.S_IMODE((sides.there / "called" / "f").stat().st_mode) == 0o750


def test_trees_deeper_than_python_may_call(sides: Sides) -> None:
    for depth in range(1, 202):
        (sides.here / "/".join("d" * depth)).mkdir()
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        found = sides.copier().plan("d", "x", recursive=True)
    finally:
        sys.setrecursionlimit(before)
    assert len(found) == 201


def test_what_is_no_file_is_left_out(sides: Sides) -> None:
    os.mkfifo(sides.here / "fifo")
    copier = sides.copier()
    items = copier.plan("fifo", "x", recursive=False)
    assert list(copier.copy(items, sides.told.append)) == items
    assert os.listdir(sides.there) == []  # noqa: PTH208


def test_what_is_there_already_is_not_copied_again(sides: Sides) -> None:
    (sides.here / "d" / "deep").mkdir(parents=True)
    (sides.here / "d" / "link").symlink_to("f")
    names = ["f", "deep/g", "deep/large"]
    for name in names:
        (sides.here / "d" / name).write_bytes(name.encode() * (40_000 if name == "deep/large" else 1))
    sides.copy("d", "", recursive=True)
    inodes = {name: (sides.there / "d" / name).stat().st_ino for name in names}
    sides.told.clear()
    assert sides.copy("d", "", recursive=True) == Copied(unchanged=3)
    assert {name: (sides.there / "d" / name).stat().st_ino for name in names} == inodes
    assert sum(sides.told) == sum((sides.here / "d" / name).stat().st_size for name in names)


@pytest.mark.parametrize("how", ["size", "time", "mode", "type"])
def test_what_differs_is_copied_again(sides: Sides, how: str) -> None:
    (sides.here / "d").mkdir()
    (sides.here / "d" / "f").write_text("text")
    sides.copy("d", "", recursive=True)
    path = sides.there / "d" / "f"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    if how == "mode":
        path.chmod(0o600)
    elif how == "type":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        path.write_text("other text" if how == "size" else "past")
    if how == "size":
        os.utime(path, ns=times)
    if how == "mode":  # its contents stay
        assert sides.copy("d", "", recursive=True) == Copied(unchanged=1)
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((sides.here / "d" / "f").stat().st_mode)
        return
    assert sides.copy("d", "", recursive=True) == Copied(1, 4)
    assert path.read_text() == "text" and not path.is_symlink()


def test_many_small_files_take_few_requests(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    (sides.here / "d").mkdir()
    for number in range(300):
        (sides.here / "d" / f"{number}").write_bytes(b"%d" % number * 500)
    sent: list[int] = []
    store = BulkPathAdapter.store_small

    def counted(volume: BulkPathAdapter, folder: str, files: Sequence[SmallFile]) -> Sequence[int]:
        sent.append(len(files))
        return store(volume, folder, files)

    monkeypatch.setattr(BulkPathAdapter, "store_small", counted)
    assert sides.copy("d", "", recursive=True).files == 300
    assert sum(sent) == 300 and len(sent) <= 4
    for number in range(300):
        assert (sides.there / "d" / f"{number}").read_bytes() == b"%d" % number * 500


def test_where_small_files_cannot_be_stored_together_each_is(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_volume: BulkPathAdapter, _folder: str, files: Sequence[SmallFile]) -> Sequence[int]:
        return [errno.EOPNOTSUPP] * len(files)

    monkeypatch.setattr(BulkPathAdapter, "store_small", refuse)
    (sides.here / "d").mkdir()
    for name in ("a", "b"):
        (sides.here / "d" / name).write_text(name)
    assert sides.copy("d", "", recursive=True) == Copied(2, 2)
    assert sides.copy("d", "", recursive=True) == Copied(unchanged=2)


def test_an_error_names_the_path_as_a_user_writes_it(sides: Sides) -> None:
    (sides.here / "d").mkdir()
    (sides.here / "d" / "f").write_text("a file")
    (sides.there / "d" / "f").mkdir(parents=True)
    for source, target, recursive, where in (
        ("none", "x", False, "/none"),
        ("d", "x", False, "/d"),
        ("d", "", True, "csd0:d/f"),
        ("d/f", "none/f", False, "csd0:none"),
    ):
        with pytest.raises(OSError, match=f": '{where}'$") as failed:
            sides.copy(source, target, recursive=recursive)
        assert failed.value.filename == where


def test_a_failure_says_what_led_to_it() -> None:
    volume: Any = None
    transfer = _Transfer(endpoint("f", []), endpoint("csd0:f", ["csd0"]), volume, volume)
    failure, below = CopyFailed(errno.ESTALE, "Stale file handle", "csd0:f"), os_error(errno.ESTALE)
    failure.__cause__ = below
    assert "csd0:f: Stale file handle; the same command again" in str(transfer.failed(failure))
    below.__cause__ = RemoteError("why")
    assert "csd0:f: Stale file handle (why); the same command again" in str(transfer.failed(failure))


def test_what_cannot_be_copied_keeps_nothing_else_from_it(sides: Sides) -> None:
    for name in ("a/grows", "a/in the way", "b/other", "b/small", "c/below", "z"):
        (sides.here / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (sides.here / "d" / name).write_bytes(bytes(100 if name == "b/small" else 100_000))
    there = sides.there / "new" / "d"
    (there / "a" / "in the way").mkdir(parents=True)
    (there / "b" / "small").mkdir(parents=True)
    (there / "c").write_text("a file, where a folder is to be")
    copier = sides.copier()
    items = copier.plan("d", "new", recursive=True)
    with (sides.here / "d" / "a" / "grows").open("ab") as file:
        file.write(b"more")
    assert code(lambda: list(copier.copy(items, sides.told.append))) == errno.ESTALE
    assert {(each.errno, each.filename) for each in copier.failures} == {
        (errno.ESTALE, "/d/a/grows"),
        (errno.EISDIR, "csd0:new/d/a/in the way"),
        (errno.EISDIR, "csd0:new/d/b/small"),
        (errno.EEXIST, "csd0:new/d/c"),
    }
    assert names(there) == ["a", "b", "c", "z"]
    assert names(there / "a") == ["in the way"]  # and nothing unfinished
    assert names(there / "b") == ["other", "small"]


def test_what_a_killed_copy_has_left_goes_with_the_next_one(sides: Sides) -> None:
    (sides.here / "f").write_bytes(os.urandom(4 * MIB))
    sides.target.fail_after = 3
    assert code(sides.copy, "f", "f") == errno.EIO
    (left,) = names(sides.there)
    (sides.here / "f").write_bytes(os.urandom(MIB))  # another version
    sides.target.fail_after = 1 << 30
    with unfinished.held(f"csd0:{left}"):  # by a copy that is under way
        sides.copy("f", "f")
        assert names(sides.there) == sorted([left, "f"])
    (sides.here / "f").write_bytes(os.urandom(2 * MIB))
    sides.copy("f", "f")
    assert names(sides.there) == ["f"]


def test_two_copies_at_once_do_not_write_into_each_other(sides: Sides) -> None:
    data = os.urandom(2 * MIB)
    (sides.here / "f").write_bytes(data)
    sides.target.fail_after = 2
    assert code(sides.copy, "f", "f") == errno.EIO
    (other,) = names(sides.there)
    before = (sides.there / other).read_bytes()
    sides.target.fail_after = 1 << 30
    with unfinished.held(f"csd0:{other}"):
        assert sides.copy("f", "f") == Copied(1, len(data), 0)
        assert (sides.there / other).read_bytes() == before
    assert (sides.there / "f").read_bytes() == data


def test_holes_stay_holes(sides: Sides) -> None:
    with (sides.here / "f").open("wb") as file:
        file.seek(16 * MIB)
        file.write(b"end")
        file.truncate(40 * MIB)
    sides.copy("f", "f")
    assert (sides.there / "f").read_bytes() == (sides.here / "f").read_bytes()
    assert (sides.there / "f").stat().st_blocks * 512 <= 2 * MIB


@pytest.mark.parametrize("name", ["\N{GRINNING FACE}" * 62 + ".bin", "\udcff" * 250, "e" * 255])
def test_the_longest_names_can_be_copied(sides: Sides, name: str) -> None:
    (sides.here / name).write_bytes(bytes(100_000))
    sides.copy(name, "")
    assert names(sides.there) == [name]


@pytest.mark.parametrize("size", [10, 100_000])
def test_names_of_one_file_stay_names_of_one_file(sides: Sides, size: int) -> None:
    (sides.here / "d" / "e").mkdir(parents=True)
    (sides.here / "d" / "one").write_bytes(bytes(size))
    for name in ("two", "e/three"):
        (sides.here / "d" / name).hardlink_to(sides.here / "d" / "one")
    assert sides.copy("d", "", recursive=True) == Copied(3, size)
    found = {(sides.there / "d" / name).stat().st_ino for name in ("one", "two", "e/three")}
    assert len(found) == 1 and names(sides.there / "d") == ["e", "one", "two"]
    assert sides.copy("d", "", recursive=True) == Copied(unchanged=3)
    (sides.there / "d" / "two").write_text("another file now")
    (sides.there / "d" / "one").unlink()
    assert sides.copy("d", "", recursive=True).files == 3
    assert (sides.there / "d" / "two").read_bytes() == bytes(size)


def test_folders_that_are_made_keep_their_times_and_modes(sides: Sides) -> None:
    (sides.here / "d" / "closed").mkdir(parents=True)
    (sides.here / "d" / "closed" / "f").write_text("text")
    (sides.here / "d" / "closed").chmod(0o555)
    for folder in ("d/closed", "d"):
        os.utime(sides.here / folder, (9, 99))
    sides.copy("d", "", recursive=True)
    for folder in ("d", "d/closed"):
        ours, theirs = (side / folder for side in (sides.here, sides.there))
        assert (ours.stat().st_mode, ours.stat().st_mtime) == (theirs.stat().st_mode, theirs.stat().st_mtime)


def attributes_of(path: Path) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.getxattr(path, name) for name in os.listxattr(path)}


@pytest.mark.parametrize("size", [10, 100_000])
def test_extended_attributes_arrive_and_change_alone(sides: Sides, size: int) -> None:
    (sides.here / "d" / "e").mkdir(parents=True)
    ours, theirs = (side / "d" / "e" for side in (sides.here, sides.there))
    for name in ("set", "bare", "closed"):
        (ours / name).write_bytes(bytes(size))
    for path in (ours, ours / "set", ours / "closed"):
        os.setxattr(path, "user.\udcff", b"odd")
        os.setxattr(path, "user.a", bytes(3000))
    (ours / "closed").chmod(0o444)
    assert sides.copy("d", "", recursive=True) == Copied(3, 3 * size)
    for name in ("", "set", "bare", "closed"):
        assert attributes_of(theirs / name) == attributes_of(ours / name)
    assert attributes_of(theirs / "closed") == {b"user.\xff": b"odd", b"user.a": bytes(3000)}
    os.setxattr(ours / "bare", "user.new", b"")
    os.setxattr(ours / "closed", "user.a", b"changed", os.XATTR_REPLACE)
    for name in ("user.\udcff", "user.a"):
        os.removexattr(ours / "set", name)
    assert sides.copy("d", "", recursive=True) == Copied(unchanged=3)
    for name in ("set", "bare", "closed"):
        assert attributes_of(theirs / name) == attributes_of(ours / name)
    assert stat.S_IMODE((theirs / "closed").stat().st_mode) == 0o444


class NoneHeld(BackingExtended):
    """The extended attributes of a file system that has none."""

    def set(self, node: Node, name: bytes, value: bytes, flags: int) -> None:
        raise os_error(errno.EOPNOTSUPP)

    def names(self, node: Node) -> tuple[bytes, ...]:
        raise os_error(errno.EOPNOTSUPP)


def test_files_whose_extended_attributes_are_not_held_are_counted(sides: Sides) -> None:
    (sides.here / "d").mkdir()
    for name in ("a", "b", "c"):
        (sides.here / "d" / name).touch()
    for name in ("a", "b"):
        os.setxattr(sides.here / "d" / name, "user.a", b"1")
    for number in range(129):
        os.setxattr(sides.here / "d" / "c", f"user.{number}", b"")
    assert sides.copy("d", "", recursive=True) == Copied(3, stripped=1)
    assert len(os.listxattr(sides.there / "d" / "c")) == 128
    tree = sides.target._tree
    assert isinstance(tree, BackingFs)
    tree.extended = NoneHeld(tree.pinned, tree.is_public, tree.quota.require)
    assert sides.copy("d", "new", recursive=True) == Copied(3, stripped=3)


def test_names_of_files_control_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Before: all failures but the last were printed as they are."""
    copy = TargetCopy(CopyEndpoint("csd0:\33[2J", "csd0", "public"))
    copy.failures = [LocalError(f"\33]0;{number}\7: no such file") for number in range(3)]
    copy.copied.stripped = 1
    with pytest.raises(SystemExit):
        _tell([copy], 0, keeps=False, as_json=False)
    assert "\33" not in capsys.readouterr().err

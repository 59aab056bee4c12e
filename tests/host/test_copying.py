# SPDX-License-Identifier: Apache-2.0
"""Copies between volumes: the result, the state after a failure, and the resumption by the next copy."""

from __future__ import annotations

import errno
import inspect
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.fs.vfs.path_api import MAX_TRANSFER, Handle, os_error
from millpond.host.remote.copying import Copied, Copier, plan

MIB = 1 << 20


class Failing(PathAdapter):
    """A volume whose writes fail after so many."""

    fail_after = 1 << 30
    writes = 0

    def write(self, handle: Handle, data: bytes, offset: int) -> int:
        self.writes += 1
        if self.writes > self.fail_after:
            raise os_error(errno.EIO)
        return super().write(handle, data[: MAX_TRANSFER // 2 + 1], offset)  # short, as a volume may


class Sides:
    """A folder here and one there, as volumes."""

    def __init__(self, base: Path) -> None:
        self.here, self.there = base / "here", base / "there"
        for folder in (self.here, self.there):
            folder.mkdir()
        self.roots = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in (self.here, self.there)]
        self.source, self.target = PathAdapter(BackingFs(self.roots[0])), Failing(BackingFs(self.roots[1]))
        self.told: list[int] = []

    def copy(self, source: str, target: str, *, recursive: bool = False) -> Copied:
        done = Copied()
        copier = Copier(self.source, self.target, self.told.append, done)
        for item in plan(self.source, source, self.target, target, recursive=recursive):
            assert copier.copy(item)
        return done


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    for root in made.roots:
        os.close(root)


def code(call: Callable[..., object], *arguments: object, **more: object) -> int | None:
    try:
        call(*arguments, **more)
    except OSError as error:
        return error.errno
    return None


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
    assert sides.copy("d", "", recursive=True).files == 1
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


def test_a_file_that_changes_while_it_is_copied_does_not_arrive(sides: Sides) -> None:
    (sides.here / "f").write_bytes(bytes(2 * MIB))
    (item,) = plan(sides.source, "f", sides.target, "f", recursive=False)
    with (sides.here / "f").open("ab") as file:
        file.write(b"more")
    assert code(Copier(sides.source, sides.target, sides.told.append, Copied()).copy, item) == errno.ESTALE
    assert not (sides.there / "f").exists()


def test_permissions_are_no_wider_than_the_mask(sides: Sides) -> None:
    (sides.here / "d").mkdir()
    (sides.here / "d" / "f").touch()
    (sides.here / "d" / "f").chmod(0o6777)
    (sides.here / "d").chmod(0o3777)
    copier = Copier(sides.source, sides.target, sides.told.append, Copied(), mask=0o750)
    for item in plan(sides.source, "d", sides.target, "", recursive=True, name="called"):
        assert copier.copy(item)
    assert stat.S_IMODE((sides.there / "called").stat().st_mode) == 0o750
    assert stat.S_IMODE((sides.there / "called" / "f").stat().st_mode) == 0o750


def test_trees_deeper_than_python_may_call(sides: Sides) -> None:
    for depth in range(1, 202):
        (sides.here / "/".join("d" * depth)).mkdir()
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        found = plan(sides.source, "d", sides.target, "x", recursive=True)
    finally:
        sys.setrecursionlimit(before)
    assert len(found) == 201


def test_what_is_no_file_is_left_out(sides: Sides) -> None:
    os.mkfifo(sides.here / "fifo")
    (item,) = plan(sides.source, "fifo", sides.target, "x", recursive=False)
    assert not Copier(sides.source, sides.target, sides.told.append, Copied()).copy(item)
    assert os.listdir(sides.there) == []  # noqa: PTH208


def test_what_is_not_there_is_said(sides: Sides) -> None:
    assert code(sides.copy, "none", "x") == errno.ENOENT
    (sides.here / "f").touch()
    assert code(sides.copy, "f", "none/x") == errno.ENOENT

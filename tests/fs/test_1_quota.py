# SPDX-License-Identifier: Apache-2.0
"""The quota of the public part: its limit, and the accounting of growth."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from millpond.fs.store import usage
from millpond.fs.store.layout import PRIVATE, PUBLIC, prepare
from millpond.fs.store.quota import Quota, Reservation, growth
from millpond.fs.store.usage import private_bytes, public_usage
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, Statistics

from .support import errno_of

UNIT = 4096
PAGE = UNIT // 512  # blocks


def file(size: int, blocks: int, unit: int = UNIT) -> Attributes:
    return Attributes(5, 0o100644, 1, 0, 0, size, blocks, unit, 0, 0, 0)


@pytest.mark.parametrize(
    ("before", "offset", "length", "most"),
    [
        (file(0, 0), 0, 1, UNIT),
        (file(0, 0), 0, UNIT, UNIT),
        (file(0, 0), 1, UNIT, 2 * UNIT),
        (file(0, 0), 1, 0, 0),
        (file(0, 0), 1 << 40, 10, UNIT),
        (file(UNIT, PAGE), 0, UNIT, 0),
        (file(UNIT, PAGE), UNIT - 1, 2, UNIT),
        (file(10, PAGE), 10, 100, 0),
        (file(10, PAGE), 10, UNIT, UNIT),
        (file(4 * UNIT, PAGE), 0, UNIT, UNIT),
        (file(4 * UNIT, PAGE), 0, 4 * UNIT, 3 * UNIT),
        (file(4 * UNIT, 3 * PAGE), 0, 2 * UNIT, UNIT),
        (file(10, 100 * PAGE), 0, 5 * UNIT, 0),
        (file(0, 0, 1 << 20), 0, 1, 1 << 20),
    ],
)
def test_the_most_that_a_write_takes(before: Attributes, offset: int, length: int, most: int) -> None:
    assert growth(before, offset, length) == most


def test_a_write_that_would_cross_the_quota_is_refused() -> None:
    quota = Quota(10 * UNIT, 7 * UNIT, 3)
    first = quota.reserve(1, 0, 2 * UNIT)
    assert (quota.used, quota.left) == (7 * UNIT, UNIT)
    assert errno_of(quota.reserve, 2, 0, 2 * UNIT) == errno.ENOSPC
    second = quota.reserve(2, 0, UNIT)
    assert errno_of(quota.reserve, 3, 0, 1) == errno.ENOSPC
    quota.commit(first, PAGE)  # it took less than it could have
    quota.commit(second, PAGE)
    assert (quota.used, quota.left) == (9 * UNIT, UNIT)


def test_what_takes_nothing_is_done_when_all_is_taken() -> None:
    quota = Quota(UNIT, UNIT, 1)
    quota.commit(quota.reserve(1, PAGE, 0), PAGE)
    assert errno_of(quota.reserve, 1, PAGE, 1) == errno.ENOSPC
    quota.commit(quota.watch(1, PAGE), 0, -1)
    assert (quota.used, quota.files, quota.left) == (0, 0, UNIT)


def test_a_failed_write_gives_back_what_it_reserved() -> None:
    quota = Quota(UNIT, 0, 1)
    quota.commit(quota.reserve(1, 0, UNIT), 0)
    assert (quota.used, quota.left) == (0, UNIT)


def test_changes_of_one_file_at_a_time_are_counted_once() -> None:
    quota = Quota(100 * UNIT, 0, 1)
    first, second = quota.reserve(1, 0, UNIT), quota.reserve(1, 0, UNIT)
    cut = quota.watch(1, PAGE)  # the first has been written meanwhile
    quota.commit(second, 2 * PAGE)
    assert quota.used == 2 * UNIT
    quota.commit(cut, 0)
    quota.commit(first, 0)
    assert (quota.used, quota.left) == (0, 100 * UNIT)


def test_files_that_come_and_go() -> None:
    quota = Quota(100 * UNIT, UNIT, 1)
    quota.commit(quota.reserve(1, PAGE, UNIT), PAGE, 1)  # a name in a directory
    quota.commit(quota.watch(9, 0), PAGE)  # the new directory that it is of
    assert (quota.used, quota.files) == (2 * UNIT, 2)
    quota.commit(quota.watch(9, PAGE), 0, -1)
    quota.commit(quota.watch(9, 2 * PAGE), 2 * PAGE)  # a new file with the same number, written unseen
    assert (quota.used, quota.files) == (UNIT, 1)


def test_beyond_the_quota_little_is_still_overwritten() -> None:
    quota = Quota(UNIT, UNIT + MAX_TRANSFER, 1)
    quota.commit(quota.reserve(1, PAGE, 0), PAGE + 1)
    assert errno_of(quota.reserve, 1, PAGE + 1, 0) == errno.ENOSPC
    quota.commit(quota.watch(1, PAGE + 1), 0)
    assert errno_of(quota.reserve, 1, 0, 1) == errno.ENOSPC
    quota.commit(quota.reserve(1, 0, 0), 0)


def test_a_new_count_counts() -> None:
    quota = Quota(10 * UNIT, 10 * UNIT, 7)
    quota.recount(UNIT, 2)
    assert (quota.used, quota.files, quota.left) == (UNIT, 2, 9 * UNIT)


def test_statistics_tell_of_the_public_part_alone() -> None:
    flash = Statistics(4096, 1024, 1000, 500, 400, 300, 200, 255)
    quota = Quota(100 * 1024, 30 * 1024 + 1, 7)
    assert quota.clipped(flash) == Statistics(4096, 1024, 100, 69, 69, 76, 69, 255)
    quota.reserve(1, 0, 50 * 1024)
    assert quota.clipped(flash) == Statistics(4096, 1024, 100, 19, 19, 26, 19, 255)
    assert Quota(1024, 5000, 7).clipped(flash) == Statistics(4096, 1024, 1, 0, 0, 7, 0, 255)
    assert Quota(1 << 63, 5000, 100).clipped(flash) == flash


steps = some.lists(
    some.one_of(
        some.tuples(
            some.just("write"), some.integers(1, 3), some.integers(0, 6 * UNIT), some.integers(0, 3 * UNIT)
        ),
        some.tuples(some.just("cut"), some.integers(1, 3), some.integers(0, 6 * UNIT)),
        some.tuples(some.just("remove"), some.integers(1, 3)),
        some.tuples(some.just("settle"), some.integers(0, 5)),
    ),
    max_size=60,
)


class Flash:
    """Files of which only the units that were written take space."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.units: dict[int, set[int]] = {}

    def stat(self, inode: int) -> Attributes:
        return file(self.sizes.get(inode, 0), len(self.units.get(inode, ())) * PAGE)

    def write(self, inode: int, offset: int, length: int) -> None:
        self.sizes[inode] = max(self.sizes.get(inode, 0), offset + length)
        self.units.setdefault(inode, set()).update(range(offset // UNIT, -(-(offset + length) // UNIT)))

    def cut(self, inode: int, size: int) -> None:
        self.sizes[inode] = size
        self.units[inode] = {unit for unit in self.units.get(inode, ()) if unit * UNIT < size}

    @property
    def used(self) -> int:
        return sum(len(units) for units in self.units.values()) * UNIT


@given(some.integers(0, 12 * UNIT), steps)
@settings(deadline=None)
def test_never_over_the_quota_and_never_below_nothing(limit: int, history: list[tuple[Any, ...]]) -> None:
    """Writes are done when they are announced, and settled in any order."""
    flash, quota, begun = Flash(), Quota(limit, 0, 3), list[Reservation]()
    for name, number, *rest in history:
        if name == "write" and rest[1]:
            before = flash.stat(number)
            try:
                begun.append(quota.reserve(number, before.blocks, growth(before, *rest)))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                assert flash.used + growth(before, *rest) > limit or begun
            else:
                flash.write(number, *rest)
        elif name in ("cut", "remove"):
            begun.append(quota.watch(number, flash.stat(number).blocks))
            flash.cut(number, *rest or [0])
        elif name == "settle" and begun:
            ended = begun.pop(number % len(begun))
            quota.commit(ended, flash.stat(ended.inode).blocks)
        assert 0 <= flash.used <= limit
        assert quota.used >= 0
        assert 0 <= quota.left <= limit
    for ended in begun:
        quota.commit(ended, flash.stat(ended.inode).blocks)
    assert (quota.used, quota.left) == (flash.used, limit - flash.used)


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    directory = tmp_path / "flash"
    prepare(directory)
    return directory


def blocks(*paths: Path) -> int:
    return sum(path.lstat().st_blocks for path in paths) * 512


def test_what_the_public_part_takes(backing: Path) -> None:
    public, deep = backing / PUBLIC, backing / PUBLIC / "deep" / "deeper"
    assert public_usage(backing) == (blocks(public), 1)
    deep.mkdir(parents=True)
    (deep / "data").write_bytes(bytes(100_000))
    (public / "another name").hardlink_to(deep / "data")
    (public / "to the private part").symlink_to(backing / PRIVATE)
    (public / "to itself").symlink_to(public)
    with (public / "hole").open("wb") as hole:
        hole.truncate(1 << 30)
    (backing / PRIVATE / "secret").write_bytes(bytes(1 << 20))
    there = [public, deep.parent, deep, deep / "data", public / "hole", public / "to itself"]
    there += [public / "to the private part"]
    used, files = public_usage(backing)
    assert (used, files) == (blocks(*there), 7)
    assert 100_000 <= used < 1 << 20
    assert private_bytes(backing) == 1 << 20


def test_a_tree_deeper_than_the_limits_of_a_process(backing: Path) -> None:
    depth = 1500
    here = os.open(backing / PUBLIC, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir("x", dir_fd=here)
        below = os.open("x", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    try:
        assert public_usage(backing)[1] == depth + 1
    finally:
        for _ in range(depth):  # what removes tmp_path is recursive
            above = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = above
            os.rmdir("x", dir_fd=here)
        os.close(here)


def test_a_directory_that_is_moved_while_it_is_counted(backing: Path) -> None:
    public, found = backing / PUBLIC, []
    for name in "abc":
        (public / "from" / name / "deep").mkdir(parents=True)
    (public / "to").mkdir()
    parents = {(public / "from" / name / "deep").stat().st_ino: name for name in "abc"}
    for status in usage._files(public):
        found.append(status.st_ino)
        if status.st_ino in parents and not list((public / "to").iterdir()):
            (public / "from" / parents[status.st_ino]).rename(public / "to" / "moved")
    assert (public / "to" / "moved").is_dir()
    assert sorted(found) == sorted(path.stat().st_ino for path in (public, *public.rglob("*")))

# SPDX-License-Identifier: Apache-2.0
"""The quota of the public part: its limit, its counts, and the growth of a write."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.fs.store import usage
from millpond.fs.store.layout import PRIVATE, PUBLIC, prepare
from millpond.fs.store.quota import Quota, growth
from millpond.fs.store.usage import private_bytes, public_usage
from millpond.fs.vfs.path_api import Statistics

from .support import errno_of

UNIT = 4096
PAGE = UNIT // 512  # blocks


def file(size: int, blocks: int, unit: int = UNIT) -> SimpleNamespace:
    return SimpleNamespace(st_size=size, st_blocks=blocks, st_blksize=unit)


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
def test_the_most_that_a_write_takes(before: Any, offset: int, length: int, most: int) -> None:
    assert growth(before, offset, length) == most


class Files:
    """Files whose count is what a test says; ``meanwhile`` is done in the middle of it."""

    def __init__(self) -> None:
        self.used, self.files, self.counts = 0, 1, 0
        self.meanwhile: Callable[[], object] = lambda: None

    def count(self) -> tuple[int, int]:
        self.counts += 1
        self.meanwhile()
        return self.used, self.files


def test_what_is_taken_during_a_count_counts() -> None:
    files = Files()
    quota = Quota(10 * UNIT, files.count)
    quota.require(UNIT)
    files.used, files.meanwhile = UNIT, lambda: quota.require(2 * UNIT)
    quota.count()
    assert quota.used == 3 * UNIT


def test_a_file_that_is_moved_during_a_count_is_not_missed() -> None:
    files = Files()
    quota = Quota(10 * UNIT, files.count)
    quota.require(5 * UNIT)
    files.used, files.meanwhile = UNIT, quota.note_move
    quota.count()
    assert quota.used == 5 * UNIT
    files.meanwhile = lambda: None
    quota.count()
    assert quota.used == UNIT


def test_a_count_that_fails_changes_nothing() -> None:
    files = Files()
    quota = Quota(2 * UNIT, files.count)
    quota.require(2 * UNIT)

    def fail() -> None:
        raise OSError(errno.ESTALE, "directories are moved again and again")

    files.meanwhile = fail
    assert errno_of(quota.require, 1) == errno.ENOSPC
    assert quota.used == 2 * UNIT


def test_files_that_take_long_to_count_are_not_counted_again_soon() -> None:
    files = Files()
    quota = Quota(UNIT, files.count)
    files.used, files.meanwhile = UNIT, lambda: time.sleep(0.3)
    assert errno_of(quota.require, UNIT + 1) == errno.ENOSPC
    assert errno_of(quota.require, UNIT + 1) == errno.ENOSPC
    assert files.counts == 2


FLASH = Statistics(4096, 1024, 1000, 500, 400, 300, 200, 255)


def test_statistics_tell_of_the_public_part_alone() -> None:
    quota = Quota(100 * 1024, lambda: (30 * 1024 + 1, 7))
    assert quota.clipped(FLASH) == Statistics(4096, 1024, 100, 69, 69, 76, 69, 255)
    quota.require(50 * 1024)
    assert quota.clipped(FLASH) == Statistics(4096, 1024, 100, 19, 19, 26, 19, 255)
    assert Quota(1024, lambda: (5000, 7)).clipped(FLASH) == Statistics(4096, 1024, 1, 0, 0, 7, 0, 255)
    assert Quota(1 << 63, lambda: (5000, 100)).clipped(FLASH) == FLASH


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

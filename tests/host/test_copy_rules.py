# SPDX-License-Identifier: Apache-2.0
"""Copies by rules: files that are left out, others deleted, contents compared, and copies that are ended."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millpond.host.remote.copies import unfinished
from millpond.host.remote.copies.copying import Copier
from millpond.host.remote.copies.rules import CopyEnded, CopyRules, Exclusions
from millpond.host.remote.copies.small_copies import Copied

from .copies import MIB, Sides, code, names


def tree(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


def test_what_is_excluded_is_left_out_and_left_alone(sides: Sides) -> None:
    tree(
        sides.here / "d", "a.txt", "b.tmp", "cache/x", "raw/1.bin", "raw/1.txt", "deep/cache/y", "deep/c.tmp"
    )
    excluded = Exclusions(("*.tmp", "cache/", "raw/*.bin"))
    assert sides.copy("d", "", recursive=True, excluded=excluded).files == 2
    assert files(sides.there / "d") == ["a.txt", "raw/1.txt"]
    tree(sides.there / "d", "cache/kept", "kept.tmp", "gone", "raw/kept.bin")
    assert sides.copy("d", "", recursive=True, excluded=excluded, deletes=True).deleted == 1
    assert files(sides.there / "d") == ["a.txt", "cache/kept", "kept.tmp", "raw/1.txt", "raw/kept.bin"]


def test_what_the_source_does_not_have_is_deleted_in_copied_directories_alone(sides: Sides) -> None:
    tree(sides.here / "d", "a", "e/b")
    tree(sides.there, "other", "d/a", "d/old/deep/x", "d/old/y", "d/e/gone")
    (sides.there / "d" / "link").symlink_to("../other")
    (sides.there / "d" / ".x.12345678.abc.part").write_text("of a copy that was killed")
    (sides.there / "d" / ".y.12345678.abc.part").write_text("of a copy that is under way")
    assert sides.copy("d", "", recursive=True).deleted == 0
    with unfinished.held("csd0:d/.y.12345678.abc.part"):
        found = sides.copy("d", "", recursive=True, deletes=True)
    assert (found.files, found.deleted) == (0, 7)  # with two directories
    assert files(sides.there) == ["d/.y.12345678.abc.part", "d/a", "d/e/b", "other"]
    assert sorted(names(sides.there / "d")) == [".y.12345678.abc.part", "a", "e"]


def test_what_is_excluded_stays_in_directories_that_the_source_does_not_have(sides: Sides) -> None:
    """Before: such a directory was deleted with all in it."""
    tree(sides.here / "d", "a")
    tree(sides.there / "d", "old/x", "old/kept.tmp", "old/deep/cache/kept", "old/gone/x", "old/.y.part")
    excluded = Exclusions(("*.tmp", "cache/"))
    with unfinished.held("csd0:d/old/.y.part"):  # of a copy that is under way
        done = sides.copy("d", "", recursive=True, deletes=True, excluded=excluded)
    assert files(sides.there / "d") == ["a", "old/.y.part", "old/deep/cache/kept", "old/kept.tmp"]
    assert done.deleted == 3  # with a directory
    assert sides.copy("d", "", recursive=True, deletes=True).deleted == 6
    assert files(sides.there) == ["d/a"]


def test_a_directory_that_holds_the_source_is_not_emptied_around_it(sides: Sides) -> None:
    """Before: --delete removed the source, which its target does not have."""
    tree(sides.there, "public/a/a/x", "public/a/y")
    copier = Copier(sides.target, sides.target, Copied(), origin="csd0", rules=CopyRules(deletes=True))
    assert code(copier.plan, "public/a/a", "public", recursive=True) == errno.EINVAL
    assert copier.plan("public/a", "public", recursive=True)  # onto itself
    copier.__exit__(None, None, None)


def test_nothing_is_deleted_where_a_directory_cannot_be_read_and_the_rest_is_copied(sides: Sides) -> None:
    """Before: one directory that nobody may list ended the whole copy."""
    tree(sides.here / "d", "a", "closed/x", "e/b")
    tree(sides.there / "d", "closed/x", "old")
    sides.source.closed = "d/closed"
    copier = sides.copier(deletes=True)
    items = copier.plan("d", "", recursive=True)
    assert code(lambda: list(copier.copy(items, sides.told.append))) == errno.EACCES
    assert [(each.errno, each.filename) for each in copier.failures] == [(errno.EACCES, "/d/closed")]
    assert files(sides.there / "d") == ["a", "closed/x", "e/b", "old"]


@pytest.mark.parametrize("size", [10, 3 * MIB])
def test_contents_are_compared_where_that_is_asked_for(sides: Sides, size: int) -> None:
    for name in ("same", "other"):
        (sides.here / name).write_bytes(bytes(size))
        sides.copy(name, "")
    with (sides.there / "other").open("r+b") as file:
        file.seek(size - 1)
        file.write(b"x")
    for name, time in (("same", 5), ("other", 7)):
        os.utime(sides.here / name, (time, time))
        os.utime(sides.there / name, (7, 7))
    assert sides.copy("other", "") == Copied(unchanged=1)  # by its size and time
    assert sides.copy("other", "", checksum=True) == Copied(1, size)
    assert (sides.there / "other").read_bytes() == bytes(size)
    assert sides.copy("same", "", checksum=True) == Copied(unchanged=1)
    assert (sides.there / "same").stat().st_mtime == 5


@pytest.mark.parametrize("keeps", [False, True])
def test_an_ended_copy_leaves_nothing_unfinished_unless_that_is_asked_for(sides: Sides, keeps: bool) -> None:
    """Before: Ctrl-C left the part that had been written."""
    tree(sides.here / "d", "a", "z")
    (sides.here / "d" / "large").write_bytes(os.urandom(8 * MIB))
    done = Copied()
    with sides.copier(done, keeps=keeps, is_ended=lambda: sides.target.writes > 5) as copier:
        items = copier.plan("d", "", recursive=True)
        with pytest.raises(CopyEnded):
            list(copier.copy(items, sides.told.append))
    left = [name for name in files(sides.there) if name.endswith(".part")]
    assert len(left) == keeps and "d/large" not in files(sides.there)
    assert sides.copy("d", "", recursive=True).resumed == (left != []) * 3 * MIB
    assert files(sides.there) == ["d/a", "d/large", "d/z"]

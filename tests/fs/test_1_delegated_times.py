# SPDX-License-Identifier: Apache-2.0
"""The change times that hosts give to new files, and what ends them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millpond.fs.store import delegated_times
from millpond.fs.store.delegated_times import MOST_APART, DelegatedTimes


def new(folder: Path, name: str) -> os.stat_result:
    (folder / name).touch()
    return (folder / name).stat()


def test_a_time_is_told_until_the_file_changes(tmp_path: Path) -> None:
    times, status = DelegatedTimes(), new(tmp_path, "a")
    times.keep(status, status.st_ctime_ns - 5)
    assert times.of(status) == status.st_ctime_ns - 5
    assert times.of(new(tmp_path, "b")) == (tmp_path / "b").stat().st_ctime_ns
    changed = (tmp_path / "a").stat()
    while changed.st_ctime_ns == status.st_ctime_ns:  # the clock goes by ticks
        (tmp_path / "a").chmod(0o600)
        changed = (tmp_path / "a").stat()
    assert times.of(changed) == changed.st_ctime_ns


@pytest.mark.parametrize("apart", [MOST_APART + 1, -MOST_APART - 1, 1 << 62, -(1 << 63)])
def test_a_time_far_from_the_flashs_is_not_kept(tmp_path: Path, apart: int) -> None:
    times, status = DelegatedTimes(), new(tmp_path, "a")
    times.keep(status, status.st_ctime_ns + apart)
    assert times.of(status) == status.st_ctime_ns


def test_those_kept_longest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delegated_times, "MOST_FILES", 2)
    times, files = DelegatedTimes(), [new(tmp_path, name) for name in "abc"]
    for status in files:
        times.keep(status, status.st_ctime_ns - 5)
    assert [times.of(status) - status.st_ctime_ns for status in files] == [0, -5, -5]


@pytest.mark.parametrize("what", ["mode", "nlink", "size", "mtime"])
def test_a_change_within_the_same_tick_ends_it(tmp_path: Path, what: str) -> None:
    """The name is made just before the change of which its client knows: a coarse clock tells both alike."""
    times, status = DelegatedTimes(), new(tmp_path, "a")
    times.keep(status, status.st_ctime_ns - 5)
    exact = {f"st_{name}_ns": getattr(status, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
    places = ("mode", "ino", "dev", "nlink", "uid", "gid", "size")
    numbers = [int(getattr(status, f"st_{place}")) for place in places]
    if what in places:
        numbers[places.index(what)] += 1
    else:
        exact["st_mtime_ns"] += 1
    changed = os.stat_result((*numbers, 0, 0, 0), exact)
    assert times.of(status) == status.st_ctime_ns - 5
    assert times.of(changed) == changed.st_ctime_ns == status.st_ctime_ns

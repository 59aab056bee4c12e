# SPDX-License-Identifier: Apache-2.0
"""What a data service keeps of its runs: bounded in memory, all of them in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import millpond.data
from millpond.base.errors import LocalError
from millpond.data.streaming import kept_runs
from millpond.data.streaming.kept_runs import KeptRuns
from millpond.data.streaming.protocol.leases import EpochState
from millpond.data.streaming.protocol.service import KeptRun

from ..waiting import eventually
from .served import SAMPLES, images, server_of


def run(epoch: int) -> KeptRun:
    return KeptRun(EpochState(epoch), {"one": ((0, 3),)}, {"turn": epoch}, "set")


@pytest.mark.parametrize("in_folder", [True, False])
def test_runs_in_memory_are_bounded_and_those_in_a_folder_are_all_there(
    tmp_path: Path, in_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_runs, "_MOST", 2)
    kept = KeptRuns(tmp_path / "state" if in_folder else None)
    for number, key in enumerate("abca"):
        kept.keep(key, run(number))
    assert kept.get("a") == run(3) and kept.get("c") == run(2)
    assert kept.get("b") == (run(1) if in_folder else None)
    assert kept.get("none") is None and len(kept._last) == 2
    again = KeptRuns(tmp_path / "state" if in_folder else None)
    assert again.get("a") == (run(3) if in_folder else None)


def test_files_that_changed_first_are_removed_whatever_the_clock_says_and_damaged_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_runs, "_MOST_FILES", 2)
    KeptRuns(tmp_path).keep("old", run(1))
    os.utime(tmp_path / "old.run", (1 << 33, 1 << 33))  # of a clock that was set back since
    KeptRuns(tmp_path).keep("new", run(2))
    kept = KeptRuns(tmp_path)
    assert kept.get("new") == run(2)
    KeptRuns(tmp_path).keep("newest", run(3))
    kept = KeptRuns(tmp_path)
    assert kept.get("old") is None and not (tmp_path / "old.run").exists()
    (tmp_path / "bad.run").write_bytes(b"\xc1")
    with pytest.raises(LocalError, match=r"bad\.run is no state of a run"):
        kept.get("bad")


def test_a_service_forgets_runs_that_all_have_left(tmp_path: Path) -> None:
    images(tmp_path / "images")
    with server_of(tmp_path, grace=0.2) as (where, server):
        for number in range(3):
            stream = millpond.data.stream(f"{where}/images", batch=50, run=f"run {number}")
            assert len(list(stream)) == SAMPLES // 50
        eventually(lambda: not server._runs._runs, "runs without consumers are forgotten")
        first = [label for _, batch in stream for label in batch.tolist()]  # the second epoch goes on
        assert stream.state_dict()["epoch"] == 1 and sorted(first) == list(range(SAMPLES))

# SPDX-License-Identifier: Apache-2.0
"""The folders of ended jobs: which go beyond a limit, by hand, and what is left to say of such a job."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError, Refused
from millpond.host.api.daemon import PruneJobs
from millpond.host.fleet import directory
from millpond.host.jobs.pruning import PruneRule, chosen
from millpond.host.records.jobs import EndedJob, JobState

from .daemon_rig import Rig

MIB = 1 << 20
DAY = 86400.0
ENDED = [
    EndedJob(4, "d", 400.0, 3, 3 * MIB),
    EndedJob(3, "c", 300.0, 2, MIB),
    EndedJob(1, "a", 100.0, 1, 2 * MIB),
]


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [
        (PruneRule(), [4, 3, 1]),
        (PruneRule(keep=2), [1]),
        (PruneRule(keep=0), [4, 3, 1]),
        (PruneRule(keep=3), []),
        (PruneRule(mib=6), []),
        (PruneRule(mib=5), [1]),
        (PruneRule(mib=1), [3, 1]),  # the last job's folder stays, whatever it holds
        (PruneRule(keep=1, mib=100), [3, 1]),
        (PruneRule(older_than=650.0), [3, 1]),
        (PruneRule(keep=2, older_than=650.0), [1]),
        (PruneRule(keep=0, older_than=950.0), []),
        (PruneRule(only=3), [3]),
        (PruneRule(only=2), []),
    ],
)
def test_the_oldest_go_first(rule: PruneRule, numbers: list[int]) -> None:
    for order in (ENDED, ENDED[::-1]):
        assert [job.id for job in chosen(order, rule, 1000.0)] == numbers


def test_a_clock_that_was_set_back_changes_nothing() -> None:
    before, after = EndedJob(1, "a", 90000.0, 1, MIB), EndedJob(2, "b", 400.0, 2, MIB)
    assert chosen([before, after], PruneRule(keep=1), 500.0) == [before]
    assert chosen([before, after], PruneRule(), 500.0) == [after, before]


@pytest.mark.parametrize("text", ["keep = -1", "mib = -1", "kep = 1"])
def test_impossible_limits_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "fleet.toml").write_text(f'name = "rig"\n[jobs]\n{text}\n')
    with pytest.raises(ConfigError, match=r"jobs"):
        directory.read(tmp_path)


def limit(rig: Rig, text: str) -> None:
    with (rig.directory / "fleet.toml").open("a") as file:
        file.write(f"[jobs]\n{text}\n")


def folder(rig: Rig, number: int) -> Path:
    return rig.directory / "jobs" / str(number)


def end_with_files(rig: Rig, number: int, size: int = 1000, failure: str = "") -> None:
    rig.wait_for(number, "running")
    (folder(rig, number) / "model.safetensors").write_bytes(bytes(size))
    rig.finish(number, failure)


def numbers_of_folders(rig: Rig) -> list[int]:
    return sorted(int(each.name) for each in (rig.directory / "jobs").iterdir())


def test_at_the_end_of_a_job_older_ones_lose_their_files(open_rig: Callable[[], Rig]) -> None:
    rig = open_rig()
    limit(rig, "keep = 2")
    rig = open_rig()
    for number in (1, 2, 3):
        rig.submit("--devices", "csd0")
        end_with_files(rig, number, failure="no" if number == 1 else "")
    rig.submit()
    rig.wait_for(4, "running")
    rig.wait_for_pruned(1)
    assert numbers_of_folders(rig) == [2, 3, 4]
    assert [job.pruned is not None for job in rig.jobs.infos()] == [True, False, False, False]
    assert rig.info(1).state == "failed"


def test_a_job_whose_end_prunes_others_is_spared_itself(rig: Rig) -> None:
    for device in ("csd0", "csd1"):
        rig.submit("--devices", device)
        rig.wait_for(int(device[-1]) + 1, "running")
    end_with_files(rig, 1)
    end_with_files(rig, 2)
    pruner = rig.jobs._pruner
    assert [job.id for job in pruner.prune(PruneRule(keep=0), 0.0, dry_run=True, spared=1)] == [2]


def test_forgotten_jobs_leave_the_list_and_their_numbers_are_not_used_again(rig: Rig) -> None:
    for number in (1, 2, 3):
        rig.submit()
        end_with_files(rig, number)
        rig.add_round(number)
    assert rig.command("jobs", "prune", "--keep", "2")[0] == 0
    code, out, _ = rig.command("jobs", "prune", "--keep", "1", "--forget")
    assert (code, out.count("forgotten")) == (0, 2)
    assert [info.id for info in rig.jobs.infos()] == [3] and numbers_of_folders(rig) == [3]
    assert rig.store.rounds(1) == [] and rig.command("logs", "1")[2] == "millpond: there is no job 1\n"
    assert rig.submit() == 4


def test_a_running_and_a_queued_job_keep_their_files(rig: Rig) -> None:
    for devices in ("csd0", "csd1", "csd1"):
        rig.submit("--devices", devices)
    rig.submit("--devices", "csd2")
    end_with_files(rig, 4)
    rig.command("stop", "3")
    code, out, err = rig.command("jobs", "prune", "--keep", "0", "--format", "json")
    assert (code, err) == (0, "")
    assert [each["id"] for each in json.loads(out)["jobs"]] == [3, 4]
    assert numbers_of_folders(rig) == [1, 2]
    for number in (1, 2):
        rig.wait_for(number, "running")
        rig.finish(number)


def test_by_hand_the_folders_that_would_go_are_shown_first(rig: Rig) -> None:
    for number in (1, 2):
        rig.submit()
        end_with_files(rig, number, 3 * MIB)
    for _ in range(2):
        out = rig.command("jobs", "prune", "--keep", "1", "--dry-run")[1]
        assert "job 1 (job1) would be pruned: 3.1 MB" in out and "job 2" not in out
    assert numbers_of_folders(rig) == [1, 2]
    assert rig.command("jobs", "prune", "--older-than", "1")[1] == "nothing to prune\n"
    assert "job 1 (job1) is pruned: 3.1 MB" in rig.command("jobs", "prune", "--keep", "1")[1]
    assert numbers_of_folders(rig) == [2]
    with sqlite3.connect(rig.directory / "fleet.db") as db:
        db.execute("UPDATE jobs SET ended = ended - ?", (2 * DAY,))
    db.close()
    assert "job 2 (job2) is pruned" in rig.command("jobs", "prune", "--older-than", "1")[1]
    assert rig.command("jobs", "prune", "--keep", "0")[1] == "nothing to prune\n"


def test_without_options_the_limits_of_the_fleet_count(open_rig: Callable[[], Rig]) -> None:
    rig = open_rig()
    for number in (1, 2):
        rig.submit()
        end_with_files(rig, number)
    assert rig.command("jobs", "prune")[1] == "nothing to prune\n"
    limit(rig, "keep = 1")
    rig = open_rig()
    assert "job 1 (job1) is pruned" in rig.command("jobs", "prune")[1]


def test_a_pruned_job_is_listed_and_says_that_its_files_are_gone(rig: Rig) -> None:
    rig.submit()
    rig.add_round(1)
    end_with_files(rig, 1)
    rig.command("jobs", "prune", "--keep", "0")
    assert "its files are pruned" in rig.command("jobs")[1]
    assert rig.command("jobs", "compare", "1")[0] == 0
    for command in (
        ("resume", "1", "--rounds", "50", "--detach"),
        ("logs", "1"),
        ("logs", "-f", "1"),
        ("train", str(rig.write_job("next")), "--set", "model.initial=1"),
    ):
        code, _, err = rig.command(*command)
        assert code == 2 and "job 1: its files are pruned" in err and err.count("\n") == 1, command
    assert rig.info(1).state == "done" and rig.info(1).model == ""


def test_what_a_dead_daemon_has_not_removed_goes_when_the_next_starts(open_rig: Callable[[], Rig]) -> None:
    rig = open_rig()
    rig.submit()
    end_with_files(rig, 1)
    rig.store.prune_job(1)  # marked, and the daemon dies before it has removed anything
    assert numbers_of_folders(rig) == [1]
    rig = open_rig()
    assert numbers_of_folders(rig) == []
    assert rig.store.digests() == set()


def test_a_daemon_that_ends_prunes_nothing(open_rig: Callable[[], Rig]) -> None:
    """A job's thread may be about to prune when the store is closed."""
    rig = open_rig()
    limit(rig, "keep = 1")
    rig = open_rig()
    for number in (1, 2):
        rig.submit("--devices", f"csd{number}")
        rig.wait_for(number, "running")
    rig.jobs.close()
    for number in (1, 2):
        rig.store.end_job(number, JobState.STOPPED)
    rig.jobs._pruner.prune_beyond_limits(time.time(), 2)
    assert numbers_of_folders(rig) == [1, 2]
    with pytest.raises(Refused, match="the host daemon has ended"):
        rig.jobs.prune(PruneJobs(keep=0))


def test_a_file_elsewhere_is_never_touched(rig: Rig, tmp_path: Path) -> None:
    elsewhere = tmp_path / "own"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_bytes(b"mine")
    rig.submit()
    rig.wait_for(1, "running")
    (folder(rig, 1) / "link").symlink_to(elsewhere)
    end_with_files(rig, 1)
    rig.command("jobs", "prune", "--keep", "0")
    assert numbers_of_folders(rig) == []
    assert (elsewhere / "model.safetensors").read_bytes() == b"mine"


@pytest.mark.expected_log("job 1: its folder cannot be removed")
def test_a_folder_that_cannot_be_removed_is_no_failure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.submit()
    rig.wait_for(1, "running")
    rig.finish(1)
    file = folder(rig, 1)
    (file / "job.log").unlink()
    file.rmdir()
    file.write_text("this is no folder")
    code, _, err = rig.command("jobs", "prune", "--keep", "0")
    assert (code, err) == (0, "") and rig.info(1).pruned

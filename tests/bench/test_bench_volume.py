# SPDX-License-Identifier: Apache-2.0
"""The volume's benchmark runs, and its rows are consistent. No figure is judged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SMALL = ("device_private_small", "device_public_small", "worker_small")
ON_HOST = {
    "host-meta": "host_meta_over_plain",
    "host-small-write": "small_write_over_plain",
    "host-list": "ls_over_plain",
    "host-parallel": "parallel_over_one",
    "host-parallel-small": "parallel_small_over_one",
    "untar": "untar_over_plain",
    "slow-flash": "slow_flash",
    "stalled": "stalled_stats",
    "million-private": "million_files.private",
    "million-public": "million_files.public",
    "million-host": "million_files.host",
}
KEYS = {"figure", "what", "value", "low", "high", "unit", "peer", "repeats", "emulation"}
RATIOS = {f"device_{how}_over_native": f"device_{how}" for how in ("seq", "rand")}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    argv = [sys.executable, "-m", "bench.volume", *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=200)


def test_an_unknown_experiment_is_named_with_those_that_are(tmp_path: Path) -> None:
    done = bench("--only", "device,floppy", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "floppy" in done.stderr
    assert "host-meta" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_peer_that_is_not_there_is_named_in_its_row(tmp_path: Path) -> None:
    if complaint := _why_not(compiler=False):
        pytest.skip(complaint)
    done = bench("--quick", "--only", "fuse-python", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "volume.json").read_text())
    assert row["figure"] == "device_fusepython_over_c"
    assert row["value"] is None
    assert row["what"].startswith("not measured: ")
    assert not (tmp_path / "volume.png").exists()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Any]]]:
    """What a short run prints, and its rows."""
    if complaint := _why_not(compiler=True):
        pytest.skip(complaint)
    output = tmp_path_factory.mktemp("bench")
    ended = bench("--quick", "--only", "device,device-small", "--output", str(output))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (output / "volume.png").read_bytes().startswith(b"\x89PNG")
    found: list[dict[str, Any]] = json.loads((output / "volume.json").read_text())
    assert len({row["figure"] for row in found}) == len(found)
    return ended.stdout, {row["figure"]: row for row in found}


Done = tuple[str, dict[str, dict[str, Any]]]


def _why_not(*, compiler: bool) -> str | None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not accessible"
    if compiler and shutil.which("cc") is None:
        return "there is no C compiler"
    return None


def test_every_row_is_complete_names_its_emulation_and_is_printed(done: Done) -> None:
    printed, rows = done
    assert rows.keys() >= {*RATIOS, "device_daemon_us_per_mib"}
    for figure, row in rows.items():
        if _not_measured(row):
            continue
        assert row.keys() == KEYS
        assert row["low"] <= row["value"] <= row["high"]
        assert row["repeats"] >= 1
        assert "the mount says: files are read and written by " in row["emulation"]
        assert figure in printed


def test_a_ratio_has_the_speed_of_its_peer_below(done: Done) -> None:
    _, rows = done
    for figure in RATIOS:
        assert rows[figure]["peer"] == "the backing file system"
        assert rows[figure]["repeats"] == 2 and rows[figure]["unit"] == "x"


def test_small_files_are_read_for_the_first_time_and_again(done: Done) -> None:
    _, rows = done
    for name in SMALL:
        again = rows[f"{name}_again_over_native"]
        assert again["peer"] == "the backing file system" and again["repeats"] == 1
        first = rows[f"{name}_over_native"]
        assert first["peer"] == again["peer"] or _not_measured(first)


def _not_measured(row: dict[str, Any]) -> bool:
    """Whether this machine cannot do it, and the row says why."""
    return row["value"] is None and row["what"].startswith("not measured: ")


def test_the_rows_of_the_host_are_complete(tmp_path: Path) -> None:
    if complaint := _why_not(compiler=True):
        pytest.skip(complaint)
    only = ",".join(ON_HOST)
    ended = bench("--quick", "--files", "300", "--only", only, "--output", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {row["figure"]: row for row in json.loads((tmp_path / "volume.json").read_text())}
    assert rows.keys() >= set(ON_HOST.values())
    for figure in ON_HOST.values():
        row = rows[figure]
        assert row.keys() == KEYS
        assert _not_measured(row) or row["low"] <= row["value"] <= row["high"]
        assert _not_measured(row) or row["emulation"]
    assert "millpond-bench-" not in Path("/proc/self/mountinfo").read_text()


def test_what_takes_long_is_done_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    from bench.volume.__main__ import BY_NAME, USUAL

    assert "million-host" in BY_NAME and "device-small" in USUAL
    assert not set(BY_NAME) & set(USUAL)


def test_ratios_are_taken_repeat_by_repeat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    from bench.tunnel.record import Record
    from bench.volume.blocks import ReadOpened
    from bench.volume.measuring import Trial, ratio
    from bench.volume.route import Route, native

    routes = [
        Route(key, f"the {key} one", lambda: native(tmp_path)) for key in ("millpond", "native", "other")
    ]
    workload = ReadOpened(tmp_path, "file", 1, 1, "random")
    trial = Trial("device_seq", "reads", workload, routes, 3, "nothing")
    record = Record()
    for ours, native_speed in ((30.0, 10.0), (20.0, 20.0), (10.0, 20.0)):
        record.add("millpond", speed=ours)
        record.add("native", speed=native_speed)
    record.missing["other"] = "it broke"
    row = ratio("device_seq_over_native", trial, record, "native")
    assert (row.low, row.value, row.high, row.repeats, row.peer) == (0.5, 1.0, 3.0, 3, "the native one")
    missing = ratio("device_seq_over_other", trial, record, "other")
    assert (missing.value, missing.repeats) == (None, 0) and missing.what.endswith("the other one: it broke")


def test_nothing_is_left_mounted(done: Done) -> None:
    assert "millpond-bench-" not in Path("/proc/self/mountinfo").read_text()

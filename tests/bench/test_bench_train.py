# SPDX-License-Identifier: Apache-2.0
"""The benchmark of training runs, and its rows are consistent. No figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
PHASES = ("", ".building", ".saving")
KEYS = {
    *("host_models", "sim_rounds_10000", "lines"),
    *(f"host_models.{workers}{phase}" for workers in (3, 100) for phase in PHASES),
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    argv = [sys.executable, "-m", "bench.train", *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("wrong", [("--only", "lines,a_dream"), ("--repeats", "0")])
def test_wrong_arguments_are_named(wrong: tuple[str, str], tmp_path: Path) -> None:
    done = bench(*wrong, "--output", str(tmp_path))
    assert done.returncode == 2
    assert wrong[1].rpartition(",")[2] in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Any]]]:
    """What a short run prints, and its rows."""
    output = tmp_path_factory.mktemp("bench")
    ended = bench("--quick", "--only", "host_models,sim_rounds_10000,lines", "--output", str(output))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: list[dict[str, Any]] = json.loads((output / "train.json").read_text())
    assert len({row["figure"] for row in found}) == len(found)
    return ended.stdout, {row["figure"]: row for row in found}


Done = tuple[str, dict[str, dict[str, Any]]]


def test_every_figure_has_a_complete_row_and_is_printed(done: Done) -> None:
    printed, rows = done
    assert rows.keys() == KEYS
    for figure, row in rows.items():
        assert row.keys() == {
            *("figure", "what", "value", "low", "high", "unit", "peer", "repeats", "emulation")
        }
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert row["repeats"] == 1
        assert figure in printed


def test_the_most_models_are_those_of_the_worse_number_of_workers(done: Done) -> None:
    _, rows = done
    assert rows["host_models"]["value"] == max(rows[f"host_models.{n}"]["value"] for n in (3, 100))

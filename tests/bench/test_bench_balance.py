# SPDX-License-Identifier: Apache-2.0
"""The balance's benchmark runs, and its rows are consistent. No figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
VIRTUAL = "a_virtual,b,sim,sim_error"
KEYS = {
    *(f"a_virtual_{left}{policy}" for left in (57, 81) for policy in ("", "_stannis", "_untuned")),
    *("b_speedup_36", "b_interrupted_min"),
    *(f"sim_{size}{policy}" for size in (36, 1000, 10_000) for policy in ("", "_stannis", "_untuned")),
    *("sim_bias_percent", "sim_ms", "sim_error"),
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    argv = [sys.executable, "-m", "bench.balance", *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)


def test_an_unknown_experiment_is_named_with_those_that_are(tmp_path: Path) -> None:
    done = bench("--only", "b,a_dream", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "a_dream" in done.stderr
    assert "sim_error" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Any]]]:
    """What a short run prints, and its rows."""
    output = tmp_path_factory.mktemp("bench")
    ended = bench("--quick", "--only", VIRTUAL, "--output", str(output))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (output / "balance.png").read_bytes().startswith(b"\x89PNG")
    found: list[dict[str, Any]] = json.loads((output / "balance.json").read_text())
    assert len({row["figure"] for row in found}) == len(found)
    return ended.stdout, {row["figure"]: row for row in found}


Done = tuple[str, dict[str, dict[str, Any]]]


def test_every_figure_has_a_complete_row_that_names_its_emulation_and_is_printed(done: Done) -> None:
    printed, rows = done
    assert rows.keys() >= KEYS
    for figure, row in rows.items():
        assert row.keys() == {
            *("figure", "what", "value", "low", "high", "unit", "peer", "repeats", "emulation")
        }
        assert row["low"] <= row["value"] <= row["high"]
        assert row["repeats"] >= 1
        assert row["emulation"].startswith(("virtual: ", "simulated: "))
        assert figure in printed


def test_the_lowest_and_the_largest_are_those_of_their_rows(done: Done) -> None:
    _, rows = done
    shares = [rows[f"b_interrupted.{count}"]["value"] for count in (0, 2, 36)]
    assert rows["b_interrupted_min"]["value"] == min(shares)
    assert rows["sim_error"]["value"] == max(rows[f"sim_error.{workers}"]["value"] for workers in (3, 8))


def test_nobody_is_faster_than_all_speeds_that_are_there(done: Done) -> None:
    _, rows = done
    assert all(rows[f"sim_{size}"]["value"] <= 1.01 for size in (36, 1000, 10_000))
    assert all(rows[f"a_virtual_{left}_untuned"]["value"] <= 1.01 for left in (57, 81))

# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tasks runs, and its rows are consistent. No figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
KEYS = {
    *("task_overhead", "uint8_memory"),
    *(f"task_overhead{task}.{kind}" for task in ("", ".list") for kind in ("gradients.32", "gradients.256")),
    *(f"task_overhead{task}.{kind}" for task in ("", ".list") for kind in ("local.32", "local.256")),
    *(f"uint8_memory.{size}{part}" for size in ("small", "large") for part in ("", ".peak")),
}


def test_a_short_run_has_a_complete_row_for_every_figure(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench.task", "--quick", "--only", "task_overhead,uint8_memory"]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [*argv, "--output", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["figure"]: row for row in json.loads((tmp_path / "task.json").read_text())}
    assert rows.keys() == KEYS
    for figure, row in rows.items():
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert figure in done.stdout
    assert rows["uint8_memory"]["value"] == max(
        rows[f"uint8_memory.{size}"]["value"] for size in ("small", "large")
    )

# SPDX-License-Identifier: Apache-2.0
"""The benchmark of strategies runs, and its rows are complete. The tests of strategies judge its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAM = """
import dataclasses, json
from bench.aggregate.strategies import measure
from bench.train.run import Run
print(json.dumps([dataclasses.asdict(row) for row in measure(Run(1, True, lambda line: None)).rows]))
"""
NAMES = {"fedavg", "fedavgm", "fedprox", "fednova", "fedadam", "fedyogi", "fedadagrad", "fedopt"}
NAMES |= {"median", "trimmed", "local-layers", "apfl", "apfl-adaptive"}
NAMES |= {"perfedavg", "perfedavg-hessian-free"}


def test_a_short_run_has_a_row_for_every_strategy() -> None:
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["figure"]: row for row in json.loads(done.stdout)}
    for name in NAMES:
        assert rows[f"strategies.{name}"]["low"] >= 0 and rows[f"strategies.{name}.accuracy"]["low"] > 0
    assert rows["strategies"]["value"] == max(
        row["value"] for name, row in rows.items() if row["unit"] == "points"
    )

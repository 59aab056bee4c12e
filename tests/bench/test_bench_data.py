# SPDX-License-Identifier: Apache-2.0
"""The benchmark of streamed data runs; its epochs are whole while workers are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAM = """
import dataclasses, json
from bench.data import elastic, stream_accuracy
from bench.train.run import Run
run = Run(1, True, lambda line: None)
rows = [*elastic.measure(run).rows, *stream_accuracy.measure(run).rows]
print(json.dumps([dataclasses.asdict(row) for row in rows]))
"""


def test_a_short_run_counts_each_sample_once() -> None:
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["figure"]: row for row in json.loads(done.stdout)}
    assert rows["elastic_samples_wrong"]["value"] == 0
    assert rows["stream_accuracy_points"]["value"] < 5

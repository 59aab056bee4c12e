# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the UDP protocol runs, and its rows are consistent. No figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
KINDS = ("udp", "udp_measured", "udp_lossy", "tcp", "tcp_pipelined")
KEYS = {f"{kind}_{figure}_{loss}" for kind in KINDS for figure in ("seconds", "server_cpu") for loss in "01"}
KEYS |= {f"{ours}_over_{peer}_{loss}" for ours in KINDS[:3] for peer in KINDS[3:] for loss in "01"}


def test_a_short_run_has_a_complete_row_for_every_figure(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench.aggregate.udp", "--quick", "--only", "udp_over_tcp"]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [*argv, "--output", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["figure"]: row for row in json.loads((tmp_path / "aggregate-udp.json").read_text())}
    assert rows.keys() == KEYS
    for row in rows.values():
        assert 0 < row["low"] <= row["value"] <= row["high"]

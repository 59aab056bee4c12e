# SPDX-License-Identifier: Apache-2.0
"""Data that fsync promised outlives power cuts and kill -9 of either side, under load; a few of them.

``make conformance`` does fifty.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..effort import scaled

TESTS = Path(__file__).parents[1]
CUTS = scaled(quick=1, full=2)


@pytest.fixture
def found(fuse_usable: None, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What was found, by figure."""
    argv = [
        sys.executable,
        "-m",
        "conformance",
        "--part",
        "cuts",
        "--cuts",
        str(CUTS),
        "--output",
        str(tmp_path),
    ]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((tmp_path / "conformance.json").read_text())
    rows: dict[str, dict[str, Any]] = {entry["figure"]: entry for entry in entries}
    if (what := rows["power_cuts_lost"]["what"]).startswith("not run"):
        pytest.skip(what)
    return rows


def test_an_fsync_keeps_its_promise_through_power_cuts_and_kills(found: dict[str, dict[str, Any]]) -> None:
    for figure in ("power_cuts_lost", "power_cuts_garbled", "kills_lost"):
        assert (found[figure]["value"], found[figure]["repeats"]) == (0, CUTS), found[figure]
    absent = sum(fates["absent"] for fates in found["power_cuts_torn"]["by_size"].values())
    assert absent  # the power was really cut

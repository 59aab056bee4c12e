"""The tunnel's benchmark runs, and what it writes agrees with itself. No figure is judged."""

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


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    argv = [sys.executable, "-m", "bench.tunnel", *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)


def test_an_unknown_figure_is_named_with_those_that_are(tmp_path: Path) -> None:
    done = bench("--only", "tcp_over_pigeon", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "tcp_over_pigeon" in done.stderr
    assert "tcp_over_ssh" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of a short run with the Python engine and the C relay."""
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("/dev/net/tun is not accessible")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    output = tmp_path_factory.mktemp("bench")
    only = ("tcp_python_over_relay", "pps_python_over_relay")
    done = bench("--quick", *(word for name in only for word in ("--only", name)), "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (output / "tunnel.png").read_bytes().startswith(b"\x89PNG")
    found: list[dict[str, Any]] = json.loads((output / "tunnel.json").read_text())
    return {row["figure"]: row for row in found}


def test_a_ratio_is_that_of_its_routes(rows: dict[str, dict[str, Any]]) -> None:
    for quantity, figure in (("gbps", "tcp_python_over_relay"), ("pps", "pps_python_over_relay")):
        best = max(rows[f"{quantity}.{relay}"]["value"] for relay in ("relay", "relay_threads"))
        over = rows[f"{quantity}.python"]["value"] / best
        assert rows[figure]["value"] == pytest.approx(over, rel=1e-2)


def test_every_row_is_complete(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        assert row.keys() == {
            *("figure", "what", "value", "low", "high", "unit", "peer", "repeats", "emulation")
        }
        assert row["low"] <= row["value"] <= row["high"]
        assert row["what"]
        assert row["repeats"] >= 1
    assert rows["tcp_python_over_relay"]["peer"].startswith("C relay, ")

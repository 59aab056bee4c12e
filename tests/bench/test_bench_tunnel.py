# SPDX-License-Identifier: Apache-2.0
"""The tunnel's benchmark runs, and its rows are consistent. No figure is judged."""

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


def test_what_was_measured_becomes_rows_a_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The relay that did better is the one that counts, and the ratio is taken repeat by repeat."""
    monkeypatch.syspath_prepend(str(TESTS))
    from bench.tunnel.__main__ import report
    from bench.tunnel.plan import plan
    from bench.tunnel.record import Record

    record = Record()
    for python, relay, threads in ((5.0, 10.0, 1.0), (9.0, 12.0, 2.0), (4.0, 16.0, 3.0)):
        record.add("python", gbps=python, rtt_p50=40.0, cpu_per_gb=1.1)
        record.add("relay", gbps=relay)
        record.add("relay_threads", gbps=threads)
    record.missing["veth"] = "there is none"
    report(plan(quick=True, only=[]), record, "cubic", tmp_path)
    assert (tmp_path / "tunnel.png").read_bytes().startswith(b"\x89PNG")
    rows = {row["figure"]: row for row in json.loads((tmp_path / "tunnel.json").read_text())}
    found = rows["tcp_python_over_relay"]
    assert (found["low"], found["value"], found["high"], found["repeats"]) == (0.25, 0.5, 0.75, 3)
    assert rows["gbps.relay"]["value"] == 12.0 and found["peer"] in rows["gbps.relay"]["what"]
    assert rows["missing.veth"]["value"] is None and "there is none" in rows["missing.veth"]["what"]
    assert "tcp_python_over_relay" in capsys.readouterr().out


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


@pytest.mark.full
def test_a_ratio_is_that_of_its_routes(rows: dict[str, dict[str, Any]]) -> None:
    for quantity, figure in (("gbps", "tcp_python_over_relay"), ("pps", "pps_python_over_relay")):
        best = max(rows[f"{quantity}.{relay}"]["value"] for relay in ("relay", "relay_threads"))
        over = rows[f"{quantity}.python"]["value"] / best
        assert rows[figure]["value"] == pytest.approx(over, rel=1e-2)


@pytest.mark.full
def test_every_row_is_complete(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        assert row.keys() == {
            *("figure", "what", "value", "low", "high", "unit", "peer", "repeats", "emulation")
        }
        assert row["low"] <= row["value"] <= row["high"]
        assert row["what"]
        assert row["repeats"] >= 1
    assert rows["tcp_python_over_relay"]["peer"].startswith("C relay, ")

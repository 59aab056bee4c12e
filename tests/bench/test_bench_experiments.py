# SPDX-License-Identifier: Apache-2.0
"""Each experiment of each benchmark runs, in its shortest form. No figure is judged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
KEYS = {"figure", "what", "value", "low", "high", "unit", "peer", "repeats", "emulation"}
SECONDS = 330.0  # the limit of an experiment's shortest form, and its cleanup

INSTALLED = [("aggregate", "flower"), ("data", "mosaic"), ("data", "ray"), ("task", "wheels_s")]
"""Their peers, or what they install, come from the package registry."""
ELSEWHERE = {
    "aggregate": {"strategies", "udp_over_tcp"},
    "balance": {"a_virtual", "b", "sim", "sim_error"},
    "data": {"accuracy", "elastic"},
    "task": {"task_overhead", "uint8_memory"},
    "train": {"host_models", "sim_rounds_10000", "lines"},
    "volume": {
        *("device", "device-small", "fuse-python", "host-small-write", "host-meta", "host-list", "untar"),
        *("host-parallel", "host-parallel-small", "slow-flash", "stalled"),
        *("million-private", "million-public", "million-host"),
    },
}
"""Those that other tests of this folder run."""
HERE = {
    "aggregate": (
        "rounds",
        "split",
        "staged",
        "gigabyte",
        "topology",
        "offload",
        "encodings",
        "udp_accuracy",
    ),
    "balance": ("a_real", "exchange", "kill", "convergence"),
    "data": ("met_points", "met_speed", "streamed", "tuner"),
    "task": ("big_data", "prepare_over_import", "lora_bytes"),
    "train": ("round_over_floor",),
    "volume": ("host-read", "host-reread", "host-random", "host-write", "git", "epoch", "copy"),
}
_RUN = [(benchmark, name) for benchmark, names in HERE.items() for name in names]
_GROUPS = 6  # they do not wait for each other

_DEVICES = ("/dev/fuse", "/dev/net/tun")
_CAN = shutil.which("cc") and all(os.access(path, os.R_OK | os.W_OK) for path in _DEVICES)
pytestmark = pytest.mark.skipif(not _CAN, reason=f"needs a C compiler and {' and '.join(_DEVICES)}")


def bench(benchmark: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    argv = [sys.executable, "-m", f"bench.{benchmark}", *arguments, "--output", "."]
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS)


def _marked(number: int, case: tuple[str, str]) -> object:
    marks = [pytest.mark.xdist_group(f"bench-{number % _GROUPS}")]
    marks += [pytest.mark.registry] if case in INSTALLED else []
    return pytest.param(*case, marks=marks, id="-".join(case))


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    ("benchmark", "name"), [_marked(*numbered) for numbered in enumerate([*INSTALLED, *_RUN])]
)
def test_the_shortest_form_of_an_experiment_has_rows(benchmark: str, name: str, tmp_path: Path) -> None:
    done = bench(benchmark, "--quick", "--only", name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / f"{benchmark}.json").read_text())
    for row in rows:
        assert row.keys() == KEYS and row["figure"] in done.stdout
    measured = [row for row in rows if not _lacks_a_peer(row)]
    assert measured
    for row in measured:
        assert row["repeats"] and row["low"] <= row["value"] <= row["high"]


def _lacks_a_peer(row: dict[str, Any]) -> bool:
    """Return whether the program that `row` measures, or compares with, is not installed here."""
    return row["value"] is None and row["what"].endswith(" is not installed")


@pytest.mark.full
@pytest.mark.parametrize("benchmark", HERE)
def test_no_experiment_is_left_out(benchmark: str, tmp_path: Path) -> None:
    done = bench(benchmark, "--only", "none of them", cwd=tmp_path)
    assert done.returncode == 2
    (names,) = re.findall(r"it is one of (.*)", done.stderr)
    known = {name for kind, name in INSTALLED if kind == benchmark} | ELSEWHERE[benchmark]
    assert set(names.split(", ")) == known | set(HERE[benchmark])

# SPDX-License-Identifier: Apache-2.0
"""Each experiment of each benchmark runs, in its shortest form. No figure is judged.

``make test-bench`` runs all of them, ``make test-all`` some of each benchmark.
"""

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
TOGETHER = {
    "aggregate": [
        *("rounds", "split", "staged", "gigabyte", "topology", "offload", "encodings"),
        *("strategies,udp_over_tcp,udp_accuracy",),
    ],
    "balance": ["a_virtual,b,sim,sim_error", "a_real", "exchange", "kill", "convergence"],
    "data": ["met_points", "met_speed", "streamed", "tuner,transforms", "accuracy,elastic"],
    "hosts": ["levels,flower,flower_kills,crowd", "scale", "launch_hosts"],
    "people": ["watchers,top,scrape,dashboard"],
    "privacy": ["inversion,membership,property,aimed", "masked", "dp"],
    "task": ["task_overhead,uint8_memory", "big_data", "prepare_over_import", "lora_bytes"],
    "train": ["host_models,sim_rounds_10000,lines", "round_over_floor"],
    "tunnel": ["tcp_python_over_relay", "pps_python_over_relay"],
    "volume": [
        *("device,device-small,fuse-python", "host-read,host-reread,host-random,host-write"),
        *("host-small-write,host-page-write,host-meta,host-list,untar,git,epoch,copy",),
        *("host-parallel,host-parallel-small",),
        *("slow-flash,stalled", "million-private,million-public,million-host"),
    ],
}
"""The experiments of each benchmark that one process does one after the other; of the tunnel, two figures."""
OFTEN = {
    ("aggregate", "encodings"),
    ("balance", "a_virtual,b,sim,sim_error"),
    ("data", "met_points"),
    ("hosts", "levels,flower,flower_kills,crowd"),
    ("privacy", "dp"),
    ("task", "lora_bytes"),
    *(("tunnel", names) for names in TOGETHER["tunnel"]),
    ("train", "round_over_floor"),
    ("volume", "device,device-small,fuse-python"),
    ("papers", "met"),
}
"""What ``make test-all`` runs, too."""
_RUN = [*INSTALLED, *((benchmark, names) for benchmark, found in TOGETHER.items() for names in found)]
_PAPERS = ["dpu-server", "firecaffe", "stannis", "met", "ember/fig-4,ember/fig-7"]

_DEVICES = ("/dev/fuse", "/dev/net/tun")
_CAN = shutil.which("cc") and all(os.access(path, os.R_OK | os.W_OK) for path in _DEVICES)
pytestmark = pytest.mark.skipif(not _CAN, reason=f"needs a C compiler and {' and '.join(_DEVICES)}")


def bench(benchmark: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    argv = [sys.executable, "-m", f"bench.{benchmark}", *arguments, "--output", "."]
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS)


def _marked(*case: str) -> object:
    """Return a case of full runs alone, in a group of its own: they do not wait for each other."""
    name = "-".join(case)
    marks = [pytest.mark.xdist_group(f"bench-{name}")]
    marks += [pytest.mark.full if case in OFTEN else pytest.mark.bench]
    marks += [pytest.mark.registry] if case in INSTALLED else []
    return pytest.param(*case, marks=marks, id=name)


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    ("benchmark", "names"),
    [("balance", "sim"), *(_marked(*case) for case in _RUN)],
)
def test_the_shortest_form_of_an_experiment_has_rows(benchmark: str, names: str, tmp_path: Path) -> None:
    files = ("--files", "300") if names.startswith("million") else ()
    done = bench(benchmark, "--quick", "--only", names, *files, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / f"{benchmark}.json").read_text())
    assert len({row["figure"] for row in rows}) == len(rows)
    for row in rows:
        assert row.keys() == KEYS
        assert row["figure"] in done.stdout or benchmark == "tunnel"  # its table has a line for each route
    measured = [row for row in rows if not _lacks_a_peer(row)]
    assert measured or names == "fuse-python"
    for row in measured:
        assert row["repeats"] and row["low"] <= row["value"] <= row["high"]


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(("papers", "paper"), [_marked("papers", paper) for paper in _PAPERS])
def test_the_shortest_form_of_a_paper_has_rows(papers: str, paper: str, tmp_path: Path) -> None:
    """Those of Ember that Ray is a peer of are left out: a test of its benchmark installs it."""
    done = bench(papers, "--quick", "--only", paper, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, result in json.loads((tmp_path / "papers.json").read_text()).items():
        assert result["rows"] or result["difference"].startswith("Not measured"), name
        assert not result["picture"] or (tmp_path / result["picture"]).stat().st_size, name


def _lacks_a_peer(row: dict[str, Any]) -> bool:
    """Return whether this machine lacks what `row` measures, or compares with, and the row says so."""
    says_so = row["what"].startswith("not measured: ") or row["what"].endswith(" is not installed")
    return row["value"] is None and says_so


@pytest.mark.bench
@pytest.mark.parametrize("benchmark", [name for name in TOGETHER if name != "tunnel"])
def test_no_experiment_is_left_out(benchmark: str, tmp_path: Path) -> None:
    done = bench(benchmark, "--only", "none of them", cwd=tmp_path)
    assert done.returncode == 2
    (names,) = re.findall(r"it is one of (.*)", done.stderr)
    known = {name for kind, name in INSTALLED if kind == benchmark}
    assert set(names.split(", ")) == known | {name for run in TOGETHER[benchmark] for name in run.split(",")}

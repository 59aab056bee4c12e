# SPDX-License-Identifier: Apache-2.0
"""How experiments are run: each has a limit of time, and one that fails keeps the others from nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys, threading, time
from pathlib import Path
from bench import harness
from bench.experiment import Experiment, Findings
from bench.rows import summary

def waits(run):
    try:
        threading.Event().wait()
    finally:
        print("cleaned up")

def never_ends(run):
    while True:
        try:
            time.sleep(60)
        except harness.LimitReachedError:
            pass

def ends(run):
    return Findings((summary("one", "a figure", [1.0], "x", peer=None, emulation=None),))
"""


def run(body: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own: signals and watchdogs belong to the whole of one."""
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    argv = [sys.executable, "-c", PROGRAM + body, str(path)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)


def test_an_experiment_that_waits_for_ever_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    done = run(
        """
chosen = [Experiment("stuck", "waits", waits, 0.2), Experiment("good", "ends", ends)]
found, whole = harness.run_all("x", chosen, quick=False, path=Path(sys.argv[1]))
sys.exit(whole)
""",
        tmp_path / "x.json",
    )
    assert done.returncode == 0, done.stderr
    assert "bench-x: stuck: it has not ended within 0.2 s" in done.stderr and "cleaned up" in done.stdout
    assert [row["figure"] for row in json.loads((tmp_path / "x.json").read_text())] == ["one"]


def test_one_that_does_not_clean_up_ends_the_process_and_shows_where_it_stands(tmp_path: Path) -> None:
    done = run("with harness.limited(0.1, cleanup=0.2): never_ends(None)", tmp_path)
    assert done.returncode == 1 and "in never_ends" in done.stderr


def test_a_failure_that_is_not_expected_is_not_hidden(tmp_path: Path) -> None:
    done = run(
        """
def fails(run):
    raise ValueError("a fault of the benchmark")
harness.run_all("x", [Experiment("bad", "fails", fails)], quick=True, path=Path(sys.argv[1]))
""",
        tmp_path / "x.json",
    )
    assert done.returncode == 1 and "ValueError: a fault of the benchmark" in done.stderr


def test_the_plain_server_leaves_no_part_of_a_value_in_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    from bench.aggregate.server import PlainServer, _Transfer

    near, far = socket.socketpair()
    with far:
        server = PlainServer([near.detach()], 3)
        (client,), transfer = server._clients, _Transfer()
        data = np.array([1, 2, 3], np.float32).tobytes()
        taken = []
        for start, stop in ((0, 6), (6, 7), (7, 12)):
            far.sendall(data[start:stop])
            taken.append(server._take(client, transfer))
            with pytest.raises(BlockingIOError):
                client.recv(1, socket.MSG_PEEK)
        assert taken == [4, 4, 12] and server._sum.tolist() == [1, 2, 3]
        client.close()

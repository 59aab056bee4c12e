"""Workers with batches of any size are one process with all their samples."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .lockstep_worker import BATCHES, STEPS

WORKER = Path(__file__).with_name("lockstep_worker.py")


def run(world: int) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with ExitStack() as undo:
        workers = []
        for rank in range(world):
            argv = [sys.executable, str(WORKER), str(rank), str(world), str(port)]
            worker = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            undo.enter_context(worker)
            undo.callback(worker.kill)
            workers.append(worker)
        answers = [worker.communicate(timeout=90) for worker in workers]
        assert all(worker.returncode == 0 for worker in workers), answers
    return [json.loads(output.splitlines()[-1]) for output, _ in answers]


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run(3)


def test_uneven_batches_are_exactly_one_big_batch(three: list[dict[str, Any]]) -> None:
    (one,) = run(1)
    for worker in three:
        assert worker["weights"] == pytest.approx(one["weights"], rel=0, abs=1e-6)
    assert three[0]["weights"] == three[1]["weights"] == three[2]["weights"]


def test_the_same_seed_gives_the_same_bits(three: list[dict[str, Any]]) -> None:
    assert three == run(3)


def test_everyone_sees_the_same_numbers(three: list[dict[str, Any]]) -> None:
    assert three[0]["seen"] == three[1]["seen"] == three[2]["seen"]
    for number, (samples, batches, seconds) in enumerate(three[0]["seen"]):
        assert samples == 16 and batches == BATCHES[3][number % 3] and seconds == [0.5, 1.5, 2.5]
    assert len(three[0]["seen"]) == STEPS

# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): kills a worker in mid-epoch; measures the time lost, and counts the samples missed."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from bench.balance.noise import random_work
from bench.balance.processes import Processes, processes
from bench.experiment import Experiment, Run
from bench.rows import Row, summary
from millpond.train.balance.ranges import Ranges
from millpond.train.job.spec import SynchronousSpec

WORKERS, PRIVATE, PUBLIC = 3, 400, 1200
BEFORE = 6  # steps before the kill


class Witness:
    """A supply that notes what of the one behind it is counted, as (rank or -1 for public, position)."""

    def __init__(self, team: Processes) -> None:
        self._supply = team.shards
        self._out: dict[int, tuple[Ranges, ...]] = {}
        self.counted_samples: Counter[tuple[int, int]] = Counter()

    @property
    def epoch(self) -> int:
        """See SampleSupply."""
        return self._supply.epoch

    @property
    def part_left(self) -> float:
        """See SampleSupply."""
        return self._supply.part_left

    def deal(self, batches: Sequence[int]) -> list[tuple[Ranges, ...]]:
        """See SampleSupply."""
        dealt = self._supply.deal(batches)
        self._out |= {rank: samples for rank, samples in enumerate(dealt) if any(samples)}
        return dealt

    def commit(self, rank: int) -> None:
        """See SampleSupply."""
        for owner, ranges in zip((rank, -1), self._out.pop(rank), strict=True):
            for start, stop in ranges:
                self.counted_samples.update((owner, position) for position in range(start, stop))
        self._supply.commit(rank)

    def requeue(self, rank: int) -> None:
        """See SampleSupply."""
        del self._out[rank]
        self._supply.requeue(rank)


def measure(run: Run) -> list[Row]:
    """Rows ``kill_seconds``, ``kill_samples_wrong``."""
    lost, wrong = [], []
    for repeat in range(1 if run.quick else 5):
        run.say(f"a worker killed: repeat {repeat + 1}")
        seconds, samples = _once(repeat)
        lost.append(seconds)
        wrong.append(float(samples))
    note = f"{WORKERS} real processes of one machine, without tunnels; the parameter server is a fourth"
    what = (
        "seconds that the step took longer in which one of three was killed with -9 than the median of those "
        "before"
    )
    missed = (
        f"of the samples that the others can read ({PUBLIC} public ones and their own {PRIVATE} each), those "
        "that did not count exactly once in the epoch"
    )
    return [
        summary("kill_seconds", what, lost, "s", emulation=note),
        summary("kill_samples_wrong", missed, wrong, "samples", emulation=note),
    ]


EXPERIMENT = Experiment("kill", "A worker killed in mid-epoch", measure)


def _once(seed: int) -> tuple[float, int]:
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as name:
        folder = Path(name)
        counts = {f"private{rank}": PRIVATE for rank in range(WORKERS)} | {"public": PUBLIC, "test": 10}
        with processes(random_work(folder, counts, SynchronousSpec(global_batch=96), seed), folder) as team:
            team.measure()
            witness = team.engine.supply = Witness(team)
            before = [team.step()[0] for _ in range(BEFORE)]
            usual = median(before)
            seconds = _step_with_kill(team, usual)
            for _ in team.rest_of_epoch():
                pass
            expected = {(-1, index) for index in range(PUBLIC)}
            expected |= {(rank, index) for rank in range(1, WORKERS) for index in range(PRIVATE)}
            wrong = sum(witness.counted_samples[sample] != 1 for sample in expected)
            return max(0.0, seconds - usual), wrong


def _step_with_kill(team: Processes, usual: float) -> float:
    """Kill the first worker's processes in the middle of a step; how long that step takes."""

    def kill() -> None:
        time.sleep(usual / 2)
        for process in reversed([psutil.Process(team.locals[0].pid), *_below(team.locals[0].pid)]):
            process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    seconds, outcome = team.step()
    killer.join()
    while not outcome.lost:  # it had answered already
        again, outcome = team.step()
        seconds = max(seconds, again)
    return seconds


def _below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)

# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): samples of epochs in which workers are killed and added, each counted by who trains.

Workers are processes that read from a data service in a process of its own, and hand over the labels of each
batch, which are the samples' indices, in one write to a pipe. The benchmark, as the process that trains,
counts them and tells the service.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import millpond.data
from bench.data.service import served
from bench.experiment import Run
from bench.rows import Row, summary
from millpond.data.streaming.client import StreamClient

TITLE = "samples counted while workers are killed and added"
_SAMPLES, _EPOCHS, _WORKERS = 3000, 20, 3


def measure(run: Run) -> list[Row]:
    """Count over 20 epochs, in each repeat."""
    wrong = [float(_wrong(run, repeat, 3 if run.quick else _EPOCHS)) for repeat in range(run.repeats)]
    about = f"samples not counted exactly once in {_EPOCHS} epochs with a worker killed and one added in each"
    return [summary("elastic_samples_wrong", about, wrong, "")]


class _Trainer:
    """Counts what workers hand over, and kills and adds workers."""

    def __init__(self, where: str, seed: int) -> None:
        self.stream = millpond.data.stream(f"{where}/set", batch=8, run=uuid.uuid4().hex, patience=10.0)
        self._where, self._random = where, random.Random(seed)
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self._names: dict[int, str] = {}
        self.counted: dict[int, Counter[int]] = {}
        self.killed = 0
        for _ in range(_WORKERS):
            self.add()

    def add(self) -> None:
        """Start a worker."""
        argv = [sys.executable, "-m", "bench.data.elastic", self._where, self.stream.run]
        worker = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert worker.stdout
        self.workers[worker.stdout.fileno()] = worker

    def kill(self) -> None:
        """Kill a worker that has handed something over, whatever it does."""
        ready = [number for number in self.workers if number in self._names]
        self.workers[self._random.choice(ready)].kill()
        self.killed += 1

    def train(self, epochs: int) -> None:
        """Count until all epochs are done; in each a worker is killed and one added at random moments."""
        with self.stream.connected("trainer", quiet=True) as client:
            for epoch in range(epochs):
                counted = self.counted.setdefault(epoch, Counter())
                moments = sorted(self._random.sample(range(50, _SAMPLES - 50), 2))
                deeds = [self.kill, self.add]
                self._random.shuffle(deeds)
                while counted.total() < _SAMPLES:
                    self._take(client)
                    while moments and counted.total() >= moments[0]:
                        moments.pop(0)
                        deeds.pop()()
            self._settle(client)

    def _settle(self, client: StreamClient) -> None:
        """See whether any comes twice."""
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            self._take(client, 0.1)

    def _take(self, client: StreamClient, seconds: float = 30.0) -> None:
        for number in select.select(list(self.workers), [], [], seconds)[0]:
            if not (data := os.read(number, 1 << 16)):
                worker = self.workers.pop(number)
                worker.stdout.close()  # type: ignore[union-attr]
                worker.wait()
                if name := self._names.pop(number, ""):
                    client.leave(name)
            for line in data.splitlines():
                self._count(client, number, json.loads(line))

    def _count(self, client: StreamClient, number: int, told: dict[str, Any]) -> None:
        self._names[number] = str(told["consumer"])
        self.counted.setdefault(told["epoch"], Counter()).update(told["labels"])
        ranges = tuple((start, stop) for start, stop in told["ranges"])
        client.finish(told["consumer"], told["epoch"], ranges)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers.values():
            worker.kill()
            worker.wait()
            worker.stdout.close()  # type: ignore[union-attr]


def _wrong(run: Run, seed: int, epochs: int) -> int:
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        root = Path(folder)
        (root / "set").mkdir()
        np.save(root / "set" / "images.npy", np.zeros((_SAMPLES, 16, 16), np.uint8))
        np.save(root / "set" / "labels.npy", np.arange(_SAMPLES))
        with served(folder, "--state", f"{folder}/state") as where:
            trainer = _Trainer(where, seed)
            try:
                trainer.train(epochs)
            finally:
                trainer.close()
    found = [abs(trainer.counted[epoch][index] - 1) for epoch in range(epochs) for index in range(_SAMPLES)]
    run.say(f"{epochs} epochs, {trainer.killed} workers killed: {sum(found)} samples wrong")
    return sum(found)


def main(where: str, run: str) -> None:
    """Be a worker: hand over batches until killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stream = millpond.data.stream(f"{where}/set", batch=8, run=run)
    while True:
        stream.turn = uuid.uuid4().hex
        for marked in stream:
            time.sleep(0.001)  # a step
            told = {"consumer": marked.consumer, "epoch": marked.epoch, "ranges": marked.ranges}
            line = json.dumps(told | {"labels": marked.batch[1].tolist()})
            os.write(1, line.encode() + b"\n")  # less than PIPE_BUF bytes: whole, or not at all


if __name__ == "__main__":
    main(*sys.argv[1:])

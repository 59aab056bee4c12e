# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, cgroups): measures training on images that are larger than the memory of a worker."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO

from bench.balance.cgroups import Cgroup, cgroup
from bench.experiment import Run, Unmeasured
from bench.rows import Row, summary
from bench.task import images, reader
from bench.task.reader import BATCH

LIMIT, TIMES = 400 << 20, 10
PREFETCH = (0, 2)
TITLE = "Training on images ten times as large as the memory"
_EVERY = 0.01
_TURNS = 2
_STARTED_IN = (
    "import runpy, sys; sys.stdin.readline(); sys.argv = sys.argv[1:]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_DATA = f"{LIMIT * TIMES >> 20} MiB of uint8 images, {images.SIDE}x{images.SIDE} each"
_HELD = (
    f"a worker's training role with a linear model reads {_DATA}, once and in random order, in a cgroup of "
    f"{LIMIT >> 20} MiB; of the group, over its limit, the most that the kernel cannot take back: anonymous "
    f"memory, memfds and tmpfs, sampled each {1000 * _EVERY:g} ms, from the start of the interpreter on"
)
_USED = (
    "the most memory of the same group over its limit, with what the kernel had cached of the images; at 1 "
    "it had to drop some of them. Processes of the group that the kernel has killed: {}"
)
_SPEED = (
    f"samples/s of local training, the demo's CNN for this side, one thread, on {BATCH} random ones of "
    f"{_DATA}, which the kernel has dropped from its cache; no limit"
)


@dataclass(frozen=True, slots=True)
class Trained:
    """What one process did: samples, seconds; of its group: bytes held and used at most, processes killed."""

    samples: int
    seconds: float
    held: int
    used: int
    killed: int


def measure(run: Run) -> list[Row]:
    """Rows ``big_data_rss``, ``big_data_used``, and ``big_data_speed`` with the better number of threads that
    read ahead, and with each.
    """
    count = LIMIT * TIMES // images.IMAGE
    with images.folder(count) as folder:
        return [*_memory(run, folder, count // 16 if run.quick else 0), *_speeds(run, folder)]


def _memory(run: Run, folder: Path, samples: int) -> list[Row]:
    found: list[Trained] = []
    missing = ""
    for prefetch in PREFETCH[: run.repeats]:  # each reads everything
        images.forget(folder)
        try:
            with cgroup("millpond-bench-data", "memory") as group:
                found.append(_trained(folder, prefetch, samples, group))
        except Unmeasured as error:
            run.say(f"no cgroups: {error}")
            missing = f"not measured: {error}"
            break
        last = found[-1]
        told = f"{last.samples} samples in {last.seconds:.0f} s, {last.held >> 20} MiB held"
        run.say(f"prefetch {prefetch}: {told}, {last.used >> 20} with the cache, {last.killed} killed")
    held, used = [each.held / LIMIT for each in found], [each.used / LIMIT for each in found]
    text = _USED.format(sum(each.killed for each in found))
    return [
        summary("big_data_rss", missing or _HELD, held, "x"),
        summary("big_data_used", missing or text, used, "x"),
    ]


def _speeds(run: Run, folder: Path) -> list[Row]:
    shares: dict[int, list[float]] = {threads: [] for threads in PREFETCH}
    turns = (1 if run.quick else _TURNS) * run.repeats
    with images.folder(turns * BATCH) as small:
        inside = reader.role(small, "cnn", 0)
        outside = {threads: reader.role(folder, "cnn", threads) for threads in PREFETCH}
        reader.train(inside, 0, BATCH)
        for turn in range(turns):
            images.forget(folder)
            start = turn * BATCH
            seconds = reader.train(inside, start, start + BATCH).seconds
            for number, (threads, role) in enumerate(outside.items()):
                first = (turn * len(outside) + number) * BATCH  # read by nobody before
                shares[threads].append(seconds / reader.train(role, first, first + BATCH).seconds)
            told = ", ".join(f"prefetch {threads} {found[-1]:.3f}" for threads, found in shares.items())
            run.say(f"from memory {BATCH / seconds:.1f} samples/s; of that {told}")
    peer = "the same training on as many images in memory, prefetch 0"
    best = max(shares, key=lambda threads: median(shares[threads]))
    rows = [("big_data_speed", best), *((f"big_data_speed.{threads}", threads) for threads in shares)]
    return [
        summary(key, f"{_SPEED}; prefetch {threads}", shares[threads], "x", peer=peer)
        for key, threads in rows
    ]


def _trained(folder: Path, prefetch: int, samples: int, group: Cgroup) -> Trained:
    """Train in a process of its own. Raises RuntimeError if that fails."""
    with _reader(folder, prefetch, samples) as process:
        assert process.stdin
        assert process.stdout
        group.limit_memory(LIMIT)
        group.add(process.pid)
        _go_on(process.stdin)
        held = _most_held(group, process.stdout)
        _line(process.stdout)
        _go_on(process.stdin)
        held = max(held, _most_held(group, process.stdout))
        done, seconds = _line(process.stdout)
        return Trained(int(done), seconds, held, group.most_memory(), group.out_of_memory())


def _most_held(group: Cgroup, stream: IO[str]) -> int:
    """Return the most bytes that the group holds until there is a line."""
    held = 0
    while not select.select([stream], [], [], _EVERY)[0]:
        held = max(held, group.held_memory())
    return held


@contextmanager
def _reader(folder: Path, prefetch: int, samples: int) -> Iterator[subprocess.Popen[str]]:
    """The process, which does nothing before it is told to go on: memory that it has by then is not the
    group's.
    """
    told = ["bench.task.reader", str(folder), str(prefetch), str(samples)]
    argv = [sys.executable, "-c", _STARTED_IN, *told]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _go_on(stream: IO[str]) -> None:
    stream.write("\n")
    stream.flush()


def _line(stream: IO[str]) -> list[float]:
    """Return the numbers of the next line. Raises RuntimeError at the end."""
    if not (line := stream.readline()):
        raise RuntimeError("the worker has ended before its answer")
    return [float(word) for word in line.split()]

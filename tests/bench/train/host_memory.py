# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, /proc): measures what a model costs the host in memory, with few workers and many."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO

import psutil

from bench.experiment import Run
from bench.rows import Row, summary
from bench.train.simulated_host import VALUES

WORKERS = (3, 100)
TITLE = "Memory of the host's processes for a job's model, in models"
_IDLE_SAMPLES = 20
_PHASES = ("building", "rounds", "saving")
_EMULATION = (
    "daemon: a process with its engine, reduction, workers, dispatchers and parameter server; devices: "
    "threads of another process that speak the agents' messages over Unix sockets"
)
_COUNTED = (
    "peak of the daemon's process, the zygote and the parameter server together, above the same processes "
    "after three rounds with a model of 3 values and as many workers: PSS of anonymous memory, plus the "
    f"pages of each memfd once, sampled without pause; model: {4 * VALUES / 1e6:.1f} MB, server's optimizer: "
    "SGD without momentum; what the kernel buffers for sockets is not in it"
)
_WHAT = {
    "building": "while the parameter server and its model are made",
    "rounds": "in rounds that wait for all",
    "saving": "while a checkpoint is written",
}


def measure(run: Run) -> list[Row]:
    """Row ``host_models``, and one for each number of workers and phase."""
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(run.repeats):
        for workers in WORKERS:
            peaks = _peaks(workers, 4 if run.quick else 12)
            for phase, models in peaks.items():
                found.setdefault((workers, phase), []).append(models)
            shown = ", ".join(f"{phase} {models:.2f}" for phase, models in peaks.items())
            run.say(f"{workers} workers: {shown} models")
    worst = max(WORKERS, key=lambda workers: median(found[workers, "rounds"]))
    rows = [_row("host_models", worst, "rounds", found[worst, "rounds"])]
    rows += [
        _row(f"host_models.{workers}{'' if phase == 'rounds' else f'.{phase}'}", workers, phase, values)
        for (workers, phase), values in found.items()
    ]
    return rows


def _row(figure: str, workers: int, phase: str, values: list[float]) -> Row:
    what = f"{workers} workers, {_WHAT[phase]}: {_COUNTED}"
    return summary(figure, what, values, "models", emulation=_EMULATION)


def _peaks(workers: int, rounds: int) -> dict[str, float]:
    """The most models by phase. Raises RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as name, _host(workers, rounds, name) as host:
        _await(host, "building")
        idle = median(_footprint(host.pid) for _ in range(_IDLE_SAMPLES))
        peaks = {}
        for phase, after in zip(_PHASES, (*_PHASES[1:], "end"), strict=True):
            _go_on(host)
            peak = max(_sampled(host))
            _await(host, after)
            peaks[phase] = (peak - idle) / (4 * VALUES)
        _go_on(host)
        return peaks


@contextmanager
def _host(workers: int, rounds: int, folder: str) -> Iterator[subprocess.Popen[str]]:
    """The host's process, with its devices in another."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(4 * workers)]
        ours, theirs = ([pair[side].fileno() for pair in pairs] for side in (0, 1))
        with ExitStack() as passed:
            for pair in pairs:
                for sock in pair:
                    passed.enter_context(sock)
            stack.enter_context(program("simulated_devices", [VALUES], theirs))
            host = stack.enter_context(program("simulated_host", [workers, rounds, folder], ours))
        yield host
        if host.wait(60):
            raise RuntimeError("the simulated host failed")


@contextmanager
def program(name: str, told: Iterable[object], descriptors: list[int]) -> Iterator[subprocess.Popen[str]]:
    """Run a module of this folder with these arguments and descriptors inside the context."""
    argv = [sys.executable, "-m", f"bench.train.{name}", *map(str, [*told, *descriptors])]
    process = subprocess.Popen(
        argv, pass_fds=descriptors, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream
    return stream


def _await(host: subprocess.Popen[str], phase: str) -> None:
    line = _stream(host.stdout).readline().strip()
    if line != phase:
        raise RuntimeError(f"the simulated host has ended before '{phase}'")


def _go_on(host: subprocess.Popen[str]) -> None:
    _stream(host.stdin).write("\n")
    _stream(host.stdin).flush()


def _sampled(host: subprocess.Popen[str]) -> Iterator[int]:
    """Bytes in use, again and again, until the host tells that a phase is over."""
    while True:
        yield _footprint(host.pid)
        if select.select([_stream(host.stdout)], [], [], 0)[0]:
            return


def _footprint(pid: int) -> int:
    """Bytes in use by a process and all below it, those that they share once."""
    process = psutil.Process(pid)
    files: dict[int, int] = {}
    total = 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total += _private(each.pid)
            files |= _memory_files(each.pid)
    return total + sum(files.values())


def _private(pid: int) -> int:
    """Bytes of a process that belong to no file, its part of those that it shares with its forks. (Its part
    of a library would change whenever a stranger that has loaded it ends.)
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("this kernel does not tell the parts of smaps_rollup: Linux 5.9 does")


def _memory_files(pid: int) -> dict[int, int]:
    """Bytes in memory of each memfd that a process has open, by inode."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            if str(path.readlink()).startswith("/memfd:"):
                status = path.stat()
                found[status.st_ino] = 512 * status.st_blocks
    return found

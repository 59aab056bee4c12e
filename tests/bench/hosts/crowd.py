# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, the clock): a job of 256 workers, with the daemon's own engine and stand-in devices."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil

from bench.experiment import Experiment, Run
from bench.rows import Row, summary
from bench.train.host_memory import program
from bench.train.simulated_host import TINY, TINY_CODE, Rounds
from millpond.linux.descriptors import allow_most
from millpond.train.job.spec import DataSpec, Job
from millpond.train.worker.start import workers_zygote

WORKERS, QUICK_WORKERS = 256, 16
_ROUNDS, _VALUES = 20, 3
_EMULATION = (
    "the host's engine, dispatchers, reduction and parameter server are the daemon's own; devices are "
    "threads of one process that speak the agents' messages over Unix sockets, without tunnel, TLS and model"
)


def measure(run: Run) -> Sequence[Row]:
    """Return rows of the time of a start, a round and an end, and of what each worker takes."""
    count = QUICK_WORKERS if run.quick else WORKERS
    allow_most()
    own = psutil.Process()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-bench-")))
        folder.chmod(0o755)  # its parameter server is of another user
        (folder / "tiny.py").write_text(TINY_CODE)
        zygote = workers_zygote(600.0)
        stack.callback(zygote.close)
        descriptors = stack.enter_context(_devices(count))
        job = Job("tiny", DataSpec("private/digits", str(folder)), TINY)
        threads, memory = threading.active_count(), own.memory_info().rss
        began = time.monotonic()
        rounds = Rounds(job, folder, zygote, descriptors)
        start = time.monotonic() - began
        taken = [_seconds(rounds) for _ in range(3 if run.quick else _ROUNDS)]
        more = (threading.active_count() - threads, own.memory_info().rss - memory)
        began = time.monotonic()
        rounds.close()
        end = time.monotonic() - began
    run.say(f"{count} workers: a round takes {1e3 * min(taken):.0f} ms")
    row = partial(summary, emulation=_EMULATION)
    name, about = f"job_{count}", f"a job of {count} workers with a model of {_VALUES} values"
    return [
        row(f"{name}_start_s", f"{about}: its start, with torch", [start], "s"),
        row(f"{name}_round_ms", f"{about}: a round", [1e3 * seconds for seconds in taken], "ms"),
        row(f"{name}_stop_s", f"{about}: its end", [end], "s"),
        row(f"{name}_threads_per_worker", f"{about}: threads of the host", [more[0] / count], "threads"),
        row(f"{name}_mib_per_worker", f"{about}: memory", [more[1] / count / (1 << 20)], "MiB"),
    ]


EXPERIMENT = Experiment("crowd", "A job of many workers", measure, seconds=600, figures=("job_256",))


def _seconds(rounds: Rounds) -> float:
    began = time.monotonic()
    rounds.run(1)
    return time.monotonic() - began


@contextmanager
def _devices(count: int) -> Iterator[list[int]]:
    """Run the stand-ins; yields two connections for each of them."""
    pairs = [socket.socketpair() for _ in range(2 * count)]
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    with program("simulated_devices", [_VALUES], [sock.fileno() for sock in theirs]):
        for sock in theirs:
            sock.close()
        yield [sock.detach() for sock in ours]
